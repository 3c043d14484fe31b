"""Finds the line in the output of a failed process that gives the reason of its exit."""

import re
import signal

ERROR = "error: "
"""Prefix of the line in which a command reports a deliberately raised error."""
MAX_REASON = 500
"""Longest reason, in characters."""
RAISED = 4
"""Exit codes from 1 to this one follow an exception; higher codes are chosen by the program."""
RANK = re.compile(r"^\[rank\d+\]: ?", re.M)
"""Torch writes this before each line of a rank's traceback."""
GROUP = re.compile(r"^ +\+ Exception Group Traceback.*^ +\+-+$", re.M | re.S)
MARGIN = re.compile(r"^ +(\| ?|(?=\+))", re.M)
"""Begins each line of an exception group, borders included."""
REASON = re.compile(
    r"""^(?:(Exception\ ignored\ in.*\n)?  # printed by Python; not the cause of the exit
    (?:(?:\+\ Exception\ Group\ |Exception\ Group\ )?Traceback\ \(most|\ +File\ ").*\n(?:\ .*\n|\n)*
    |\+[-+]+\ [\d.]+\ -+\n(?!Traceback|Exception\ Group\ T))  # a leaf without frames
    ([\w.]+:\s+\S.*|\S.*)  # a message may begin with empty lines
    |^((?:error|Fatal\ Python\ error):\ .*)""",
    re.M | re.X,
)
NO_LEAF = re.compile(r"\(\d+ sub-exceptions?\)$|^and \d+ more exceptions?$|^\.\.\. \(max_group")
ABORTS = re.compile(r"^\s*((?:Fatal Python error:|what\(\):|\w+\(\): |.*Assertion `).*)", re.M)
"""Lines that C and C++ code write before they abort the process."""


def exit_reason(output: str, code: int) -> str:
    """Return the line of `output` that gives the reason for an end with `code`, "" for none.

    For a traceback, this is the line of the last exception, without its notes and the further lines
    of its message; for an exception group, the line of the last leaf. A process that was killed by
    SIGKILL, for example for lack of memory, could not write a reason.

    Args:
        output: What the process wrote.
        code: Its exit code; for a death by signal, the signal's number below zero.
    """
    candidates = _candidates(output, code)
    return " ".join(candidates[-1].split())[:MAX_REASON] if candidates else ""


def _candidates(output: str, code: int) -> list[str]:
    """Return the lines that may give the reason; the last one does."""
    lines = [line for line in output.splitlines() if line.strip()]
    if code == -signal.SIGKILL:
        return []
    if code < 0:
        aborts = ABORTS.findall(output)
        return aborts or lines if code == -signal.SIGABRT else aborts
    if code > RAISED:
        return lines
    without_ranks = RANK.sub("", output)
    plain = GROUP.sub(lambda group: MARGIN.sub("", group[0]), without_ranks)
    reasons: list[str] = []
    for match in REASON.finditer(plain):
        ignored, exception, error = match.groups()
        line = exception or error
        if not ignored and not NO_LEAF.search(line):
            reasons.append(line)
    return reasons or lines
