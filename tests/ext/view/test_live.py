"""The server of the live page: its access, and when it reads the run."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from msgspec.structs import replace

from arealite.base.trial_files import RunPaths
from arealite.ext.view import live, report
from arealite.ext.view.live import LiveRun, serve
from arealite.ext.view.report import write_report
from tests.ext.view.runs import (
    add_lines,
    add_token_stats,
    add_trajectories,
    make_run,
    many,
    metrics,
    page_data,
)
from tests.system.health.living import show, wait
from tests.system.health.run_folder import Run
from tests.waiting import spawned

LINES = metrics(5)
DRAWN = list(many(32, tokens=20, words=9, group_size=4, groups=4))


class Clock:
    """A clock that the test advances."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(live, "time", clock)
    monkeypatch.setattr(report, "time", clock)
    return clock


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """Return a run of two steps with 32 trajectories."""
    paths = make_run(tmp_path / "run", DRAWN, lines=LINES[:3])
    add_token_stats(paths, DRAWN)
    return paths


def asked(run: LiveRun, version: str = "") -> dict[str, Any]:
    return json.loads(run.answer("run", version))


@pytest.fixture
async def address(paths: RunPaths) -> AsyncIterator[str]:
    """Serve a page; yield the address that it prints."""
    said: asyncio.Queue[str] = asyncio.Queue()
    task = asyncio.ensure_future(serve(paths, 0, said.put_nowait))
    yield (await said.get()).removeprefix("live page: ")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def get(url: str, **headers: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as response:
        return response.status, (await response.read()).decode(errors="replace")


async def test_page_and_data_need_the_token(address: str) -> None:
    site, token = address.split("?token=")
    assert len(token) == 32
    for path in ("", "run", "t0", "x0", "w0"):
        assert (await get(f"{site}{path}?token={token}"))[0] == 200
        for wrong in ("", "?token=", f"?token={token[:-1]}", f"?token={token}0", "?token=%ff"):
            assert (await get(f"{site}{path}{wrong}"))[0] == 403
        assert (await get(f"{site}{path}", Authorization=f"Bearer {token}"))[0] == 403
    assert (await get(f"{site}secret?token={token}"))[0] == 404


async def test_foreign_pages_and_rebound_names_are_refused(address: str) -> None:
    for headers in (
        {"Origin": "http://evil.example"}, {"Origin": "null"}, {"Host": "evil.example"},
    ):  # fmt: skip
        status, text = await get(address, **headers)
        assert status == 403
        assert "curves" not in text
    assert (await get(address, Host=f"localhost:{address.split(':')[2].split('/')[0]}"))[0] == 200


async def test_answers_are_not_stored_and_not_shared(address: str) -> None:
    async with aiohttp.ClientSession() as session, session.get(address) as response:
        assert response.headers["Cache-Control"] == "no-store"
        assert response.headers["Referrer-Policy"] == "no-referrer"
        assert "Access-Control-Allow-Origin" not in response.headers
        text = await response.text()
    assert "default-src 'none'" in text
    assert "connect-src 'self'" in text
    assert "unsafe" not in text


async def test_server_listens_on_loopback_only(address: str) -> None:
    port = int(address.split(":")[2].split("/")[0])
    listening = [c for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"]
    assert [c.laddr.ip for c in listening if c.laddr.port == port] == ["127.0.0.1"]


def test_new_step_is_in_the_next_answer(paths: RunPaths, clock: Clock) -> None:
    run = LiveRun(paths)
    first = asked(run)
    assert first["about"]["metrics"]["step"] == [0, 1, 2]
    assert first["about"]["shown"] == 32
    clock.now += 100.0
    assert asked(run, first["version"])["about"] is None
    add_trajectories(paths, [(2, each, s) for _, each, s in many_more()], first=8)
    add_lines(paths, LINES[3:4])
    second = asked(run, first["version"])
    assert second["about"]["metrics"]["step"] == [0, 1, 2, 3]
    assert second["about"]["shown"] == 36
    assert second["version"] != first["version"]
    assert asked(run)["about"] == second["about"], "another page gets the data, too"


def many_more() -> list[Any]:
    """Return a group whose trajectories have new names."""
    drawn = many(4, tokens=20, words=9, group_size=4, seed=2)
    return [
        (step, replace(each, group_id="g8", trajectory_id=f"g8/{each.member}/agent"), segments)
        for step, each, segments in drawn
    ]


def test_run_is_read_once_a_step(
    paths: RunPaths, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = list[float]()
    read = report.read

    def slow(*words: Any, **more: Any) -> Any:
        reads.append(clock.now)
        clock.now += 10.0
        return read(*words, **more)

    monkeypatch.setattr(report, "read", slow)
    run = LiveRun(paths)
    for _ in range(50):
        asked(run)
        clock.now += 1.0
    assert reads == [1000.0], "there is no new step"
    add_lines(paths, LINES[3:4])
    for _ in range(400):
        asked(run)
        clock.now += 1.0
    assert len(reads) == 2
    assert reads[1] >= 1210.0, "reading takes at most a twentieth of the time"


def test_blocks_are_those_of_the_report(paths: RunPaths) -> None:
    run = LiveRun(paths)
    version = asked(run)["version"]
    write_report(paths, paths.report, most=100)
    blocks = page_data(paths.report)
    for name in ("t0", "x0"):
        assert run.answer(name, version) == blocks[name]
    assert json.loads(run.answer("w0", version)) == json.loads(blocks["end"])


def test_blocks_of_an_older_version_are_empty(paths: RunPaths, clock: Clock) -> None:
    run = LiveRun(paths)
    old = asked(run)["version"]
    clock.now += 100.0
    add_lines(paths, LINES[3:4])
    new = asked(run)["version"]
    assert run.answer("t0", old) == b""
    assert run.answer("t0", new) != b""


def test_damaged_ledger_is_reported_until_it_can_be_read(paths: RunPaths, clock: Clock) -> None:
    whole = paths.ledger.read_bytes()
    paths.ledger.write_bytes(b"x" * 5000)
    run = LiveRun(paths)
    found = asked(run)
    clock.now += 100.0
    state = dict(asked(run)["state"])
    assert found["about"] in ({}, None)
    assert "cannot be read as a ledger" in state["cannot be read"]
    paths.ledger.write_bytes(whole)
    clock.now += 100.0
    assert asked(run)["about"]["shown"] == 32
    assert "cannot be read" not in dict(asked(run)["state"])


def test_state_before_step_1_names_the_wait(tmp_path: Path) -> None:
    run = Run(tmp_path)
    page = LiveRun(run.paths)
    assert dict(asked(page)["state"])[""] == "not running"
    show(run.vitals, "trainer-0")
    assert dict(asked(page)["state"])["now"] == "the trainer loads the model"
    show(run.vitals, "trainer-0", wait("batch 0", "datapipe-0", 8.0))
    about = asked(page)
    now = "the trainer is ready; no language-model server has started yet"
    assert dict(about["state"])["now"] == now
    assert dict(about["state"])["step"] == "0 of 3"
    assert about["about"]["metrics"] == {}


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_command_serves_until_it_is_stopped(paths: RunPaths, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "arealite.cli.main", "top", str(paths.root), "--web"]
    with spawned(command, os.environ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("live page: http://127.0.0.1:")
        process.send_signal(number)
        assert process.stdout.read() == ""
        assert process.wait(60.0) == 0


@pytest.mark.processes
def test_busy_or_impossible_port_is_a_one_line_error(paths: RunPaths) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        used = busy.getsockname()[1]
        for port in (used, 65536):
            command = [sys.executable, "-m", "arealite.cli.main", "top", str(paths.root)]
            done = subprocess.run(
                [*command, "--port", str(port)], capture_output=True, text=True, timeout=240
            )
            assert done.returncode == 2
            assert done.stderr.startswith(f"error: --port {port}: ")
            assert len(done.stderr.splitlines()) == 1
            assert "0 for a free one" in done.stderr


@pytest.mark.processes
def test_folder_without_a_run_has_no_page(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "arealite.cli.main", "top", str(tmp_path), "--web"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    assert "is no run folder" in done.stderr
