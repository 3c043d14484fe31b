"""The process that checks answers: a parent forks a child for the checks.

Some answers make a check run forever, and only killing the child ends it. Forking a new child takes
milliseconds; a new process would need a second to load math-verify. The parent loads it for the
first check that needs it: numbers without a box do not. `math_verify.py` runs this file as a
script; it imports no module of the package.

A request is one line of JSON on stdin: [completion, truth, CPU seconds, seconds to wait]. The
answer is one line on stdout: true or false; null if the truth cannot be parsed; or the failure of
the child. "cpu": the check used its CPU seconds. "crashed": the child exited. "killed": another
process killed the child. "waited": after the seconds to wait, the check had neither finished nor
used its CPU seconds.

The answer in a completion is

1. its last mark: a `\\boxed{…}` or a `####` line. Boxes side by side are one answer. A `####` line
   with letters in it is a heading unless it ends the completion;
2. without a mark, the first number after the last "answer is", "answer:" or the like;
3. otherwise the last number; if the truth is no number, the last expression that math-verify finds.

If the truth is a number, the answer must be one computed number: `35+8`, `86/2`, `40 or 43` and
`{40, 43}` are no answers. math-verify compares everything else.
"""

import ctypes
import json
import logging
import multiprocessing
import os
import re
import resource
import signal
import sys
from contextlib import suppress
from fractions import Fraction
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from typing import Any, NamedTuple

MEMORY_BYTES = 2 << 30
PR_SET_PDEATHSIG = 1
NOT_LOADED = "not loaded"
"""Answer of a child whose check raised NotLoaded."""
ENDS = {-signal.SIGPROF: "cpu", -signal.SIGKILL: "killed"}
"""The failure for each exit code of a child; any other code is "crashed"."""

DIGITS = r"(?:(?:\d{1,3}(?:[ ,]\d{3})++(?!\d)|\d++)(?:\.\d++)?|\.\d++)"
NOT_UNITS = r"or|and|to|nor|vs|pi|plus|minus|times|over|hundred|thousand|[mbtr]\w*illion|dozen"
UNIT = (
    rf"(?! ?(?:{NOT_UNITS})\b)(?: ?(?:[mgshl]|[cdkmn]m|k?mph|[km]g|lbs?|ft|oz|[ap]m|hrs?)"
    r"| [a-z]{2,}|[a-z]{4,})(?![a-z])(?:\^?[23]\b|[/.](?!$))?"
)
LITERAL = re.compile(
    rf"([-+]?) ?(?:(\d+) (?=\d+ ?/))?({DIGITS})(?: ?/ ?(\d+))?"
    r"(?:(?: ?(?:\*|×|\\times|\\cdot) ?10 ?(?:\^|\*\*) ?|e)([-+]?\d{1,3}))?"
    rf" ?(%|percent\b)?(?:{UNIT}){{0,3}}",
    re.ASCII | re.IGNORECASE,
)
"""Matches a text that is one number. Groups: sign, whole part of a mixed number, digits,
denominator, power of ten, percent. Up to three words of units may follow."""
JOINED = (
    r"(?: ?(?:[-+*/^=×÷,;|&]|\\(?:times|cdot|div)(?![a-z])|(?: ?[a-z]+)?,? ?\b(?:or|and|to)\b)"
    r"| (?=\d))+ ?(?:[a-z] ?= ?)?[-+(]{0,3}"
)
RUN = re.compile(
    rf"(?<![\w.^\\])[-+]?\({{0,3}}{DIGITS}(?: ?%)?\)*+(?:{JOINED}{DIGITS}(?: ?%)?\)*+)*",
    re.ASCII | re.IGNORECASE,
)
"""Matches numbers in prose that only operators or separators separate, as one run."""
HEDGE = re.compile(r"(?:[,;|]|\b(?:or|and)\b) ?[a-z]? ?$", re.ASCII | re.IGNORECASE)
"""Matches the text before the last "=" if it offers several values: `x=40 or x`."""
ANCHOR = re.compile(r"\banswers?\b[^.!?\n]{0,40}?(?:\b(?:is|are|be)\b|[:=])", re.IGNORECASE)
HASHES = re.compile(r"^[ \t]*####(?!#)(.+)$", re.MULTILINE)
PLAIN = (
    (r"[ \t]+", " "),
    (r"\\[dtc]?frac *(?:\{ *(-?\d+) *\}|(\d)) *(?:\{ *(\d+) *\}|(\d))", r" \1\2/\3\4 "),
    (r"\\(?:text|math|mbox)[a-z]* *\{", " "),
    (r"\\(?:left|right|displaystyle)(?![a-z])|\\[,!]|[{}]", ""),
    (r"([-+]) *\\?[$€£¥]", r"\1"),
    (r"\^? *(?:\\circ(?![a-z])|°)|\\[;: ()\[\]$]|[$€£¥~\u00a0\u2009\u202f]", " "),
    (r"\\approx|≈", "="),
    ("\u2212", "-"),
    (r"\\%", "%"),
    (r"[ \t]+", " "),
)
"""(pattern, replacement) pairs that remove formatting and keep the value of each number."""


