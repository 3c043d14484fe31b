"""Run the test cases of a program inside a sandbox.

`env.py` sends the code of this module and of the three modules it imports to the sandbox. The
program under test has its own process (`program.py`). So it cannot patch, exit or print in this
process, which holds the tests.

Input, on stdin: ten digits, a job `{source, entry, names, mode}` of that length, and the tests.
Output, on stdout: one report per line, as JSON.
"""

from __future__ import annotations  # `compile` hands it on to the tests

import builtins
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain, count
from typing import Any

from arealite.impl.env.code.asserts import Instrumented
from arealite.impl.env.code.program import ENDED, Line, describe, wait_and_fork
from arealite.impl.env.code.values import decode, encode

START_S = 60.0
MAX_SIZE = 1 << 18
MAX_ASKED = 50_000
ENDED_EARLY = -1
"""Used as a case's number if the test raised an exception outside of its cases."""
Report = Callable[..., None]
"""Called with the fields of a report."""


class Unsupported(BaseException):
    """The tests cannot be run."""


class ProgramError(Exception):
    """The program raised an exception, ended, or sent an invalid answer."""


class Program:
    """Client of the program's process. It starts the program again after its end."""

    def __init__(self, line: Line, out: int, seconds: float) -> None:
        self.line = line
        self.out = out
        self.seconds = seconds
        self.pid = 0
        self.starts = 0
        self.printed = b""
        self.names: dict[str, object] = {}

    def start(self, stdin: str | None = None) -> None:
        """Start the program and read its visible values.

        Args:
            stdin: Run the program once with this stdin; None: keep it running for requests.

        Raises:
            Exception: The program cannot be loaded, or its values are invalid.
        """
        self.line.send("start")
        answer: dict[str, Any] = {}
        while "pid" not in answer:  # the end of an earlier program may be reported first
            answer = self._receive(time.monotonic() + START_S)
        self.pid = int(answer["pid"])
        self.starts = self.starts + 1
        self.printed = b""
        self.line.send(stdin)
        loaded = self._answer()["loaded"].items()
        self.names = {name: self.value(data, name) for name, data in loaded}

    def ask(self, operation: str, *parts: object) -> object:
        """Return the encoded result of an operation on the program's values.

        Args:
            operation: A key of OPERATIONS in `program.py`.
            parts: Arguments of the operation.

        Raises:
            Unsupported: An argument cannot be sent to the program.
            Exception: The program's exception if it is a builtin one, else ProgramError.
        """
        self.line.send([operation, *[encode(part, self._pass) for part in parts]])
        return self._answer()["value"]

    def finish(self) -> int:
        """Wait until the program exits; return its exit code."""
        answer: dict[str, Any] = {}
        while ENDED not in answer:
            answer = self._bounded(time.monotonic() + self.seconds)
        os.set_blocking(self.out, False)
        with suppress(BlockingIOError):
            self._drain()
        return int(answer[ENDED])

    def value(self, data: Any, name: str = "") -> Any:
        """Decode the program's data; a handle becomes a Remote."""
        return decode(data, lambda number: Remote(self, int(number), name))

    def _pass(self, value: object) -> int:
        if isinstance(value, Remote):
            return value.number()
        raise Unsupported(f"a test passes a {type(value).__name__} to the program")

    def _answer(self) -> dict[str, Any]:
        answer = self._bounded(time.monotonic() + self.seconds)
        if ENDED in answer:
            raise ProgramError(f"the program ended with code {answer[ENDED]}")
        if "error" in answer:
            kind, text = answer["error"]
            raise python_error(str(kind), str(text))
        return answer

    def _bounded(self, deadline: float) -> dict[str, Any]:
        """Receive an answer; kill the program if the answer is late or invalid."""
        try:
            return self._receive(deadline)
        except (TimeoutError, ValueError):
            os.kill(self.pid, signal.SIGKILL)
            self.printed = b""
            while ENDED not in self._receive(time.monotonic() + START_S):
                self.printed = b""
            raise

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\n" not in self.line.rest:
            left = max(0.0, deadline - time.monotonic())
            ready = select.select([self.line.read, self.out], [], [], left)[0]
            if not ready:
                raise TimeoutError("the program took too long")
            if self.out in ready:
                self._drain()
            if self.line.read in ready:
                self.line.fill()
            if len(self.line.rest) > MAX_SIZE:
                self.line.rest = b""
                raise ValueError("the program answered too much")
        answer = self.line.receive()
        if not isinstance(answer, dict):
            raise ValueError("the program sent an invalid answer")
        if ENDED in answer:
            self.pid = 0
        return answer

    def _drain(self) -> None:
        self.printed += os.read(self.out, 1 << 16)
        if len(self.printed) > MAX_SIZE:
            raise ValueError("the program printed too much")


