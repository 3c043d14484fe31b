"""A kill between any two statements of the ledger keeps exactly the commits, in balance."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from pprint import pformat

import pytest

from arealite.api.rollout_messages import Progress, TurnHeader
from arealite.api.trainer_messages import StepReport
from arealite.ext.audit.audit import audit
from arealite.system.datapipe.group_store import GroupStore
from arealite.system.ledger import group as open_group
from arealite.system.ledger.ledger import Ledger, Statement
from tests.system.datapipe.killed import KILLED, kill_before
from tests.system.ledger.test_ledger import open_store, picture
from tests.system.scenes import episode, experiment, failed, payload

TOKENS = 240_000
"""Tokens of a trajectory. Two payloads exceed SQLite's cache, so pages of an unfinished transaction
are in the file at the time of the kill."""


class History:
    """A seeded history of a store; `on_commit` is called after each commit."""

    def __init__(self, folder: Path, on_commit: Callable[[GroupStore], None]) -> None:
        self.rng = random.Random(7)
        self.store = open_store(folder, experiment(folder, max_attempts=9).trainer.ppo)
        self.on_commit = on_commit
        self.version = 0
        self.on_commit(self.store)

    def commit(self) -> None:
        self.store.ledger.commit()
        self.on_commit(self.store)

    def play(self) -> None:
        self.publish(0)
        for _ in range(3):
            self.turn()
        self.train()
        self.store.ledger.checkpoint(1, "/x")
        self.store.mark_durable(1)
        self.commit()
        self.turn()
        self.train()
        self.store.roll_back(1)
        self.on_commit(self.store)
        self.publish(1)
        self.train()
        self.turn()

    def publish(self, version: int) -> None:
        self.version = self.store.version = version
        self.store.ledger.set_meta("version", str(version))
        self.commit()

    def turn(self) -> None:
        """Lease, store a turn, lose or fail some members, and finish the others; commit often."""
        for _ in range(2):
            if (group := self.store.next_group()) is not None:
                self.store.lease(group, worker_id="w", credit=2)
        self.commit()
        leases = [lease for g in self.store.groups.values() for lease in g.leases.values()]
        for lease in leases:
            told = TurnHeader(
                member=lease.members[0], seat="agent", index=0, oldest_version=lease.version
            )
            self.store.add_turns(
                Progress(
                    worker_id="w", lease_id=lease.lease_id, group_id=lease.group_id, turns=[told]
                ),
                [b"turn"],
            )
            draw = self.rng.random()
            if draw < 0.2:
                self.store.end_lease(lease, is_lost=True)
            elif draw < 0.4:
                self.store.add_episode(failed(lease, lease.members[0]), [])
            else:
                for member in lease.members:
                    made = episode(lease, member, tokens=TOKENS)
                    self.store.add_episode(made, [payload(made.headers[0])])
        self.commit()

    def train(self) -> None:
        step, groups = self.store.next_step, self.store.compose()
        while groups is None:
            self.turn()
            groups = self.store.compose()
        self.commit()
        ids = [h.trajectory_id for group in groups for h in group.headers]
        self.store.mark_trained(step)
        self.store.ledger.train(StepReport(step=step, trained=ids, metrics={}))
        self.publish(step + 1)


@pytest.fixture(autouse=True)
def no_back_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_group, "BACK_OFF_S", 0.0)


def plain(store: GroupStore) -> str:
    """Return the store's state, to compare it across processes."""
    return pformat(picture(store), width=10**9)


def check(folder: Path, expected: str) -> None:
    """Reopen the files after a kill; they have exactly the commits, in balance."""
    store = open_store(folder, experiment(folder, max_attempts=9).trainer.ppo)
    assert plain(store) == expected
    store.ledger.close()
    report = audit(folder / "ledger.sqlite")
    assert report.ok, report.table()


def test_kill_between_any_two_statements_keeps_exactly_the_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the files at that instant equals the files of a killed process."""
    pictures: list[str] = []
    within: list[int] = []
    """For each copy: number of commits at that time."""
    spilled = 0

    def spy(statements: Iterable[Statement]) -> Iterator[Statement]:
        nonlocal spilled
        before = log.stat().st_size if log.exists() else 0
        for statement in statements:
            yield statement
            if pictures:  # not while the file is made
                shutil.copytree(tmp_path / "live", tmp_path / "copy")
                spilled += log.stat().st_size > before
                within.append(len(pictures))
                check(tmp_path / "copy", pictures[-1])
                shutil.rmtree(tmp_path / "copy")

    log = tmp_path / "live" / "ledger.sqlite-wal"
    execute = Ledger.execute

    def watched(ledger: Ledger, statements: Iterable[Statement]) -> None:
        is_live = ledger.path.parent == tmp_path / "live"
        execute(ledger, spy(statements) if is_live else statements)

    monkeypatch.setattr(Ledger, "execute", watched)
    history = History(tmp_path / "live", lambda store: pictures.append(plain(store)))
    history.play()
    history.store.ledger.close()
    check(tmp_path / "live", pictures[-1])
    assert len(within) > 40
    assert len(set(within)) > 15, "within many transactions"
    assert spilled > 0, "no unfinished transaction had reached the file"


def play_and_record(folder: Path, arm: Callable[[], None]) -> None:
    """Play the history, and write the state after each commit to a file."""
    open_group.BACK_OFF_S = 0.0
    arm()
    with Path(f"{folder}.heard").open("w") as file:
        History(folder, lambda store: print(plain(store), file=file, flush=True)).play()


@pytest.mark.processes
def test_killed_process_keeps_exactly_its_commits(tmp_path: Path) -> None:
    folders = {number: tmp_path / str(number) for number in (3, 15, 25, 35, 50)}
    codes = kill_before(play_and_record, folders)
    assert codes == dict.fromkeys(folders, KILLED), "a process did not die there"
    for folder in folders.values():
        heard = Path(f"{folder}.heard").read_text().splitlines()
        check(folder, heard[-1])
