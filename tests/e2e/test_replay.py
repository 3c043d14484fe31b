"""An asynchronous run that was killed twice and resumed with other numbers of ranks and workers.

Its ledger keeps all finished trajectories, and its replay is bitwise equal.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

from arealite.api.payloads import Payload
from arealite.api.trajectory_tree import TrajectoryTree
from arealite.base.trial_files import RunPaths
from arealite.ext.audit.audit import audit
from arealite.system.ledger.ledger import connect, decode_header
from tests.e2e import gated
from tests.e2e.conftest import ENVIRONMENT, SLOW_S, Finished, Site, all_gone
from tests.ext.older_runs.ledgers import rewrite_as_format_5
from tests.payloads import pack
from tests.waiting import until

pytestmark = [pytest.mark.processes, pytest.mark.faults, pytest.mark.timeout(1800)]

REWARD = '''
from arealite.api.reward import Reward, rewards


@rewards.register("variety")
class Variety(Reward):
    """Reward by the number and choice of different characters: answers have different rewards."""

    async def score(self, completion: str, ground_truth: str) -> float:
        return (len(set(completion)) + sum(map(ord, completion)) % 101 / 101) / 8
'''
STEPS = 12
OPTIONS = (
    f"imports=[variety,{gated.FILE}]",
    "trainer.ppo.collector.env.type=gated",
    "trainer.ppo.collector.env.gated.reward.type=variety",
    "dataset.eval=null",
    f"trainer.ppo.total_steps={STEPS}",
    "trainer.ppo.updates=2",
    "trainer.ppo.lr=1e-3",
    "trainer.ppo.optimizer.schedule=linear",
    "trainer.ppo.optimizer.warmup_steps=3",
    "trainer.ppo.checkpoint.every_steps=2",
    "trainer.ppo.max_staleness=2",
)


@dataclass
class History:
    """The finished run, and its ledger at the time when its launcher was killed."""

    finished: Finished
    rows: dict[str, tuple[str, int, str, str]]
    """Group, member, group state and payload hash of each trajectory, at the time of the kill."""
    checkpoint: int
    """The newest durable step at the time of the kill."""


def read(ledger: Path, sql: str) -> list[Any]:
    with closing(connect(ledger, read_only=True)) as db:
        return db.execute(sql).fetchall()


def trajectories(ledger: Path) -> dict[str, tuple[str, int, str, str]]:
    sql = (
        "SELECT trajectory_id, group_id, member, state, prompt_tokens, turns "
        "FROM trajectories JOIN groups USING (group_id) JOIN payloads USING (trajectory_id)"
    )
    return {
        key: (*row, sha256(prompt + turns).hexdigest())
        for key, *row, prompt, turns in read(ledger, sql)
    }


@pytest.fixture(scope="module")
def history(site: Site, tmp_path_factory: pytest.TempPathFactory) -> History:
    """Train with 1 rank; SIGKILL it, then the launcher; resume with 2 ranks and 2 workers."""
    run_root = tmp_path_factory.mktemp("killed")
    (run_root / "variety.py").write_text(REWARD)
    ledger = RunPaths(run_root / "e2e" / "t").ledger
    gate, groups = run_root / "gate", 4  # of a batch
    options = [*OPTIONS, f"trainer.ppo.collector.env.gated.gate={gate}"]
    gated.write(gate, 3 * groups)

    def steps() -> int:
        with suppress(sqlite3.OperationalError):  # no file, or no table yet
            return read(ledger, "SELECT COUNT(*) FROM steps")[0][0]
        return 0

    with subprocess.Popen(
        site.command(run_root, *options), cwd=run_root, stdout=subprocess.PIPE, env=ENVIRONMENT
    ) as run:

        def reach(what: Callable[[], Any], name: str) -> None:
            until(lambda: what() or run.poll() is not None, what=name, seconds=SLOW_S)
            assert run.poll() is None, run.stdout.read()  # type: ignore[union-attr]

        def rank() -> psutil.Process | None:
            for child in psutil.Process(run.pid).children():
                with suppress(psutil.Error):  # the process is exiting
                    if child.cmdline()[-3:-1] == ["trainer", "0"]:
                        return child
            return None

        reach(lambda: steps() >= 3, "three steps")
        victim = rank()
        assert victim is not None
        victim.kill()
        gated.write(gate, 5 * groups + 2)  # two groups of an incomplete batch are finished
        reach(lambda: rank() not in (None, victim), "a new rank")
        reach(lambda: steps() >= 5, "steps of the new rank")  # no checkpoint has the last step
        run.kill()
        run.wait(timeout=60)
    all_gone(run_root)
    gate.unlink()
    rows = trajectories(ledger)
    ((checkpoint,),) = read(ledger, "SELECT MAX(step) FROM checkpoints")
    finished = site.train(
        run_root,
        *options,
        "launcher.trainer_ranks=2",
        "launcher.rollout_workers=2",
    )
    assert finished.code == 0, finished.shown + finished.logs()
    return History(finished, rows, checkpoint)


def test_resumed_run_uses_finished_trajectories_and_repeats_none(history: History):
    paths = history.finished.paths
    report = audit(paths.ledger)
    assert report.ok, report.table()
    assert report.groups.trained == STEPS * 4
    assert report.max_staleness <= 2
    ranks = [n for (n,) in read(paths.ledger, "SELECT ranks FROM steps ORDER BY step")]
    assert ranks == [1] * history.checkpoint + [2] * (STEPS - history.checkpoint)
    now = trajectories(paths.ledger)
    for key, (group_id, member, _, payload) in history.rows.items():
        assert (now[key][0], now[key][1], now[key][3]) == (group_id, member, payload)
    finished = {k for k, row in history.rows.items() if row[2] in ("complete", "batched")}
    trained = [
        key
        for (text,) in read(paths.ledger, "SELECT trained FROM steps")
        for key in json.loads(text)
    ]
    assert len(set(trained)) == len(trained) == STEPS * 16
    not_durable = {k for k, row in history.rows.items() if row[2] == "trained"}
    assert not_durable | finished, "the launcher was killed with finished work in hand"
    assert not_durable <= set(trained)
    late = {key for key in finished - set(trained)}
    assert all(now[key][2] in ("complete", "batched") for key in late), "buffered at the end"
    lr = [m["update/lr"] for m in history.finished.metrics() if "update/lr" in m]
    assert len(lr) == STEPS
    assert sorted(lr[3:], reverse=True) == lr[3:], "the schedule went on where it stood"


def replay(run: Path, *options: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "arealite.cli.main", "replay", str(run), *options]
    return subprocess.run(
        command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=SLOW_S
    )


def test_replay_is_bitwise_equal(history: History):
    root = history.finished.paths.root
    fingerprints = read(history.finished.paths.ledger, "SELECT fingerprint FROM steps")
    assert len(set(fingerprints)) == STEPS, "every step has changed the parameters"

    def files() -> dict[Path, int]:
        """Return all files except SQLite's shared-memory index."""
        found = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
        return {path: time for path, time in found.items() if path.suffix != ".sqlite-shm"}

    before = files()
    done = replay(root, cwd=root.parents[1])
    assert done.returncode == 0, done.stderr
    assert f"replayed {STEPS} steps: bitwise equal" in done.stdout
    assert files() == before
    all_gone(root)