class NotLoaded(Exception):
    """A check in a child needs math-verify, which the parent has not loaded."""


class Number(NamedTuple):
    """A number, and its notation."""

    quantity: Fraction
    has_decimal_point: bool
    is_percentage: bool
    """If so, `quantity` is the number before the percent sign."""


def is_equal(completion: str, truth: str) -> bool | None:
    """Return whether the answer in `completion` equals `truth`; None if `truth` cannot be parsed.

    Args:
        completion: The text of the model.
        truth: An answer, LaTeX or plain, or a solution with a mark.
    """
    marked_answer = marked(completion)
    marked_truth = marked(truth)
    if marked_truth is not None:
        truth = marked_truth
    true_number = number(truth)
    if true_number is None:
        return is_equal_expression(completion, marked_answer, truth)
    if marked_answer is None:
        return same(in_prose(completion), true_number)
    return same(number(marked_answer), true_number)


def is_equal_expression(completion: str, marked_answer: str | None, truth: str) -> bool | None:
    """Return whether math-verify finds an answer equal to `truth`; None if it cannot parse `truth`.

    Args:
        completion: The text of the model.
        marked_answer: The text in the last mark of the completion; None without a mark.
        truth: An answer that is no number.
    """
    math_verify = library()
    parse: Any = math_verify.parse  # None, no limit, is allowed and documented, but not typed
    verify: Any = math_verify.verify
    boxed_truth = f"\\boxed{{{truth}}}"
    true_expressions = parse(boxed_truth, fallback_mode="no_fallback", parsing_timeout=None)
    if not true_expressions:
        true_expressions = parse(truth, parsing_timeout=None)
    if marked_answer is None:
        answer = after_last_anchor(completion)
    else:
        answer = f"\\boxed{{{marked_answer}}}"
    answer_expressions = parse(answer, parsing_timeout=None)
    if not true_expressions:
        return None
    return bool(verify(true_expressions, answer_expressions, timeout_seconds=None))


def after_last_anchor(completion: str) -> str:
    """Return "answer:" and the text after the last anchor; without an anchor, the whole text.

    The word "answer" is removed from the text: math-verify would take "answered" for an anchor.
    """
    *before_anchors, after_anchor = ANCHOR.split(completion)
    without_anchors = re.sub("(?i)answer", "", after_anchor)
    return f"answer:{without_anchors}" if before_anchors else without_anchors


def marked(solution: str) -> str | None:
    """Return the text in the last mark (a box or a `####` line); None without a mark."""
    last_box = max(solution.rfind("\\boxed"), solution.rfind("\\fbox"))
    lines_after_box = [*HASHES.finditer(solution, last_box + 1)]
    for line in reversed(lines_after_box):
        is_last_line = not solution[line.end() :].strip()
        has_letters = re.search("[A-Za-z]", line[1])
        if is_last_line or not has_letters:
            return line[1]
    if last_box < 0:
        return None
    library()
    from latex2sympy2_extended.math_normalization import extract_boxed_content

    return extract_boxed_content(solution)


def library() -> Any:
    """Return math-verify.

    Raises:
        NotLoaded: This is a child: loading would count as CPU time of its check.
    """
    if multiprocessing.parent_process() and "math_verify" not in sys.modules:
        raise NotLoaded
    import math_verify

    return math_verify


def in_prose(completion: str) -> Number | None:
    """Return the number that a text without a mark gives as its answer; None if it gives none."""
    prose = plain(completion)
    runs = [*RUN.finditer(prose)]
    if not runs:
        return None
    answer_run = runs[-1]
    anchors = [match for match in ANCHOR.finditer(prose) if match.end() <= answer_run.start()]
    if anchors:
        last_anchor_end = anchors[-1].end()
        answer_run = next(run for run in runs if run.start() >= last_anchor_end)
    return number(answer_run[0].strip("()"))


