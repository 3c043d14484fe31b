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
from typing import Any

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


def is_equal(completion: str, truth: str) -> bool | None:
    """Return whether the answer in `completion` equals `truth`; None if `truth` cannot be parsed.

    Args:
        completion: The text of the model.
        truth: An answer, LaTeX or plain, or a solution with a mark.
    """
    answer = marked(completion)
    due = marked(truth)
    truth = truth if due is None else due
    if (gold := number(truth)) is not None:
        return same(in_prose(completion) if answer is None else number(answer), gold)
    math_verify = library()
    parse: Any = math_verify.parse  # None, no limit, is allowed and documented, but not typed
    verify: Any = math_verify.verify
    golds = parse(f"\\boxed{{{truth}}}", fallback_mode="no_fallback", parsing_timeout=None)
    golds = golds or parse(truth, parsing_timeout=None)
    said = f"\\boxed{{{answer}}}"
    if answer is None:  # "answered" and the like would count as anchors of math-verify
        *before, said = ANCHOR.split(completion)
        said = "answer:" * bool(before) + re.sub("(?i)answer", "", said)
    found = parse(said, parsing_timeout=None)
    return bool(verify(golds, found, timeout_seconds=None)) if golds else None


def marked(text: str) -> str | None:
    """Return the text in the last mark (a box or a `####` line); None without a mark."""
    box = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    for line in reversed([*HASHES.finditer(text, box + 1)]):
        if not text[line.end() :].strip() or not re.search("[A-Za-z]", line[1]):
            return line[1]
    if box < 0:
        return None
    library()
    from latex2sympy2_extended.math_normalization import extract_boxed_content

    return extract_boxed_content(text)


def library() -> Any:
    """Return math-verify.

    Raises:
        NotLoaded: This is a child: loading would count as CPU time of its check.
    """
    if multiprocessing.parent_process() and "math_verify" not in sys.modules:
        raise NotLoaded
    import math_verify

    return math_verify


def in_prose(text: str) -> tuple[Fraction, bool, bool] | None:
    """Return the answer of a text without a mark, as `number` does; None if it gives none."""
    text = plain(text)
    runs = [*RUN.finditer(text)]
    ends = [each.end() for each in ANCHOR.finditer(text) if runs and each.end() <= runs[-1].start()]
    if ends:
        runs = [run for run in runs if run.start() >= ends[-1]][:1]
    return number(runs[-1][0].strip("()")) if runs else None


def number(text: str) -> tuple[Fraction, bool, bool] | None:
    """Return (value, has a decimal point, is a percentage) of a text that is one number.

    The text may be an equation that ends with "= " and the number. None for anything else.
    """
    left, _, right = plain(text).rpartition("=")
    found = LITERAL.fullmatch(right.strip(" \n*_`").rstrip(" \n.*_`"))
    if found is None or HEDGE.search(left):
        return None
    sign, whole, digits, below, power, percent = found.groups()
    value = Fraction(re.sub("[ ,]", "", digits))
    if below and (int(below) == 0 or (value := value / int(below)).denominator == 1):
        return None
    value = (value + int(whole or 0)) * Fraction(10) ** int(power or 0)
    return -value if sign == "-" else value, "." in digits, bool(percent)


def same(mine: tuple[Fraction, bool, bool] | None, gold: tuple[Fraction, bool, bool]) -> bool:
    """Return whether two results of `number` are equal, to six decimals if one has a decimal point.

    50 % equals 50 and 0.5.
    """
    if mine is None:
        return False
    slack = min(Fraction(1, 10**6), abs(gold[0]) / 1000) if mine[1] or gold[1] else 0
    scale = Fraction(100) ** (gold[2] - mine[2])
    return any(abs(mine[0] * factor - gold[0]) <= slack for factor in (1, scale))


def plain(text: str) -> str:
    """Return a text without LaTeX commands, currencies and the like around its numbers."""
    for pattern, new in PLAIN:
        text = re.sub(pattern, new, text)
    return text


def main() -> None:
    """Answer requests with a child until the end of stdin; fork a new child after a failure."""
    die_with_parent(os.getppid())
    for number in (signal.SIGINT, signal.SIGHUP):  # a terminal sends them to its whole group
        signal.signal(number, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    logging.disable(logging.CRITICAL)
    sys.set_int_max_str_digits(0)
    child = Child()
    for line in sys.stdin.buffer:
        *question, wait_s = json.loads(line)
        answer = child.ask(question, wait_s)
        if answer == NOT_LOADED:
            is_equal("$\\frac{x}{2}$", "x/2")  # loads all that a comparison needs
            answer = child.ask(question, wait_s)
        answers.write(json.dumps(answer).encode() + b"\n")


class Child:
    """The child of the checker; after a failure, the next check has a new one."""

    def __init__(self) -> None:
        self._process: ForkProcess | None = None
        self._pipe: Connection | None = None

    def ask(self, question: list[Any], wait_s: float) -> bool | str | None:
        """Return the answer of a check, or its failure."""
        if self._process is None or self._pipe is None:
            context = multiprocessing.get_context("fork")
            self._pipe, theirs = context.Pipe()
            arguments = (theirs, self._pipe, os.getpid())
            self._process = context.Process(target=serve, args=arguments, daemon=True)
            self._process.start()
            theirs.close()
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


def serve(pipe: Connection, parents: Connection, parent: int) -> None:
    """Run checks in a child; SIGPROF kills it when a check exceeds its CPU seconds."""
    die_with_parent(parent)
    parents.close()
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


def die_with_parent(parent: int) -> None:
    """Request SIGKILL for this process when its parent exits (Linux only).

    On other systems, the closed pipe ends the process.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


if __name__ == "__main__":
    main()
