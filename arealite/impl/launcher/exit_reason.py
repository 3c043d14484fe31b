"""Finds the line in the output of a failed process that gives the reason of its exit."""

import re
import signal

ERROR = "error: "
"""Prefix of the line in which a command reports a deliberately raised error."""
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
    found = [line for line in output.splitlines() if line.strip()]
    if code < 0:
        aborts = ABORTS.findall(output)
        found = {-signal.SIGKILL: [], -signal.SIGABRT: aborts or found}.get(code, aborts)
    elif code <= RAISED:
        plain = GROUP.sub(lambda group: MARGIN.sub("", group[0]), RANK.sub("", output))
        reasons = [m[2] or m[3] for m in REASON.finditer(plain) if not m[1]]
        found = [line for line in reasons if not NO_LEAF.search(line)] or found
    return " ".join(found[-1].split())[:500] if found else ""
