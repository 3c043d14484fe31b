"""The reason of a death: the record of a process of ours, and a line of other programs' output."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from arealite.ext.diagnosis.exit_reason import exit_reason
from arealite.impl.launcher.processes import Child, how_ended, spawn

GROUP = """
import asyncio
async def dies(number):
    try:
        {}["a key"]
    except KeyError as error:
        raise RuntimeError(f"task {number} failed") from error
async def main():
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(dies(1))
        tasks.create_task(dies(2))
asyncio.run(main())
"""
NESTED = """
try:
    raise ExceptionGroup("inner", [TypeError("first leaf"), OSError(2, "is gone")])
except ExceptionGroup as error:
    raise ExceptionGroup("outer\\nin two lines", [ValueError("other"), error])
"""
NOTES = """
def fails():
    try:
        raise ValueError("the first line\\nError: the second line\\n\\nthe last")
    except ValueError as error:
        error.add_note("KeyError: a note that looks like an exception")
        raise
fails()
"""
CHAINED = """
try:
    open("/no/such/file")
except OSError:
    raise LookupError("nothing to read")
"""
IN_AN_EXPRESSION = """
def fails():
    return (
        1
        | None
    )
fails()
"""
MULTILINE = "raise RuntimeError('\\n\\n  what there is to say')"
SYNTAX = "compile('x = = 1', 'config.py', 'exec')"
SYNTAX_OF_THE_SCRIPT = "x = = 1"
IGNORED = """
class Late:
    def __del__(self):
        raise RuntimeError("Event loop is closed")
late = Late()
raise ValueError("the reason")
"""
LOGGED = """
from arealite.base import log
log.setup("rollout-0")
try:
    1 / 0
except ZeroDivisionError:
    log.get("x").exception("handled", stack='  File "x.py", line 1, in f\\n    f()\\n')
raise ValueError("the reason")
"""
JSON = """
import json, sys
print(json.dumps({"event": "step", "level": "info"}), flush=True)
try:
    raise ValueError("the reason")
finally:
    import atexit
    atexit.register(lambda: print(json.dumps({"event": "end"}), file=sys.stderr))
"""
MANY = "raise ExceptionGroup('a', [ValueError(str(number)) for number in range(20)])"
DEEP = """
error = ValueError("the leaf")
for depth in range(14):
    error = ExceptionGroup(f"depth {depth}", [error])
raise ExceptionGroup("top", [KeyError("shown"), error])
"""
RANK = """
import sys, traceback
try:
    raise ValueError("of one rank")
except ValueError:
    lines = traceback.format_exc().splitlines()
