"""Sessions with server processes of their own: whatever ends the session, no process stays."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import arealite
from arealite.base.errors import ArealiteError, RoleError, UserError
from tests import forks
from tests.models import tiny_model
from tests.waiting import eventually, until_exited
from tools import soak

pytestmark = pytest.mark.processes


@contextmanager
def running_script(model: Path, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Run the script until it samples and trains."""
    process = subprocess.Popen(
        [sys.executable, str(forks.SESSION_SCRIPT), str(model)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        first_line = process.stdout.readline()
        assert first_line == "ready\n", process.stderr.read()
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_end_of_the_script_ends_its_servers(number: int, model: Path, tmp_path: Path) -> None:
    with running_script(model, tmp_path) as process:
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 3
        process.send_signal(number)
        until_exited(*children)
        _, errors = process.communicate(timeout=60.0)
    assert process.returncode != 0
    if number == signal.SIGINT:
        assert errors.rstrip().endswith("KeyboardInterrupt")
        assert not [*Path("/dev/shm").glob(f"arealite-*-{process.pid}-*")]


@pytest.fixture
def started(model: Path, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Arguments of a session that starts one server."""
    forks.begin()
    threads = torch.get_num_threads()
    roots = {name: str(tmp_path / name) for name in ("runs", "names")}
    overrides = {"cluster.run_root": roots["runs"], "cluster.name_root": roots["names"]}
    yield {"model": model, "servers": 1, "overrides": overrides}
    torch.set_num_threads(threads)


def own_children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def kill_servers(children: list[psutil.Process]) -> None:
    """Kill the servers among the children, but no parent of a server, warm or not."""
    words_of = {child: child.cmdline() for child in children}
    servers = [
        child
        for child, words in words_of.items()
        if not soak.is_warm_parent(words) and "serve-llm" not in words
    ]
    assert servers
    for server in servers:
        server.kill()


async def test_killed_server_is_restarted_and_a_lost_one_fails_the_next_await(
    started: dict[str, Any], tmp_path: Path
) -> None:
    before = own_children()
    async with arealite.session(**started) as session:
        await session.publish()
        children = [child for child in own_children() if child not in before]
        parent = next(child for child in children if "serve-llm" in child.cmdline())
        kill_servers(children)
        samples = await session.sample("2+3=", n=2, max_tokens=4)  # by its successor
        assert {version for sample in samples for version in sample.versions} == {1}
        children = [child for child in own_children() if child not in before]
        parent.kill()
        until_exited(*children)
        lost = session._sampler
        assert lost is not None
        await eventually(lambda: lost.is_lost)
        with pytest.raises(RoleError, match=r"llm_server-0 died \(killed by SIGKILL"):
            await session.sample("2+3=", n=2, max_tokens=4)
        with pytest.raises(RoleError, match="llm_server-0 died"):
            session.publish()
    until_exited(*(child for child in own_children() if child not in before))


async def test_restarted_server_gets_the_adapter_again_and_never_answers_without_it(
    started: dict[str, Any],
) -> None:
    before = own_children()
    async with arealite.session(**started, adapters=["alice"]) as session:
        await session.publish(adapter="alice")
        children = [child for child in own_children() if child not in before]
        kill_servers(children)
        samples = await session.sample("2+3=", n=8, max_tokens=4, adapter="alice")
        assert {version for sample in samples for version in sample.versions} == {1}
        assert (await session.publish(adapter="alice")).servers == 1
        samples = await session.sample("2+3=", n=2, max_tokens=4, adapter="alice")
        assert {version for sample in samples for version in sample.versions} == {2}
    until_exited(*(child for child in own_children() if child not in before))


async def test_server_that_cannot_start_is_one_error_and_leaves_no_process(
    started: dict[str, Any],
) -> None:
    before = own_children()
    overrides = started["overrides"] | {
        "launcher.server_args": ["llm_server.embedded.device=cuda"],
    }
    with pytest.raises(ArealiteError, match=r"llm_server-0 died"):
        async with arealite.session(**started | {"overrides": overrides}):
            pass
    until_exited(*(child for child in own_children() if child not in before))
    assert not torch.distributed.is_initialized()


async def test_second_session_is_refused_while_the_first_runs(
    started: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    session = await arealite.session(**started)
    try:
        with pytest.raises(UserError, match="another session"):
            await arealite.session(**started, trial="other")
        assert len(session.sample("2+3=", n=2, max_tokens=2).result(60.0)) == 2
    finally:
        await session.close()
    other = tiny_model(tmp_path_factory.mktemp("other"), init_std=0.1, hidden_size=64)
    elsewhere: dict[str, Any] = {**started, "model": other}
    async with arealite.session(**elsewhere) as session:
        assert len(await session.sample("2+3=", max_tokens=2)) == 1
