"""A killed session with a ledger continues at its saved state, and nothing counts twice."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
import torch

from arealite.cli import main as cli
from tests.ext.session.conftest import Open
from tests.waiting import until, until_exited

pytestmark = pytest.mark.processes

SCRIPT = """
import asyncio, sys
import arealite

OPTIONS = {
    "cluster.run_root": "runs",
    "cluster.name_root": "names",
    "optimizer.type": "sgd",
    "optimizer.warmup_steps": 0,
}


async def step(session):
    samples = await session.sample("2+3=", n=4, max_tokens=8)
    rows = session.rows(samples, [1.0, 0.0, 0.0, 1.0])
    for _ in range(2):
        session.forward_backward(rows)
        session.optim_step(lr=0.1)
    await session.publish()


async def main():
    async with arealite.session(sys.argv[1], trial="trial", ledger=True, overrides=OPTIONS) as s:
        for _ in range(2):
            await step(s)
        await s.save("state")
        while True:
            await step(s)


asyncio.run(main())
"""


def value(ledger: Path, sql: str) -> object:
    with closing(sqlite3.connect(ledger)) as db:
        return db.execute(sql).fetchone()[0]


def kill_after_four_steps(model: Path, folder: Path, ledger: Path) -> None:
    """Run SCRIPT until it has saved a state and trained two steps more, and kill it."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    state = ledger.parent / "checkpoints/state"

    def has_four_steps() -> bool:
        return state.exists() and value(ledger, "SELECT COUNT(*) >= 4 FROM steps") == 1

    command = [sys.executable, str(script), str(model)]
    process = subprocess.Popen(command, cwd=folder, start_new_session=True)
    try:
        until(lambda: process.poll() is not None or has_four_steps(), what="four steps")
        assert process.poll() is None
        children = psutil.Process(process.pid).children(recursive=True)
    finally:
        process.kill()
        process.wait()
    until_exited(*children)
    assert process.returncode == -signal.SIGKILL


@pytest.fixture
def threads() -> Iterator[None]:
    """Restore the number of threads, which a replay sets."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("threads")
async def test_killed_session_continues_at_its_saved_state(
    model: Path, tmp_path: Path, opened: Open, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "runs/arealite/trial"
    ledger = run / "ledger.sqlite"
    kill_after_four_steps(model, tmp_path, ledger)
    assert cli.main(["audit", str(run)]) == 0
    saved = value(ledger, "SELECT fingerprint FROM steps WHERE step = 1")
    async with opened(ledger=True) as parts:
        session = parts.session
        assert session.version == 2
        assert session._policy.engine.fingerprint() == saved
        samples = await session.sample("2+3=", n=2, max_tokens=4)
        session.forward_backward(session.rows(samples, [0.0, 1.0]))
        await session.optim_step(lr=0.1)
        await session.publish()
    trained = "SELECT COUNT(*) FROM groups WHERE state IN ('trained', 'durable')"
    assert value(ledger, trained) == 4 + 4 + 2
    assert value(ledger, "SELECT COUNT(*) >= 8 FROM groups WHERE reason = 'rolled back'") == 1
    assert value(ledger, "SELECT COUNT(*) FROM groups WHERE state = 'complete'") == 0
    capfd.readouterr()
    assert cli.main(["audit", str(run)]) == 0
    assert cli.main(["report", str(run)]) == 0
    assert cli.main(["replay", str(run)]) == 0
    output = capfd.readouterr().out
    assert "balanced: nothing lost, nothing repeated" in output
    assert "replayed 3 steps: bitwise equal" in output
