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
from typing import Any, NamedTuple

from arealite.ext.code.asserts import Instrumented
from arealite.ext.code.json_values import decode, encode
from arealite.ext.code.program import ENDED, PIPE_BYTES, JsonPipes, describe, wait_and_fork

START_S = 60.0
MAX_SIZE = 1 << 18
MAX_WORK_BYTES = 1 << 30
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

    def __init__(self, line: JsonPipes, output_fd: int, timeout_s: float) -> None:
        self.line = line
        self.output_fd = output_fd
        self.timeout_s = timeout_s
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
        loaded = self._answer()["loaded"]
        self.names = {name: self.value(data, name) for name, data in loaded.items()}

    def ask(self, operation: str, *parts: object) -> object:
        """Return the encoded result of an operation on the program's values.

        Args:
            operation: A key of OPERATIONS in `program.py`.
            parts: Arguments of the operation.

        Raises:
            Unsupported: An argument cannot be sent to the program.
            Exception: The program's exception if it is a builtin one, else ProgramError.
        """
        encoded_parts = [encode(part, self._pass) for part in parts]
        self.line.send([operation, *encoded_parts])
        return self._answer()["value"]

    def finish(self) -> int:
        """Wait until the program exits; return its exit code."""
        answer: dict[str, Any] = {}
        while ENDED not in answer:
            answer = self._receive_or_kill()
        os.set_blocking(self.output_fd, False)
        with suppress(BlockingIOError):
            self._drain()
        return int(answer[ENDED])

    def value(self, data: Any, name: str = "") -> Any:
        """Decode the program's data; a handle becomes a Remote."""

        def remote(number: int) -> Remote:
            return Remote(self, int(number), name)

        return decode(data, remote)

    def _pass(self, value: object) -> int:
        if isinstance(value, Remote):
            return value.number()
        raise Unsupported(f"a test passes a {type(value).__name__} to the program")

    def _answer(self) -> dict[str, Any]:
        answer = self._receive_or_kill()
        if ENDED in answer:
            raise ProgramError(f"the program ended with code {answer[ENDED]}")
        if "error" in answer:
            kind, message = answer["error"]
            raise python_error(str(kind), str(message))
        return answer

    def _receive_or_kill(self) -> dict[str, Any]:
        """Receive an answer; kill the program if the answer is late or invalid."""
        try:
            return self._receive(time.monotonic() + self.timeout_s)
        except (TimeoutError, ValueError):
            os.kill(self.pid, signal.SIGKILL)
            self.printed = b""
            while ENDED not in self._receive(time.monotonic() + START_S):
                self.printed = b""
            raise

    def _receive(self, deadline: float) -> dict[str, Any]:
        line = self.line
        while b"\n" not in line.unread:
            remaining_s = max(0.0, deadline - time.monotonic())
            readable = [line.read_fd, self.output_fd]
            ready, _, _ = select.select(readable, [], [], remaining_s)
            if not ready:
                raise TimeoutError("the program took too long")
            if self.output_fd in ready:
                self._drain()
            if line.read_fd in ready:
                line.fill()
            if len(line.unread) > MAX_SIZE:
                line.unread = b""
                raise ValueError("the program answered too much")
        answer = line.receive()
        if not isinstance(answer, dict):
            raise ValueError("the program sent an invalid answer")
        if ENDED in answer:
            self.pid = 0
        return answer

    def _drain(self) -> None:
        self.printed += os.read(self.output_fd, PIPE_BYTES)
        if len(self.printed) > MAX_SIZE:
            raise ValueError("the program printed too much")


class Remote:
    """A value of the program that is not plain data: a function, a class or an object."""

    def __init__(self, program: Program, number: int, name: str) -> None:
        self.__dict__.update(
            _program=program,
            _number=number,
            _start=program.starts,
            _name=name,
        )

    def number(self) -> int:
        """Return the value's handle in the running program; start the program if it has ended."""
        program: Program = self._program
        if not program.pid:
            program.start()
        if self._start != program.starts:
            successor = program.names.get(self._name)
            if not isinstance(successor, Remote):
                raise ProgramError("the program with this value has ended")
            self.__dict__.update(
                _number=successor.number(),
                _start=program.starts,
            )
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
        if not isinstance(other, Remote):
            return False
        return self._ask("eq", other) is True

    def __hash__(self) -> int:
        return self._number

    def __bool__(self) -> bool:
        return True

    def __instancecheck__(self, value: object) -> bool:
        if not isinstance(value, Remote):
            return False
        return self._ask("isinstance", value) is True

    def _ask(self, operation: str, *parts: Any) -> Any:
        program: Program = self._program
        answer = program.ask(operation, self, *parts)
        return program.value(answer)