def copied(history: History, folder: Path) -> RunPaths:
    """Copy the configs and the ledger of the run."""
    copy = RunPaths(folder)
    source = history.finished.paths
    copy.root.mkdir()
    shutil.copytree(source.configs, copy.configs)
    for file in source.root.glob("ledger.sqlite*"):
        shutil.copy(file, copy.root)
    return copy


def test_replay_of_a_run_of_an_earlier_version_is_bitwise_equal(history: History, tmp_path: Path):
    copy = copied(history, tmp_path / "copy")
    rewrite_as_format_5(copy.ledger)
    report = audit(copy.ledger)
    assert report.ok, report.table()
    assert report.turns == audit(history.finished.paths.ledger).turns
    done = replay(copy.root, cwd=history.finished.paths.root.parents[1])
    assert done.returncode == 0, done.stderr
    assert f"replayed {STEPS} steps: bitwise equal" in done.stdout


def with_another_token(payload: Payload) -> Payload:
    """Flip the lowest bit of the last sampled token; remove the digests that would tell."""
    tree = TrajectoryTree.decode(payload)
    turns = [
        msgspec.structs.replace(turn, prompt_digest=b"", answer_digest=b"") for turn in tree.turns
    ]
    ids = np.frombuffer(turns[-1].ids, "<i4").copy()
    ids[-1] ^= 1
    turns[-1] = msgspec.structs.replace(turns[-1], ids=ids.tobytes())
    return pack(tree.prompt, turns)


def test_replay_finds_the_step_of_a_changed_trajectory(history: History, tmp_path: Path):
    copy = copied(history, tmp_path / "copy")
    with closing(sqlite3.connect(copy.ledger)) as db, db:
        sql = (
            "SELECT trajectory_id, header, prompt_tokens, turns FROM trajectories "
            "JOIN groups USING (group_id) JOIN payloads USING (trajectory_id) "
            "WHERE step = 1 ORDER BY reward DESC LIMIT 1"
        )
        key, header, prompt, turns = db.execute(sql).fetchone()
        payload = Payload(prompt=prompt, turns=turns)
        changed = with_another_token(payload)
        assert changed != payload
        # Update the digest too, so that only the training step detects the change.
        told = msgspec.structs.replace(decode_header(header), digest=changed.digest)
        row = msgspec.msgpack.encode(told), changed.turns, key
        db.execute(
            "UPDATE trajectories SET (header, payload) = (?, ?) WHERE trajectory_id = ?", row
        )
    done = replay(copy.root, "--to", "2", cwd=history.finished.paths.root.parents[1])
    assert done.returncode == 1, done.stdout
    assert "step 2 is the first that differs" in done.stderr
    assert "Possible causes" in done.stderr