def number(expression: str) -> Number | None:
    """Return the number that a text consists of; None for anything else.

    The text may be an equation that ends with "= " and the number. An integer that is written as a
    fraction is no number but a computation: `86/2`.
    """
    left_side, _, right_side = plain(expression).rpartition("=")
    literal = LITERAL.fullmatch(right_side.strip(" \n*_`").rstrip(" \n.*_`"))
    if literal is None or HEDGE.search(left_side):
        return None
    sign, whole_part, digits, denominator, power_of_ten, percent = literal.groups()
    magnitude = Fraction(re.sub("[ ,]", "", digits))
    if denominator:
        if int(denominator) == 0:
            return None
        magnitude /= int(denominator)
        if magnitude.denominator == 1:
            return None
    magnitude += int(whole_part or 0)
    magnitude *= Fraction(10) ** int(power_of_ten or 0)
    return Number(
        -magnitude if sign == "-" else magnitude,
        has_decimal_point="." in digits,
        is_percentage=bool(percent),
    )


def same(answer: Number | None, truth: Number) -> bool:
    """Return whether two numbers are equal, to six decimals if one has a decimal point.

    50 % equals 50 and 0.5.
    """
    if answer is None:
        return False
    tolerance = Fraction(0)
    if answer.has_decimal_point or truth.has_decimal_point:
        tolerance = min(Fraction(1, 10**6), abs(truth.quantity) / 1000)
    percent_scale = Fraction(100) ** (truth.is_percentage - answer.is_percentage)
    return any(
        abs(answer.quantity * scale - truth.quantity) <= tolerance for scale in (1, percent_scale)
    )


def plain(formatted: str) -> str:
    """Return a text without LaTeX commands, currencies and the like around its numbers."""
    for pattern, replacement in PLAIN:
        formatted = re.sub(pattern, replacement, formatted)
    return formatted


def main() -> None:
    """Answer requests with a child until the end of stdin; fork a new child after a failure."""
    die_with_parent(os.getppid())
    for terminal_signal in (signal.SIGINT, signal.SIGHUP):  # sent to the terminal's whole group
        signal.signal(terminal_signal, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    logging.disable(logging.CRITICAL)
    sys.set_int_max_str_digits(0)
    child = CheckerChild()
    for line in sys.stdin.buffer:
        *question, wait_s = json.loads(line)
        answer = child.ask(question, wait_s)
        if answer == NOT_LOADED:
            is_equal("$\\frac{x}{2}$", "x/2")  # loads all that a comparison needs
            answer = child.ask(question, wait_s)
        answers.write(json.dumps(answer).encode() + b"\n")


class CheckerChild:
    """The child of the checker; after a failure, the next check has a new one."""

    def __init__(self) -> None:
        self._process: ForkProcess | None = None
        self._pipe: Connection | None = None

    def ask(self, question: list[Any], wait_s: float) -> bool | str | None:
        """Return the answer of a check, or its failure."""
        if self._process is None or self._pipe is None:
            self._process, self._pipe = start_child()
        try:
            self._pipe.send(question)
            answer = self._pipe.recv() if self._pipe.poll(wait_s) else "waited"
        except (EOFError, OSError):
            self._process.join()
            answer = ENDS.get(self._process.exitcode or 0, "crashed")
        if isinstance(answer, str):
            self._process.kill()
            self._process.join()
            self._process = None
        return answer


def start_child() -> tuple[ForkProcess, Connection]:
    """Fork a child; return its process and the parent's end of the pipe to it."""
    context = multiprocessing.get_context("fork")
    parent_pipe, child_pipe = context.Pipe()
    process = context.Process(
        target=serve, args=(child_pipe, parent_pipe, os.getpid()), daemon=True
    )
    process.start()
    child_pipe.close()
    return process, parent_pipe


def serve(pipe: Connection, parent_pipe: Connection, parent_pid: int) -> None:
    """Run checks in a child; SIGPROF kills it when a check exceeds its CPU seconds."""
    die_with_parent(parent_pid)
    parent_pipe.close()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    with suppress(EOFError, ConnectionError):
        while True:
            completion, truth, cpu_s = pipe.recv()
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
            try:
                verdict = is_equal(completion, truth)
            except NotLoaded:
                verdict = NOT_LOADED
            signal.setitimer(signal.ITIMER_PROF, 0)
            pipe.send(verdict)


def die_with_parent(parent_pid: int) -> None:
    """Request SIGKILL for this process when its parent exits (Linux only).

    On other systems, the closed pipe ends the process.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:
            os._exit(1)


if __name__ == "__main__":
    main()