def python_error(kind: str, message: str) -> Exception:
    """Return a builtin exception by its name, else a ProgramError.

    StopIteration becomes a ProgramError, too: raised inside `map`, it would end a loop of the tests
    early, as if every item had been checked.
    """
    error: Exception = ProgramError(f"{kind}: {message}")
    if kind.startswith("Stop"):
        return error
    exception_class = getattr(builtins, kind, None)
    if isinstance(exception_class, type) and issubclass(exception_class, Exception):
        with suppress(TypeError):  # some exceptions need more arguments
            error = exception_class(message)
    return error


def run_inputs(program: Program, inputs: list[str], report: Report) -> None:
    """Run the program once for each stdin; report its output and exit code."""
    for case, stdin in enumerate(inputs):
        try:
            program.start(stdin)
        except Exception as error:  # noqa: BLE001
            report(error=describe(error))
            return
        if case == 0:
            report(loaded=True)
        try:
            code = program.finish()
            stdout = program.printed.decode(errors="replace")
            report(case=case, stdout=stdout, code=code)
        except Exception as error:  # noqa: BLE001
            report(case=case, error=describe(error))


def run_calls(program: Program, name: str, calls: list[list[object]], report: Report) -> None:
    """Call one function of the program with the arguments of each case; report the results."""
    function = program.names.get(name)
    for case, (args, options) in enumerate(calls):
        try:
            if not isinstance(function, Remote):
                raise TypeError(f"{name} is not a function")
            answer = program.ask("call", function, args, options)
            report(case=case, value=answer)
        except Exception as error:  # noqa: BLE001
            report(case=case, error=describe(error))


class Absent(Program):
    """Stand-in for the program when tests are tried without it; gives every request one answer."""

    def __init__(self, answer: object) -> None:
        super().__init__(
            line=JsonPipes(-1, -1),
            output_fd=-1,
            timeout_s=0.0,
        )
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


class CaseOutcome(NamedTuple):
    """The outcome of a case: it passed, or an assert or another exception ended it."""

    number: int
    """The case's number, or ENDED_EARLY."""
    error: BaseException | None


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
        case_numbers = count()
        self.sources = [Instrumented(source, case_numbers) for source in work["tests"]]
        setup_code = compile(work["setup"], "<setup>", "exec")
        self.codes = [setup_code, *(source.code for source in self.sources)]
        stand_in_answers = (None, "no answer", ProgramError("there is no program"))
        trials = [self._trial(work["names"], answer) for answer in stand_in_answers]
        self.first_trial = trials[0]
        for _, error in chain(*self.first_trial):
            if isinstance(error, (ImportError, Unsupported)) or type(error) is NameError:
                raise Unsupported(f"{type(error).__name__}: {error}")
        outcomes = [outcome for trial in trials for outcome in chain(*trial)]
        all_numbers = {outcome.number for outcome in outcomes}
        failed_numbers = {outcome.number for outcome in outcomes if outcome.error}
        if not failed_numbers:
            raise Unsupported("the tests pass whatever the program does")
        self.constants = all_numbers - failed_numbers
        """Numbers of the cases that pass with every stand-in."""

    def _trial(self, names: list[str], answer: object) -> list[list[CaseOutcome]]:
        """Run setup and sources with a stand-in that gives every request this answer."""
        absent = Absent(answer)
        return [*self.attempt({name: Remote(absent, 0, name) for name in names})]

    def attempt(self, names: dict[str, object]) -> Iterator[list[CaseOutcome]]:
        """Run setup and sources; yield, for each of them, the outcomes of its cases."""
        outcomes: list[CaseOutcome] = []

        def passed(number: int) -> None:
            outcomes.append(CaseOutcome(number, None))

        def failed(number: int) -> None:
            _, error, _ = sys.exc_info()
            outcomes.append(CaseOutcome(number, error))

        names["candidate"] = names.get(self.entry)
        names["_passed"] = passed
        names["_failed"] = failed
        for code in self.codes:
            outcomes = []
            try:
                exec(code, names)
            except BaseException as error:  # noqa: BLE001  (any exception ends the source)
                outcomes.append(CaseOutcome(ENDED_EARLY, error))
            yield outcomes

    def run(self, program: Program, report: Report) -> None:
        """Run the tests against the program, and report how many cases of each test passed."""
        min_totals = [len(source.always - self.constants) for source in self.sources]
        report(total=sum(min_totals))
        attempts = self.attempt(dict(program.names))
        next(attempts)  # the setup
        tests = zip(attempts, self.first_trial[1:], min_totals, strict=True)
        for case, (outcomes, first_outcomes, min_total) in enumerate(tests):
            num_passed = 0
            num_failed = 0
            for outcome in outcomes:
                if outcome.error:
                    num_failed += 1
                elif self._counts(outcome):
                    num_passed += 1
            total = max(min_total, num_passed + num_failed)
            if any(outcome.number == ENDED_EARLY for outcome in outcomes):
                first_total = sum(map(self._counts, first_outcomes))
                total = max(total, first_total)
            report(case=case, passed=num_passed, of=total)

    def _counts(self, outcome: CaseOutcome) -> bool:
        """Return whether the case counts: it does not pass with every stand-in."""
        return outcome.number not in self.constants


