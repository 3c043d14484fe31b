"""The reason for which a process ended that wrote no record: a line of its output.

That is another program, or native code that aborted. A process of AReaLite writes a record
(`base/exit_record.py`).
"""

import signal

from arealite.base.exit_record import ERROR, MAX_REASON

RAISED = 4
"""Exit codes from 1 to this one follow an exception; higher codes are chosen by the program."""
TRACEBACK = "Traceback (most recent call last)"
ABORTS = ("Fatal Python error:", "what():", "free():", "malloc():", "corrupted ")
"""Beginnings of lines that C and C++ code write before they abort the process."""
ASSERTION = "Assertion `"


def exit_reason(output: str, code: int) -> str:
    """Return the line of `output` that gives the reason for an end with `code`, "" for none.

    It is a hook `exit_reason`.
    A process that was killed by SIGKILL, for example for lack of memory, could not write a reason.

    Args:
        output: What the process wrote.
        code: Its exit code; for a death by signal, the signal's number below zero.
    """
    lines = [line for line in map(_without_rank, output.splitlines()) if line.strip()]
    candidates: list[str] = []
    if code == -signal.SIGABRT:
        candidates = _abort_lines(lines) or lines
    elif code < 0:
        candidates = [] if code == -signal.SIGKILL else _abort_lines(lines)
    elif code <= RAISED:
        candidates = _exception_lines(lines) or lines
    else:
        candidates = lines
    return " ".join(candidates[-1].split())[:MAX_REASON] if candidates else ""


def _without_rank(line: str) -> str:
    """Return a line without "[rank0]: ", which torch writes before each line of a traceback."""
    label, separator, rest = line.partition("]: ")
    is_labelled = separator and label.startswith("[rank") and label[5:].isdecimal()
    return rest if is_labelled else line


def _without_margin(line: str) -> str:
    """Return a line of an exception group without the group's margin; other lines unchanged."""
    stripped_line = line.lstrip(" ")
    if stripped_line.startswith("+ "):  # the first line of a group's traceback
        return stripped_line.removeprefix("+ ").removeprefix("Exception Group ")
    if stripped_line.startswith("+-"):
        return stripped_line
    return stripped_line[2:] if stripped_line.startswith("| ") else line


def _abort_lines(lines: list[str]) -> list[str]:
    """Return the lines of native code that aborts."""
    stripped_lines = [line.strip() for line in lines]
    return [line for line in stripped_lines if line.startswith(ABORTS) or ASSERTION in line]


def _exception_lines(lines: list[str]) -> list[str]:
    """Return the line behind each traceback, and each line that reports a deliberate error.

    In an exception group, a numbered border begins each exception, with or without a traceback.
    """
    reasons: list[str] = []
    is_in_traceback = False
    for margin_line in lines:
        line = _without_margin(margin_line)
        is_numbered_border = line.startswith("+-") and any(map(str.isdigit, line))
        if line.startswith(TRACEBACK) or is_numbered_border:
            is_in_traceback = True
        elif is_in_traceback and not line.startswith(" "):
            reasons.append(line)
            is_in_traceback = False
        elif line.startswith(ERROR):
            reasons.append(line)
    return reasons
