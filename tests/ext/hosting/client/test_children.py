"""Environments in child processes: crashes, hangs and leaks affect only their own episodes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from arealite.api.env import envs
from arealite.base.errors import UserError
from arealite.ext.hosting.client import child_servers as children_module
from arealite.ext.hosting.client import server_pool as servers_module
from arealite.impl.rollout.collector import Collector
from tests.fakes.env_hosts import Steps
from tests.fakes.env_servers import collecting, failed, played
from tests.fakes.experiment import tokenizer
from tests.waiting import eventually, has_exited

pytestmark = pytest.mark.processes
ROOT = Path(__file__).parents[4]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let child processes import this module's environments, from any working directory."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(children_module, "CHECK_S", 0.02)


@asynccontextmanager
async def apart(env: str = "host_moods", **runtime: Any) -> AsyncIterator[Collector]:
    """Yield a collector whose environment runs in child processes."""
    async with collecting(env, **{"type": "subprocess", "wait_s": 200.0} | runtime) as collector:
        yield collector


async def pid_of(collector: Collector, number: int = 0) -> int:
    """Play an episode; return the id of its process, which the environment sends to the agent."""
    episode = await played(collector, "pid", number)
    assert failed(episode) is None
    text = tokenizer().decode(collector._agents.client.requests[-1].input_ids)
    return int(text)


async def test_child_answers_only_requests_with_its_workers_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("AREALITE_ENV_TOKEN", raising=False)
    async with apart() as collector, aiohttp.ClientSession() as stranger:
        (server,) = collector.parts[""].env.servers.known
        for path, status in (("health", 200), ("metadata", 401), ("ws", 401)):
            async with stranger.get(server.url / path) as answer:
                assert answer.status == status
        assert await pid_of(collector) != os.getpid()
    monkeypatch.delenv("AREALITE_ENV_TOKEN")


async def test_crashed_child_fails_its_episode_and_is_replaced() -> None:
    async with apart() as collector:
        first = await pid_of(collector)
        assert first != os.getpid()
        assert failed(await played(collector, "die")) == "env_server_lost"
        second = await pid_of(collector)
        assert second != first
        os.kill(second, signal.SIGKILL)
        await eventually(lambda: has_exited(second))
        third = await pid_of(collector)
        assert third not in (first, second)
    await eventually(lambda: has_exited(third))


async def test_killed_child_fails_only_its_own_episodes() -> None:
    async with apart("host_duel", processes=2) as collector:
        client = collector._agents.client
        client.gate.clear()
        running = [asyncio.create_task(played(collector, "go", n)) for n in range(4)]
        await client.received(8)  # both seats of each episode wait for a generation
        env = collector.parts[""].env
        assert [server.load for server in env.servers.known] == [2, 2]
        port = env.servers.known[0].url.port
        os.kill(listener(port), signal.SIGKILL)
        await eventually(lambda: sum(task.done() for task in running) == 2)
        client.gate.set()
        episodes = await asyncio.gather(*running)
        assert (
            sorted(str(failed(each)) for each in episodes) == ["None"] * 2 + ["env_server_lost"] * 2
        )
        whole = next(each for each in episodes if failed(each) is None)
        assert [header.seat for header in whole.headers] == ["first", "second"]


def listener(port: int | None) -> int:
    """Return the id of the process that listens on a loopback port."""
    sockets = [each for each in psutil.net_connections("tcp4") if each.laddr.port == port]
    (pid,) = {each.pid for each in sockets if each.status == psutil.CONN_LISTEN}
    assert pid is not None
    return pid


async def test_child_that_hangs_is_killed_and_replaced() -> None:
    async with apart(silence_s=60.0) as collector:
        runtime = collector.parts[""].env.config.runtime
        first = await pid_of(collector)
        object.__setattr__(runtime, "silence_s", 0.3)
        assert failed(await played(collector, "block")) == "env_server_lost"
        object.__setattr__(runtime, "silence_s", 60.0)  # a slow start must not count as silence
        assert await pid_of(collector) != first
        await eventually(lambda: has_exited(first))


async def test_child_is_replaced_after_recycle_episodes_and_over_max_memory() -> None:
    async with apart(recycle_episodes=3) as collector:
        pids = [await pid_of(collector, number) for number in range(4)]
        assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [3, 1]
    async with apart(max_memory_mb=150) as collector:
        first = await pid_of(collector)
        for number in range(3):
            assert failed(await played(collector, "leak", number)) is None
        await eventually(lambda: has_exited(first))
        assert await pid_of(collector) != first


async def test_recycled_child_finishes_its_running_episodes() -> None:
    async with apart(recycle_episodes=2) as collector:
        client = collector._agents.client
        client.gate.clear()
        running = [asyncio.create_task(played(collector, "pid", n)) for n in range(4)]
        await client.received(4)  # two episodes in the recycled child, two in its successor
        env = collector.parts[""].env
        loads = [server.load for server in env.servers.known]
        assert [load for load in loads if load] == [2, 2]  # a third child may be listening, idle
        client.gate.set()
        assert [failed(each) for each in await asyncio.gather(*running)] == [None] * 4


async def test_child_that_dies_more_than_max_restarts_times_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        servers_module, "PROBE_S", 3600.0
    )  # otherwise a dying child may count as silent
    async with apart(max_restarts=1) as collector:
        fatal = None
        for number in range(4):
            try:
                assert failed(await played(collector, "die", number)) == "env_server_lost"
            except UserError as error:
                fatal = error
                break
        assert fatal is not None
        assert "died 2 times in a row (env.runtime.max_restarts=1)" in str(fatal)
        assert "The first death: exit code 7" in str(fatal)


@envs.register("known_here_alone")
class UnknownToChildren(Steps):
    """Registered in this test module only, which child processes do not import."""


async def test_child_that_cannot_start_is_a_user_error() -> None:
    with pytest.raises(UserError, match="did not start"):
        async with apart("known_here_alone"):
            pass


PARENT = """
import asyncio, sys
from tests.fakes.env_servers import collecting

async def main():
    async with collecting("host_moods", type="subprocess") as collector:
        (child,) = collector.parts[""].env.servers.known
        print(child.url.port, file=sys.stderr, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_child_dies_with_its_parent() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, stderr=asyncio.subprocess.PIPE, cwd=ROOT
    )
    assert process.stderr is not None
    async with asyncio.timeout(200):
        while not (line := await process.stderr.readline()).strip().isdigit():
            assert line, "the parent exited"
    child = listener(int(line))
    process.kill()
    await process.wait()
    await eventually(lambda: has_exited(child))