def receive(size: int) -> bytes:
    """Read exactly `size` bytes from stdin; fewer if it ends."""
    received = b""
    while len(received) < size:
        num_missing = size - len(received)
        chunk = os.read(0, min(num_missing, PIPE_BYTES))
        if not chunk:
            break
        received += chunk
    return received


def run_job(
    job: dict[str, Any],
    work: dict[str, Any],
    line: JsonPipes,
    output_fd: int,
    report: Report,
) -> None:
    """Run the cases in the mode of the job and report the results.

    Args:
        job: Entry point and mode.
        work: Inputs, calls or tests, and the time limit of a case.
        line: Pipes to the program's process.
        output_fd: File descriptor from which the program's stdout is read.
        report: Sends a report.
    """
    mode = job["mode"]
    tests: AssertCases | None = None
    if mode == "tests":
        try:
            tests = AssertCases(work, job["entry"])
        except (Unsupported, SyntaxError, ValueError) as error:
            report(broken=describe(error))
            return
    program = Program(line, output_fd, work["seconds"])
    if mode == "stdio":
        run_inputs(program, work["inputs"], report)
        return
    try:
        program.start()
    except Exception as error:  # noqa: BLE001
        report(error=describe(error))
        return
    report(loaded=True)
    if tests:
        tests.run(program, report)
    else:
        calls = program.value(work["calls"])
        run_calls(program, job["entry"], calls, report)


def main() -> None:
    """Run the cases of one program and report the results."""
    report_fd = os.dup(1)
    null_fd = os.open("/dev/null", os.O_RDWR)
    job_size = int(receive(10))
    job = json.loads(receive(job_size))
    request_read, request_write = os.pipe()
    answer_read, answer_write = os.pipe()
    output_read, output_write = os.pipe()
    if os.fork() == 0:
        for standard_fd in (0, 1, 2):
            os.dup2(null_fd, standard_fd)
        for unused_fd in (report_fd, null_fd, request_write, answer_read, output_read):
            os.close(unused_fd)
        wait_and_fork(job, JsonPipes(request_read, answer_write), output_write)
    for unused_fd in (request_read, answer_write, output_write):
        os.close(unused_fd)
    os.dup2(null_fd, 1)

    def report(**fields: object) -> None:
        encoded = json.dumps(fields).encode()
        os.write(report_fd, encoded + b"\n")

    work = json.loads(receive(MAX_WORK_BYTES))
    line = JsonPipes(answer_read, request_write)
    run_job(job, work, line, output_read, report)


if __name__ == "__main__":
    main()
    os._exit(0)