print("\\n".join(f"[rank1]: {line}" for line in lines), file=sys.stderr)
sys.exit(1)
"""
ON_PURPOSE = """
from arealite.base.errors import RoleError
raise ExceptionGroup("in a TaskGroup", [RoleError("datapipe is gone")])
"""
OURS = """
import sys, types
from arealite.cli import main
module = types.ModuleType("fails")
module.main = lambda argv: exec({script!r}, {{"__name__": "__main__"}})
sys.modules["fails"] = module
sys.exit(main.run("fails", []))
"""
"""A command of ours whose function runs a script."""


def output(script: str, *options: str) -> tuple[str, int]:
    command = [sys.executable, *options, "-c", script]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.stdout, done.returncode


async def death(script: str, folder: Path, *, is_ours: bool = True) -> Child:
    """Return a child that has ended."""
    code = OURS.format(script=script) if is_ours else script
    command = [sys.executable, "-c", code]
    child = await spawn("rollout-0", command, log=folder / "rollout-0.log", environment={})
    await child.process.wait()
    return child


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("raise KeyError", "KeyError"),
        (GROUP, "RuntimeError: task 2 failed"),
        (NESTED, "FileNotFoundError: [Errno 2] is gone"),
        (NOTES, "ValueError: the first line"),
        (CHAINED, "LookupError: nothing to read"),
        (IN_AN_EXPRESSION, "TypeError: unsupported operand type(s) for |: 'int' and 'NoneType'"),
        (MULTILINE, "RuntimeError: what there is to say"),
        (SYNTAX, "SyntaxError: invalid syntax"),
        (IGNORED, "ValueError: the reason"),
        (LOGGED, "ValueError: the reason"),
        (JSON, "ValueError: the reason"),
        (MANY, "ValueError: 19"),
        (DEEP, "ValueError: the leaf"),
        (ON_PURPOSE, "datapipe is gone"),
    ],
)
async def test_process_of_ours_records_its_reason(script: str, reason: str, tmp_path: Path) -> None:
    child = await death(script, tmp_path)
    assert child.exit_summary == f"rollout-0 died ({how_ended(child.code)}: {reason})"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("raise KeyError", "KeyError"),
        (GROUP, "RuntimeError: task 2 failed"),
        (NESTED, "FileNotFoundError: [Errno 2] is gone"),
        (NOTES, "ValueError: the first line"),
        (CHAINED, "LookupError: nothing to read"),
        (IN_AN_EXPRESSION, "TypeError: unsupported operand type(s) for |: 'int' and 'NoneType'"),
        (SYNTAX_OF_THE_SCRIPT, "SyntaxError: invalid syntax"),
        (LOGGED, "ValueError: the reason"),
        (RANK, "ValueError: of one rank"),
        ("import sys; sys.exit('a message of its own\\n\\n')", "a message of its own"),
        ("import sys; print('the last line\\n \\n'); sys.exit(7)", "the last line"),
        ("import sys; sys.exit(7)", ""),
    ],
)
def test_reason_of_another_program_is_a_line_of_its_output(script: str, reason: str) -> None:
    text, code = output(script)
    assert exit_reason(text, code) == reason, text


def test_reason_is_found_before_output_of_other_processes() -> None:
    text, code = output(CHAINED)
    text += "[W] destroy_process_group() was not called\nresource_tracker: 1 leaked semaphore\n"
    assert exit_reason(text, code) == "LookupError: nothing to read"


async def test_record_of_an_earlier_process_is_not_read(tmp_path: Path) -> None:
    first = await death("raise ValueError('first')", tmp_path)
    assert first.exit_summary.endswith("ValueError: first)")
    second = await death("import os; os._exit(9)", tmp_path)
    assert second.exit_summary == "rollout-0 died (exit code 9)"


async def test_child_of_a_failing_process_writes_no_record_for_it(tmp_path: Path) -> None:
    """The variable ends with the process that it names."""
    script = (
        "import subprocess, sys, os\n"
        "assert 'AREALITE_EXIT_RECORD' not in os.environ\n"
        "subprocess.run([sys.executable, '-m', 'arealite', 'audit', '/no/such/run'])\n"
        "raise ValueError('of the parent')\n"
    )
    child = await death(script, tmp_path)
    assert child.exit_summary.endswith("ValueError: of the parent)")


@pytest.mark.parametrize(
    ("script", "options", "reason"),
    [
        ("import os; os.abort()", ["-X", "faulthandler"], "Fatal Python error: Aborted"),
        ("import ctypes; ctypes.string_at(0)", ["-X", "faulthandler"], "Fatal Python error: Seg"),
        ("import ctypes; ctypes.string_at(0)", [], ""),
        (
            "import os; os.write(2, b'free(): invalid pointer\\n'); os.abort()",
            [],
            "free(): invalid pointer",
        ),
        (
            "import os; os.write(2, b'terminate called after throwing an instance of "
            "std::bad_alloc\\n  what():  std::bad_alloc\\n'); os.abort()",
            [],
            "what(): std::bad_alloc",
        ),
        ("import os; os.write(2, b'allocator: no memory\\n'); os.abort()", [], "allocator: no"),
        ("print('step 12', flush=True); import os; os.kill(os.getpid(), 9)", [], ""),
        ("print('step 12', flush=True); import os; os.kill(os.getpid(), 15)", [], ""),
    ],
)
def test_reason_of_a_death_by_signal_is_a_line_of_c_code(
    script: str, options: list[str], reason: str
) -> None:
    text, code = output(script, *options)
    assert code < 0
    found = exit_reason(text, code)
    assert found.startswith(reason) and bool(found) == bool(reason), text


def test_reason_of_a_kill_is_no_exception_that_was_logged_before() -> None:
    text, _ = output(LOGGED)
    assert exit_reason(text, -signal.SIGKILL) == ""


async def test_long_reason_is_cut(tmp_path: Path) -> None:
    child = await death("raise ValueError('x' * 100_000)", tmp_path)
    assert len(child.exit_summary) < 600
    text, code = output("raise ValueError('x' * 100_000)")
    assert len(exit_reason(text, code)) == 500


async def test_death_names_the_exception_and_no_border(tmp_path: Path) -> None:
    (tmp_path / "rollout-0.log").write_text("ValueError: of an earlier process\n")
    child = await death(NESTED, tmp_path)
    reason = "FileNotFoundError: [Errno 2] is gone"
    assert child.exit_summary == f"rollout-0 died (exit code 1: {reason})"
    assert "+----" not in child.exit_summary and reason in child.exit_report


@pytest.mark.parametrize("is_ours", [True, False])
async def test_obituary_has_a_reason_far_above_the_last_lines(
    is_ours: bool, tmp_path: Path
) -> None:
    script = "import atexit\natexit.register(lambda: print('bye\\n' * 50))\nraise ValueError('why')"
    child = await death(script, tmp_path, is_ours=is_ours)
    assert re.search(r"\n    ValueError: why\n    \.\.\.\n(    bye\n?)+$", child.exit_report)


@pytest.mark.parametrize("is_ours", [True, False])
async def test_death_is_read_from_the_end_of_a_long_log(is_ours: bool, tmp_path: Path) -> None:
    script = "print(('word ' * 20 + '\\n') * 50_000, flush=True)\nraise ValueError('why')"
    child = await death(script, tmp_path, is_ours=is_ours)
    assert child.exit_summary == "rollout-0 died (exit code 1: ValueError: why)"
