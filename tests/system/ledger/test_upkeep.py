"""After a checkpoint the new records are audited, and old payloads are dropped."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from arealite.api.experiment_config import run_paths
from arealite.api.trainer_messages import Finish
from arealite.base.errors import InvariantError
from arealite.ext.audit import audit as audit_module
from arealite.ext.audit.audit import audit
from arealite.ext.audit.audit_report import AuditReport
from arealite.system.ledger.ledger import connect, read_payloads
from arealite.system.ledger.writer import LedgerWriter, Upkeep
from tests.system.datapipe.killed import KILLED, kill_before
from tests.system.ledger.small_run import Shape, SmallRun
from tests.system.live import StartPipe
from tests.system.scenes import saved
from tests.waiting import eventually


def read(ledger: Path, sql: str) -> list[tuple]:
    with closing(connect(ledger, read_only=True)) as db:
        return db.execute(sql).fetchall()


def mark(ledger: Path) -> dict[str, object]:
    import json

    rows = read(ledger, "SELECT value FROM meta WHERE key = 'audited'")
    return json.loads(rows[0][0]) if rows else {}


async def keep_house(run: SmallRun, kept: str = "all", over: asyncio.Event | None = None) -> None:
    """Run the upkeep after a checkpoint until it has finished."""
    writer = LedgerWriter(run.ledger, interval_s=0.0)
    async with asyncio.TaskGroup() as group:
        group.create_task(writer.run())
        await Upkeep(writer, over or asyncio.Event(), keep_payloads=kept).run()
        done = asyncio.Event()

        def look() -> None:  # after the statements that a callback queues
            if writer._callbacks or writer.ledger._queue:
                writer.after_commit(look)
            else:
                done.set()

        writer.after_commit(look)
        await done.wait()
        writer.close()


def grown(folder: Path, steps: int) -> SmallRun:
    run = SmallRun(folder, Shape())
    for _ in range(steps):
        run.train()
    return run


async def test_incremental_audit_counts_the_same_as_a_full_audit(tmp_path: Path) -> None:
    run = grown(tmp_path, 0)
    path = run.paths.ledger
    for step in range(10):
        run.train()
        if step % 2:
            await keep_house(run)
            assert mark(path)["step"] == step + 1
        whole, new = audit(path), audit(path, new_only=True)
        assert whole.ok, whole.table()
        assert new.ok, new.table()
        shown = [line for line in new.table().splitlines() if "audited during" not in line]
        assert shown == whole.table().splitlines()
    run.ledger.close()


async def test_incremental_audit_reads_no_payload_before_its_mark(tmp_path: Path) -> None:
    run = grown(tmp_path, 6)
    await keep_house(run)
    run.train()
    run.ledger.close()
    seen: list[int] = []
    with closing(sqlite3.connect(run.paths.ledger)) as db, db:
        for n in (1, 2, 3):
            db.execute("UPDATE trajectories SET payload = x'00' WHERE n = ?", (n,))
    report = audit(run.paths.ledger, new_only=True, on_row=lambda n, last: seen.append(n))
    assert report.ok, report.table()
    assert "steps 1 to 6 were audited during the run, and not again now" in report.notes
    assert "3 payloads differ from their header" in audit(run.paths.ledger).table()


@pytest.mark.parametrize(
    "harm",
    [
        "UPDATE trajectories SET payload = x'00' WHERE n = (SELECT MAX(n) FROM trajectories)",
        "DELETE FROM trajectories WHERE n = (SELECT MAX(n) FROM trajectories)",
        "DELETE FROM groups WHERE seq = (SELECT MAX(seq) FROM groups)",
        "UPDATE groups SET state = 'filtered', reason = 'x' WHERE step = 6 AND place = 0",
        "DELETE FROM steps WHERE step = 6",
        "DELETE FROM groups WHERE seq = 0",
        "DELETE FROM trajectories WHERE n = 1",
    ],
)
async def test_damage_after_the_mark_and_to_row_counts_is_detected_at_the_end(
    tmp_path: Path, harm: str
) -> None:
    run = grown(tmp_path, 6)
    await keep_house(run)
    run.train()
    run.ledger.close()
    assert audit(run.paths.ledger, new_only=True).ok
    with closing(sqlite3.connect(run.paths.ledger)) as db, db:
        db.execute(harm)
    is_old = "seq = 0" in harm or "n = 1" in harm
    assert audit(run.paths.ledger, new_only=True).ok is is_old
    assert not audit(run.paths.ledger).ok


async def test_failed_audit_moves_no_mark_and_drops_no_payload(tmp_path: Path) -> None:
    run = grown(tmp_path, 4)
    await keep_house(run, "1")
    before, held = mark(run.paths.ledger), read(run.paths.ledger, KEPT)
    run.train()
    run.train()
    with closing(sqlite3.connect(run.paths.ledger)) as db, db:
        db.execute("UPDATE trajectories SET reward = 9 WHERE n = (SELECT MAX(n) FROM trajectories)")
    with capture_logs() as logs:
        await keep_house(run, "1")
    assert mark(run.paths.ledger) == before
    assert set(held) <= set(read(run.paths.ledger, KEPT))
    (log,) = [log for log in logs if log["event"] == "ledger out of balance"]
    assert "trajectories differ from their checksum" in log["problems"][0]
    run.ledger.close()


KEPT = "SELECT trajectory_id FROM trajectories WHERE payload NOTNULL"


async def test_roll_back_below_the_mark_resets_it(tmp_path: Path) -> None:
    run = grown(tmp_path, 6)
    await keep_house(run)
    run.store.roll_back(6)
    assert mark(run.paths.ledger)["step"] == 6, "what is durable stays audited"
    run.store.roll_back(4)
    assert mark(run.paths.ledger) == {}
    assert audit(run.paths.ledger, new_only=True).ok
    run.step = 4
    for _ in range(4):
        run.train()
    await keep_house(run)
    assert mark(run.paths.ledger)["step"] == 8
    whole = audit(run.paths.ledger)
    assert whole.ok, whole.table()
    assert audit(run.paths.ledger, new_only=True).tokens == whole.tokens
    run.ledger.close()


async def test_audit_stores_no_mark_if_its_steps_are_rolled_back_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = grown(tmp_path, 6)

    def interrupted(*args: Any, **kwargs: Any) -> AuditReport:
        report = audit(*args, **kwargs)
        run.store.roll_back(4)
        return report

    monkeypatch.setattr(audit_module, "audit", interrupted)
    await keep_house(run)
    assert mark(run.paths.ledger) == {}
    new = audit(run.paths.ledger, new_only=True)
    assert new.ok, new.table()
    run.ledger.close()


async def test_audit_stops_when_the_run_ends(tmp_path: Path) -> None:
    run = grown(tmp_path, 30)  # more trajectories than one check for the end covers
    over = asyncio.Event()
    over.set()
    await keep_house(run, over=over)
    assert mark(run.paths.ledger) == {}
    upkeep = Upkeep(LedgerWriter(run.ledger, interval_s=0.0), asyncio.Event(), keep_payloads="all")
    upkeep._go_on = lambda *_: (over.set(), Upkeep._go_on(upkeep))[0]  # type: ignore[method-assign]
    upkeep.stopped = asyncio.Event()
    await upkeep.run()
    run.ledger.close()


# ---------------------------------------------------------------- dropped payloads


def steps_with_payloads(ledger: Path) -> list[int]:
    sql = f"SELECT DISTINCT step FROM groups WHERE step NOTNULL AND group_id IN ({GROUPS})"
    return sorted(step for (step,) in read(ledger, sql))


GROUPS = "SELECT group_id FROM trajectories WHERE payload NOTNULL"


@pytest.mark.parametrize(("kept", "first"), [("all", 0), ("1", 8), ("2", 6), ("3", 4), ("9", 0)])
async def test_payloads_older_than_the_newest_checkpoints_are_dropped(
    tmp_path: Path, kept: str, first: int
) -> None:
    run = grown(tmp_path, 9)
    path = run.paths.ledger
    await keep_house(run, kept)
    assert steps_with_payloads(path) == list(range(first, 9))
    filtered = f"SELECT seq FROM groups WHERE state = 'filtered' AND group_id IN ({GROUPS})"
    newest = f"SELECT MAX(seq) FROM groups WHERE step < {first}"
    assert all(seq > (read(path, newest)[0][0] or -1) for (seq,) in read(path, filtered))
    report = audit(path)
    assert report.ok, report.table()
    note = f"payloads of steps 1 to {first} were dropped (datapipe.keep_payloads)"
    assert report.notes == ([note] if first else [])
    assert report.tokens == audit(path, new_only=True).tokens
    run.ledger.close()


async def test_run_resumes_from_each_checkpoint_with_payloads(tmp_path: Path) -> None:
    run = grown(tmp_path, 9)
    await keep_house(run, "2")
    run.store.roll_back(6)
    rolled = {h.trajectory_id for g in run.store.groups.values() for h in g.headers if g.step}
    assert rolled
    read_payloads(run.paths.ledger, sorted(rolled))
    run.step = 6
    for _ in range(4):
        run.train()
    await keep_house(run, "2")
    assert audit(run.paths.ledger).ok
    gone = read(run.paths.ledger, "SELECT trajectory_id FROM trajectories WHERE payload IS NULL")
    with pytest.raises(InvariantError, match=r"the payload of trajectory .* was dropped"):
        read_payloads(run.paths.ledger, [gone[0][0]])
    run.ledger.close()


async def test_space_of_dropped_payloads_is_reused(tmp_path: Path) -> None:
    sizes = dict[str, list[int]]()
    for kept in ("all", "1"):
        run = SmallRun(tmp_path / kept, Shape(tokens=2000))
        for step in range(40):
            run.train()
            if step % 2:
                await keep_house(run, kept)
            run.ledger.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            sizes.setdefault(kept, []).append(run.paths.ledger.stat().st_size)
        run.ledger.close()
    growth = {kept: size[-1] - size[19] for kept, size in sizes.items()}
    assert growth["1"] < 0.1 * growth["all"], "headers stay, payloads take the same room"


def drop_payloads(folder: Path, arm: Callable[[], None]) -> None:
    run = SmallRun(folder, Shape())
    arm()
    asyncio.run(keep_house(run, "1"))


@pytest.mark.processes
async def test_datapipe_killed_while_it_drops_payloads_loses_nothing(tmp_path: Path) -> None:
    """Kill it before every second statement; the next process resumes and ends normally."""
    run = grown(tmp_path / "run", 7)
    run.ledger.close()
    folders = {number: tmp_path / f"copy{number}" for number in range(0, 20, 2)}
    for folder in folders.values():
        shutil.copytree(tmp_path / "run", folder)
    codes = await asyncio.to_thread(kill_before, drop_payloads, folders)
    assert {*codes.values()} <= {0, KILLED}
    assert [*codes.values()].count(KILLED) >= 5
    dropped = set[int]()
    for folder in folders.values():
        path = folder / "ledger.sqlite"
        report = audit(path)
        assert report.ok, report.table()
        dropped.add(min(steps_with_payloads(path)))
        again = SmallRun(folder, Shape())
        again.train()  # the eighth, with a checkpoint
        await keep_house(again, "1")
        assert steps_with_payloads(path) == []
        assert read(path, "SELECT value FROM meta WHERE key = 'dropped'") == [("8",)]
        assert audit(path).ok
        again.ledger.close()
    assert len(dropped) >= 3, "killed between two steps that go"


async def test_datapipe_audits_and_drops_after_each_checkpoint(start_pipe: StartPipe) -> None:
    live = await start_pipe(num_groups=2, pipe={"keep_payloads": "1"})
    path = run_paths(live.config).ledger
    live.work()
    await live.train(steps=4, finishes=False)
    await live.trainer(lambda link: link.report(saved(live.config, 4)))
    is_dropped = "SELECT 1 FROM meta WHERE key = 'dropped' AND value = '4'"
    await eventually(lambda: read(path, is_dropped), "the drop of four steps")
    await live.trainer(lambda link: link.report(Finish(reason="over")))
    await live.end()
    assert mark(path)["step"] == 4
    assert not set(steps_with_payloads(path)) & {0, 1, 2, 3}
    report = audit(path)
    assert report.ok, report.table()