class Remote:
    """A value of the program that is not plain data: a function, a class or an object."""

    def __init__(self, program: Program, number: int, name: str) -> None:
        self.__dict__.update(_program=program, _number=number, _start=program.starts, _name=name)

    def number(self) -> int:
        """Return the value's handle in the running program; start the program if it has ended."""
        program: Program = self._program
        if not program.pid:
            program.start()
        if self._start != program.starts:
            again = program.names.get(self._name)
            if not isinstance(again, Remote):
                raise ProgramError("the program with this value has ended")
            self.__dict__.update(_number=again.number(), _start=program.starts)
        return self._number

    def __call__(self, *args: object, **options: object) -> object:
        return self._ask("call", list(args), options)

    def __getattr__(self, name: str) -> Any:
        if name[:2] == "__":
            raise AttributeError(name)
        return self._ask("get", name)

    def __setattr__(self, name: str, value: object) -> None:
        self._ask("set", name, value)

    def __iter__(self) -> Iterator[object]:
        return iter(self._ask("list"))

    def __len__(self) -> int:
        return int(self._ask("len"))

    def __getitem__(self, key: object) -> object:
        return self._ask("item", key)

    def __str__(self) -> str:
        return str(self._ask("str"))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and self._ask("eq", other) is True

    def __hash__(self) -> int:
        return self._number

    def __bool__(self) -> bool:
        return True

    def __instancecheck__(self, value: object) -> bool:
        return isinstance(value, Remote) and self._ask("isinstance", value) is True

    def _ask(self, operation: str, *parts: Any) -> Any:
        program: Program = self._program
        return program.value(program.ask(operation, self, *parts))


def python_error(kind: str, text: str) -> Exception:
    """Return a builtin exception by its name, else a ProgramError.

    StopIteration becomes a ProgramError, too: raised inside `map`, it would end a loop of the tests
    early, as if every item had been checked.
    """
    known = None if kind.startswith("Stop") else getattr(builtins, kind, None)
    error: Exception = ProgramError(f"{kind}: {text}")
    if isinstance(known, type) and issubclass(known, Exception):
        with suppress(TypeError):  # some exceptions need more arguments
            error = known(text)
    return error


def run_inputs(program: Program, texts: list[str], report: Report) -> None:
    """Run the program once for each stdin; report its output and exit code."""
    for case, text in enumerate(texts):
        try:
            program.start(text)
        except Exception as error:  # noqa: BLE001
            return report(error=describe(error))
        if case == 0:
            report(loaded=True)
        try:
            code = program.finish()
            report(case=case, stdout=program.printed.decode(errors="replace"), code=code)
        except Exception as error:  # noqa: BLE001
            report(case=case, error=describe(error))
    return None


def run_calls(program: Program, name: str, calls: list[list[object]], report: Report) -> None:
    """Call one function of the program with the arguments of each case; report the results."""
    function = program.names.get(name)
    for case, (args, options) in enumerate(calls):
        try:
            if not isinstance(function, Remote):
                raise TypeError(f"{name} is not a function")
            report(case=case, value=program.ask("call", function, args, options))
        except Exception as error:  # noqa: BLE001
            report(case=case, error=describe(error))


