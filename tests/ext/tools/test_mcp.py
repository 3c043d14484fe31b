"""Tools of real MCP servers, by stdio and HTTP: listing, calls, crashes and restarts."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from arealite.api.observation import ToolCall
from arealite.api.task import Task
from arealite.base.errors import UserError
from arealite.ext.tools.config import MCPServerConfig, ToolsEnvConfig
from arealite.ext.tools.mcp import MCPUnavailable
from arealite.ext.tools.toolbox import ToolAnswer, Toolbox, ToolCrash
from tests.fakes.ports import held_port
from tests.waiting import eventually, has_exited, until

pytest.importorskip("mcp", reason="arealite[tools] is not installed")
HERE = Path(__file__).parent
SOURCE = (HERE / "mcp_stdio.py").read_text()
TASK = Task(task_id="t", prompt="?", ground_truth="1", extra_info={})


def config(folder: Path, **more: Any) -> MCPServerConfig:
    return MCPServerConfig(
        command=[sys.executable, str(HERE / "mcp_stdio.py"), str(folder)], **more
    )


def toolbox(server: MCPServerConfig, **more: Any) -> Toolbox:
    return Toolbox(ToolsEnvConfig(mcp={"t": server}, **{"timeout_s": 60.0} | more))


async def call(box: Toolbox, tool: str, /, **arguments: Any) -> ToolAnswer:
    async with box.episode(TASK) as states:
        return await box.call(ToolCall(call_id="1", name=tool, arguments=arguments), states)


def pids(folder: Path) -> list[int]:
    return [int(file.read_text()) for file in sorted(folder.iterdir())]


@pytest.fixture
async def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORKERS_GREETING", "hi")
    made = toolbox(config(tmp_path / "pids", env={"GREETING": "$WORKERS_GREETING"}))
    await made.setup()
    yield made
    await made.close()
    await eventually(lambda: all(map(has_exited, pids(tmp_path / "pids"))), "the servers' end")


async def test_tools_of_a_server_are_offered_and_answer(box) -> None:
    names = [schema["function"]["name"] for schema in box.schemas]
    assert names == ["calculator", "t__add", "t__die", "t__greet", "t__hang"]
    about = box.schemas[1]["function"]
    assert about["description"] == "Add two integers."
    assert about["parameters"]["required"] == ["a", "b"]
    assert await call(box, "t__add", a=2, b=3) == ("5", "fine")
    assert await call(box, "t__greet", name="you") == ("hi you", "fine")
    assert await call(box, "calculator", expression="1+1") == ("2", "fine")
    assert not box.deterministic


async def test_errors_of_a_tool_are_sent_to_the_agent(box) -> None:
    answer = await call(box, "t__greet", name="nobody")
    assert answer.kind == "failed"
    assert answer.content == "error: there is nobody"
    assert (await call(box, "t__greet", name="invalid")).content == "error: a name must be valid"
    assert (await call(box, "t__add", a="x", b=3)).kind == "malformed"
    box.config = replace(box.config, timeout_s=0.1)
    assert (await call(box, "t__hang")) == ("error: timed out after 0.1 s", "timeout")
    box.config = replace(box.config, timeout_s=60.0)
    assert await call(box, "t__add", a=2, b=3) == ("5", "fine")


async def test_content_without_text_is_replaced_by_its_type(box) -> None:
    assert (await call(box, "t__greet", name="picture")).content == "[image]"


async def test_internal_error_of_a_server_is_a_tool_crash(box) -> None:
    with pytest.raises(ToolCrash, match="t__greet raised MCPError: broken"):
        await call(box, "t__greet", name="broken")


async def test_concurrent_calls_get_their_own_answers(box) -> None:
    answers = await asyncio.gather(*(call(box, "t__add", a=n, b=1) for n in range(100)))
    assert [answer.content for answer in answers] == [str(n + 1) for n in range(100)]


async def test_server_that_dies_is_restarted(box, tmp_path) -> None:
    os.kill(pids(tmp_path / "pids")[0], signal.SIGKILL)
    answers = await asyncio.gather(*(call(box, "t__add", a=n, b=1) for n in range(5)))
    assert [answer.content for answer in answers] == ["1", "2", "3", "4", "5"]
    assert len(pids(tmp_path / "pids")) == 2


async def test_call_that_kills_its_server_is_repeated_once(box, tmp_path) -> None:
    assert await call(box, "t__die", times=1) == ("alive", "fine")
    with pytest.raises(MCPUnavailable, match="died twice") as raised:
        await call(box, "t__die", times=99)
    assert raised.value.failure_class == "mcp_unavailable"
    assert await call(box, "t__add", a=2, b=3) == ("5", "fine")
    assert len(pids(tmp_path / "pids")) == 4


async def test_session_unknown_to_the_server_is_restarted(box, tmp_path) -> None:
    assert await call(box, "t__greet", name="forgotten") == ("hi forgotten", "fine")
    assert len(pids(tmp_path / "pids")) == 2


async def test_server_that_hangs_at_its_restart_is_unavailable(
    tmp_path: Path,
) -> None:
    program = tmp_path / "server.py"
    program.write_text(SOURCE)
    own = MCPServerConfig(command=[sys.executable, str(program), str(tmp_path / "pids")])
    box = toolbox(own)
    await box.setup()
    program.write_text("import time; time.sleep(100)")
    os.kill(pids(tmp_path / "pids")[0], signal.SIGKILL)
    noticed = asyncio.create_task(call(box, "t__add", a=2, b=3))
    await eventually(box.servers[0]._restarting.locked)
    noticed.cancel()
    with pytest.raises(asyncio.CancelledError):
        await noticed
    box.config = replace(box.config, timeout_s=0.3)
    with pytest.raises(MCPUnavailable, match="died and has not started again"):
        await call(box, "t__add", a=2, b=3)
    await box.close()


async def test_missing_sdk_is_a_user_error_with_the_install_command(
    monkeypatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    box = toolbox(config(tmp_path / "pids"))
    with pytest.raises(UserError, match=r"pip install -e '.\[tools\]'"):
        await box.setup()
    await box.close()


async def test_server_that_does_not_restart_fails_the_episode(tmp_path: Path) -> None:
    program = tmp_path / "server.py"
    program.write_text(SOURCE)
    own = MCPServerConfig(command=[sys.executable, str(program), str(tmp_path / "pids")])
    box = toolbox(own)
    await box.setup()
    program.write_text("raise SystemExit(1)")
    for _ in range(2):
        with pytest.raises(MCPUnavailable, match="did not start"):
            await call(box, "t__die", times=99)
    program.write_text(SOURCE)
    assert (await call(box, "t__add", a=2, b=3)).content == "5"
    await box.close()


async def test_call_cancelled_during_a_restart_leaves_the_server_usable(box, tmp_path) -> None:
    os.kill(pids(tmp_path / "pids")[0], signal.SIGKILL)
    for _ in range(3):
        task = asyncio.create_task(call(box, "t__add", a=2, b=3))
        await eventually(box.servers[0]._restarting.locked)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert (await call(box, "t__add", a=2, b=3)).content == "5"


@pytest.mark.parametrize(
    ("server", "error"),
    [
        (MCPServerConfig(), "set command or url, and not both"),
        (MCPServerConfig(command=["a"], url="http://b"), "set command or url, and not both"),
        (MCPServerConfig(command=["/no/such/program"]), "did not start: FileNotFoundError"),
        (MCPServerConfig(command=["true"]), "did not start: MCPError: Connection closed"),
        (MCPServerConfig(command=["sleep", "60"], start_timeout_s=0.2), "did not start: .* waited"),
        (MCPServerConfig(url="http://127.0.0.1:9/mcp"), "did not start: ConnectError"),
    ],
)
async def test_server_that_does_not_start_is_a_user_error(server, error) -> None:
    with pytest.raises(UserError, match=error):
        box = toolbox(server)
        try:
            await box.setup()
        finally:
            await box.close()


async def test_config_selects_tools_of_a_server(tmp_path: Path) -> None:
    box = toolbox(config(tmp_path / "pids", tools=["add"]), tools=[])
    await box.setup()
    assert [*box.tools] == ["t__add"]
    await box.close()
    box = toolbox(config(tmp_path / "pids", tools=["add", "sub"]))
    with pytest.raises(UserError, match=r"has no tool sub\. .* add, die, greet, hang"):
        await box.setup()
    await box.close()


def start(port: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(HERE / "mcp_server.py"), str(port)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)

    def answers() -> bool:
        with socket.socket() as tried:
            return tried.connect_ex(("127.0.0.1", port)) == 0

    until(answers, what="the server", seconds=200.0)
    return process


@pytest.fixture
def port() -> Iterator[int]:
    with held_port() as held:
        yield held


@pytest.mark.processes
async def test_http_server_that_restarts_is_used_again(port: int) -> None:
    process = start(port)
    box = toolbox(MCPServerConfig(url=f"http://127.0.0.1:{port}/mcp"))
    try:
        await box.setup()
        assert (await call(box, "t__add", a=2, b=3)).content == "5"
        process.kill()
        process.wait()
        with pytest.raises(MCPUnavailable):
            await call(box, "t__add", a=2, b=3)
        process = start(port)
        assert (await call(box, "t__add", a=2, b=3)).content == "5"
    finally:
        await box.close()
        process.kill()
        process.wait()
