"""Programs of agents, in the sandbox and in Monty."""

from __future__ import annotations

import asyncio
import shutil
import sys
from dataclasses import replace

import pytest

from arealite.api.tool import ToolError
from arealite.base.errors import UserError
from arealite.ext.sandbox.config import Outcome, SandboxConfig
from arealite.ext.sandbox.sandbox import Sandbox
from arealite.ext.tools import python as python_module
from arealite.ext.tools.config import PythonToolConfig
from arealite.ext.tools.python import PythonTool


class Scripted(Sandbox):
    """A sandbox with a fixed outcome."""

    outcome: Outcome

    async def setup(self) -> None:
        pass

    async def run(self, program: str, *, stdin: str = "") -> Outcome:
        return self.outcome


@pytest.fixture(params=["sandbox", "monty"])
async def python(request: pytest.FixtureRequest):
    backend = (
        "bwrap" if shutil.which("bwrap") else "unsafe"
    )  # the sandbox's own tests check the confinement
    limits = SandboxConfig(backend=backend, timeout_s=60.0, output_kb=8, concurrency=2)
    if request.param == "monty":
        pytest.importorskip("pydantic_monty", reason="arealite[tools] is not installed")
        limits = replace(limits, memory_mb=32)
    tool = PythonTool(PythonToolConfig(backend=request.param, sandbox=limits))
    await tool.setup()
    yield tool
    await tool.close()


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("print(6 * 7)", "42"),
        ("6 * 7", "42"),
        ("x = 6\nx * 7", "42"),
        ("def f(n):\n    return n * 7\n\nprint('six')\nf(6)", "six\n42"),
        ("'a\"b' + \"'\"", repr("a\"b'")),
        ("x = 1", "(nothing printed)"),
        ("", "(nothing printed)"),
        ("print('{}{x}\\n%s')", "{}{x}\n%s"),
    ],
)
async def test_output_of_the_program_is_returned(python, code: str, answer: str) -> None:
    assert await python.call({"code": code}, {}) == answer


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("print('before')\n1 / 0", "ZeroDivisionError: division by zero\nprinted before:\nbefore"),
        ("x +", "SyntaxError"),
        ("lost", "NameError: name 'lost' is not defined"),
        ("1" * 30_000, "longer than 20000"),
    ],
)
async def test_last_line_of_an_error_is_returned(python, code: str, error: str) -> None:
    with pytest.raises(ToolError) as raised:
        await python.call({"code": code}, {})
    assert error in str(raised.value)
    assert "Traceback" not in str(raised.value)


async def test_calls_share_no_state(python) -> None:
    await python.call({"code": "x = 1"}, {})
    with pytest.raises(ToolError, match="not defined"):
        await python.call({"code": "x"}, {})


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (
            Outcome(status="timeout", code=-9, stdout="", stderr="", seconds=10.0),
            "ran longer than 0.3 s",
        ),
        (
            Outcome(status="output", code=-9, stdout="xx", stderr="", seconds=1.0),
            "printed more than 8 kB\nprinted before:\nxx",
        ),
        (
            Outcome(status="killed", code=-9, stdout="", stderr="", seconds=1.0),
            "ended with code -9",
        ),
        (Outcome(status="exited", code=3, stdout="", stderr="", seconds=1.0), "ended with code 3"),
        (
            Outcome(status="exited", code=1, stdout="", stderr="a\nMemoryError\n", seconds=1.0),
            "MemoryError",
        ),
    ],
)
async def test_outcome_of_the_sandbox_is_returned(monkeypatch, outcome: Outcome, said: str) -> None:
    monkeypatch.setattr(python_module, "Sandbox", Scripted)
    monkeypatch.setattr(Scripted, "outcome", outcome, raising=False)
    tool = PythonTool(PythonToolConfig(sandbox=SandboxConfig(timeout_s=0.3, output_kb=8)))
    await tool.setup()
    with pytest.raises(ToolError) as raised:
        await tool.call({"code": "1"}, {})
    assert str(raised.value) == said


async def test_missing_monty_is_a_user_error_with_the_install_command(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pydantic_monty", None)
    tool = PythonTool(PythonToolConfig(backend="monty"))
    with pytest.raises(UserError, match=r"pip install -e '.\[tools\]'"):
        await tool.setup()
    await tool.close()


@pytest.mark.parametrize("python", ["monty"], indirect=True)
@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("'a' * 10**9", "MemoryError"),
        ("9**9**9", "MemoryError"),
        ("x = []\nwhile True: x.append('a' * 1000)", "MemoryError"),
        ("def f(): return f()\nf()", "RecursionError"),
        ("open('/etc/passwd').read()", "PermissionError"),
        ("import socket", "ModuleNotFoundError"),
        ("import subprocess", "ModuleNotFoundError"),
        ("import os\nos.environ", "not supported"),
        ("2**100000", "cannot be shown"),
    ],
)
async def test_monty_has_limits_and_no_access(python, code: str, error: str) -> None:
    with pytest.raises(ToolError, match=error):
        await python.call({"code": code}, {})
    assert await python.call({"code": "1"}, {}) == "1"


@pytest.mark.parametrize("python", ["monty"], indirect=True)
async def test_deeply_nested_value_in_monty_is_harmless(python) -> None:
    """Monty cuts such a value; whether Python can print the rest depends on its version."""
    try:
        shown = await python.call({"code": "x = []\nfor _ in range(50000): x = [x]\nx"}, {})
    except ToolError as error:
        shown = str(error)
    assert shown.startswith(("[[[", "the value cannot be shown"))
    assert len(shown) < 50_000, "less than half of the brackets"
    assert await python.call({"code": "1"}, {}) == "1"


@pytest.mark.parametrize("python", ["monty"], indirect=True)
async def test_monty_does_not_sleep_and_stops_at_a_timeout_or_cancel(python) -> None:
    await python.call({"code": "import time\ntime.sleep(1000)"}, {})
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await python.call({"code": "while True: pass"}, {})
    limits = python.config.sandbox
    for code, seconds, error in (
        ("while True: pass", 0.1, "TimeoutError"),
        ("for _ in range(1000): print('x' * 100)", limits.timeout_s, "MemoryError"),
    ):
        object.__setattr__(limits, "timeout_s", seconds)
        with pytest.raises(ToolError, match=error) as raised:
            await python.call({"code": code}, {})
        assert len(str(raised.value)) < 9_000
    assert await python.call({"code": "1"}, {}) == "1"