class Absent(Program):
    """Stand-in for the program when tests are tried without it; gives every request one answer."""

    def __init__(self, answer: object) -> None:
        super().__init__(Line(-1, -1), -1, 0.0)
        self.pid = 1
        self.answer = answer
        self.asked = 0

    def ask(self, operation: str, *parts: object) -> object:
        """Check that `parts` can be sent to a program, then return or raise the fixed answer.

        Raises:
            Unsupported: `parts` cannot be sent, or the tests send more than MAX_ASKED requests.
        """
        self.asked += 1
        if self.asked > MAX_ASKED:
            raise Unsupported("a test does not end without a right program")
        for part in parts:
            encode(part, self._pass)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class AssertCases:
    """Sources with asserts; each assert is a case.

    The tests are tried before the program starts, with three stand-ins: one returns None, one
    returns a text, one raises. A test that raises ImportError or NameError is broken, and so is a
    set of tests that passes with every stand-in; no program can make them look broken. A case that
    passes with every stand-in does not count. The number of cases is known even if the program
    ends a test early.

    Raises:
        Unsupported, SyntaxError, ValueError: The tests cannot be run.
    """

    def __init__(self, work: dict[str, Any], entry: str) -> None:
        self.entry = entry
        numbers = count()
        self.parts = [Instrumented(source, numbers) for source in work["tests"]]
        self.codes = [compile(work["setup"], "<setup>", "exec"), *(p.code for p in self.parts)]
        runs = [
            [*self.attempt({name: Remote(absent, 0, name) for name in work["names"]})]
            for absent in map(Absent, (None, "no answer", ProgramError("there is no program")))
        ]
        self.tried = runs[0]
        for _, error in chain(*self.tried):
            if isinstance(error, (ImportError, Unsupported)) or type(error) is NameError:
                raise Unsupported(f"{type(error).__name__}: {error}")
        known = [each for run in runs for found in run for each in found]
        failed = {number for number, error in known if error}
        if not failed:
            raise Unsupported("the tests pass whatever the program does")
        self.constants = {number for number, _ in known} - failed

    def attempt(self, names: dict[str, object]) -> Iterator[list[tuple[int, BaseException | None]]]:
        """Run setup and sources; yield, for each, (case number, exception or None) of its cases."""
        found: list[tuple[int, BaseException | None]] = []
        names["candidate"] = names.get(self.entry)
        names["_passed"] = lambda number: found.append((number, None))
        names["_failed"] = lambda number: found.append((number, sys.exc_info()[1]))
        for code in self.codes:
            found = []
            try:
                exec(code, names)
            except BaseException as error:  # noqa: BLE001  (any exception ends the source)
                found.append((ENDED_EARLY, error))
            yield found

    def run(self, program: Program, report: Report) -> None:
        """Run the tests against the program, and report how many cases of each test passed."""
        least = [0, *(len(part.always - self.constants) for part in self.parts)]
        report(total=sum(least))
        attempts = zip(self.attempt(dict(program.names)), self.tried, least, strict=True)
        for case, (found, tried, total) in enumerate(attempts, start=-1):
            known = [not error for n, error in found if error or n not in self.constants]
            if ENDED_EARLY in dict(found):
                total = max(total, sum(n not in self.constants for n, _ in tried))
            if case >= 0:
                report(case=case, passed=sum(known), of=max(total, len(known)))


def receive(size: int) -> bytes:
    """Read exactly `size` bytes from stdin; fewer if it ends."""
    text = b""
    while len(text) < size and (piece := os.read(0, min(size - len(text), 1 << 16))):
        text += piece
    return text


def main() -> None:
    """Run the cases of one program and report the results."""
    results, nothing = os.dup(1), os.open("/dev/null", os.O_RDWR)
    job = json.loads(receive(int(receive(10))))
    (ask, asked), (answer, answered), (out, printed) = os.pipe(), os.pipe(), os.pipe()
    if os.fork() == 0:
        for file in (0, 1, 2):
            os.dup2(nothing, file)
        for file in (results, nothing, asked, answer, out):
            os.close(file)
        wait_and_fork(job, Line(ask, answered), printed)
    for file in (ask, answered, printed):
        os.close(file)
    os.dup2(nothing, 1)

    def report(**known: object) -> None:
        os.write(results, json.dumps(known).encode() + b"\n")

    work = json.loads(receive(1 << 30))
    try:
        tests = AssertCases(work, job["entry"]) if job["mode"] == "tests" else None
    except (Unsupported, SyntaxError, ValueError) as error:
        return report(broken=describe(error))
    program = Program(Line(answer, asked), out, work["seconds"])
    if job["mode"] == "stdio":
        return run_inputs(program, work["inputs"], report)
    try:
        program.start()
    except Exception as error:  # noqa: BLE001
        return report(error=describe(error))
    report(loaded=True)
    if tests:
        return tests.run(program, report)
    return run_calls(program, job["entry"], program.value(work["calls"]), report)


if __name__ == "__main__":
    main()
    os._exit(0)
