"""A ledger reopened at any point has exactly its commits; errors name the problem."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arealite.api.payloads import Payload
from arealite.api.rollout_messages import Lease, Progress, TurnHeader
from arealite.api.trainer import PPOConfig
from arealite.api.trainer_messages import StepReport
from arealite.base.errors import InvariantError, UserError
from arealite.ext.audit.audit import audit
from arealite.system.data.dataset import Permutation, permutation
from arealite.system.datapipe.group_store import GroupStore
from arealite.system.ledger import ledger as ledger_module
from arealite.system.ledger.ledger import Ledger, connect, read_payloads, read_turns
from tests.system.scenes import episode, experiment, failed, header, payload, tasks

POLICY = st.sampled_from(["retry", "min_size", "drop"])


def open_store(folder: Path, ppo: PPOConfig) -> GroupStore:
    ledger = Ledger(folder / "ledger.sqlite", fingerprint={"group_size": "2"})
    return GroupStore(ledger, tasks(5), ppo=ppo, sampler=Permutation(5, seed=1, shuffle=True))


def picture(store: GroupStore) -> dict[str, object]:
    """Return the state that must be equal after reopening."""
    return {
        "offered": store.offered,
        "step": store.next_step,
        "version": store.version,
        "counts": {k: v for k, v in store.counts.items() if v},
        "groups": {
            key: (
                g.task.task_id,
                g.epoch,
                g.row,
                g.state,
                g.step,
                g.place,
                g.start,
                [h.trajectory_id for h in g.headers],
                sorted(g.failures),
                [(key, g.owners[key], x.members, x.version) for key, x in g.leases.items()],
                g.leasable(store.ppo.max_attempts),
                {member: turns for member, turns in g.turns.items() if turns},
            )
            for key, g in store.groups.items()
        },
        "batches": {
            step: [g.group_id for g in groups]
            for step, groups in store.batches.items()
            if groups[0].state == "batched"
        },
        "trained": store.trained,
    }


class Random:
    """A random history of a store, committed and reopened at any point."""

    def __init__(self, folder: Path, ppo: PPOConfig, data: st.DataObject) -> None:
        self.folder, self.ppo, self.data = folder, ppo, data
        self.eta = ppo.max_staleness
        self.store = open_store(folder, ppo)
        self.trained: dict[int, list[str]] = {}
        self.version = 0

    def step(self) -> None:
        verbs = [
            self.lease,
            self.finish,
            self.finish,
            self.fail,
            self.lose,
            self.compose,
            self.train,
            self.reopen,
            self.roll_back,
            self.checkpoint,
            self.tell,
        ]
        self.data.draw(st.sampled_from(verbs))()

    def lease(self) -> None:
        self.store.version = self.version
        self.store.ledger.set_meta("version", str(self.version))
        for group in self.store.groups.values():
            group.retry_at.clear()
        for _ in range(3):
            group = self.store.next_group()
            if group is not None:
                self.begin(self.store.lease(group, worker_id="w", credit=self.some(1, 2)))

    def some(self, low: int, high: int) -> int:
        return self.data.draw(st.integers(low, high))

    def begin(self, lease: Lease) -> None:
        """The turns of a lease are in the file, with payloads, not older than its version."""
        self.store.ledger.commit()
        headers, payloads = read_turns(self.store.ledger.path, lease)
        assert headers == lease.turns
        assert payloads == [f"{t.seat} {t.index} {t.oldest_version}".encode() for t in headers]
        assert lease.version == min([self.version, *(t.oldest_version for t in headers)])

    def tell(self) -> None:
        lease, member = self.pick()
        if lease is not None:
            turn = TurnHeader(
                member=member,
                seat=self.data.draw(st.sampled_from("ab")),
                index=self.some(0, 2),
                oldest_version=self.some(
                    max(0, lease.version - 1), max(self.version, lease.version)
                ),
            )
            told = Progress(
                worker_id="w", lease_id=lease.lease_id, group_id=lease.group_id, turns=[turn]
            )
            self.store.add_turns(told, [f"{turn.seat} {turn.index} {turn.oldest_version}".encode()])

    def pick(self):
        leases = [lease for g in self.store.groups.values() for lease in g.leases.values()]
        if not leases:
            return None, 0
        lease = leases[self.some(0, len(leases) - 1)]
        return lease, lease.members[self.some(0, len(lease.members) - 1)]

    def finish(self) -> None:
        lease, member = self.pick()
        if lease is not None:
            reward = float(self.data.draw(st.booleans()))
            version = self.some(lease.version, max(self.version, lease.version))
            made = episode(lease, member, reward=reward, version=version)
            for _ in range(self.data.draw(st.integers(1, 2))):  # also twice
                self.store.add_episode(made, [payload(made.headers[0])])

    def fail(self) -> None:
        lease, member = self.pick()
        if lease is not None:
            self.store.add_episode(failed(lease, member), [])

    def lose(self) -> None:
        lease, _ = self.pick()
        if lease is not None:
            self.store.end_lease(lease, is_lost=True)

    def compose(self) -> None:
        groups = self.store.compose()
        if groups is not None:
            ids = [h.trajectory_id for g in groups for h in g.headers]
            step = self.store.next_step - 1
            assert self.trained.get(step, ids) == ids, "a rolled-back batch is composed as it was"
            ages = [step - h.oldest_version for g in groups for h in g.headers]
            assert step in self.trained or max(ages) <= self.ppo.max_staleness
            self.trained[step] = ids

    def train(self) -> None:
        for step in sorted(self.store.batches):
            if self.store.batches[step][0].state == "batched":
                self.store.mark_trained(step)
                self.store.ledger.train(
                    StepReport(step=step, trained=self.trained[step], metrics={})
                )
                self.version = step + 1
                return

    def checkpoint(self) -> None:
        step = min(max([-1, *self.store.trained]) + 1, self.version)
        self.store.mark_durable(step)
        self.store.ledger.checkpoint(step, "/x")

    def roll_back(self) -> None:
        step = self.data.draw(st.integers(max(0, self.version - 2), self.version))
        self.store.ledger.commit()
        self.store.roll_back(step)
        self.version = min(step, self.version)

    def go_on(self) -> None:
        """The next batches are composed: the store waits for no impossible event."""
        begin = self.store.next_step
        for _ in range(12):
            self.lease()
            for group in list(self.store.groups.values()):
                for lease in list(group.leases.values()):
                    for member in lease.members:
                        made = episode(lease, member, reward=float(member))
                        self.store.add_episode(made, [payload(made.headers[0])])
            self.compose()
            self.train()
        assert self.store.next_step >= begin + 3

    def reopen(self) -> None:
        """Reopen as after kill -9 just after a commit; later queued writes are lost."""
        self.store.ledger.commit()
        before = picture(self.store)
        boot = self.store.ledger.boot
        self.store.ledger.close()
        self.ppo = replace(self.ppo, max_staleness=self.some(0, self.eta))  # as a user may
        self.store = open_store(self.folder, self.ppo)
        assert self.store.ledger.boot == boot + 1
        assert picture(self.store) == before


@settings(max_examples=30, deadline=None)
@given(data=st.data(), policy=POLICY, zero=st.booleans(), eta=st.integers(0, 2))
def test_random_histories_survive_reopening(
    data: st.DataObject, policy: str, zero: bool, eta: int
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ppo = experiment(folder, partial_group=policy, filter_zero_variance=zero).trainer.ppo
        history = Random(folder, replace(ppo, max_staleness=eta, max_attempts=2), data)
        try:
            for _ in range(data.draw(st.integers(5, 40))):
                history.step()
            history.reopen()
            history.go_on()
        finally:  # Hypothesis ends some examples early, by an exception
            history.store.ledger.close()
        report = audit(folder / "ledger.sqlite")
        assert report.ok, report.table()
        assert report.max_staleness <= eta


def test_copy_taken_at_any_commit_is_consistent(tmp_path: Path) -> None:
    """kill -9 leaves database and write-ahead log unchanged."""
    ppo = experiment(tmp_path).trainer.ppo
    store = open_store(tmp_path / "live", ppo)
    store.version = 0
    for number in range(6):
        group = store.next_group()
        assert group
        lease = store.lease(group, worker_id="w", credit=2)
        made = episode(lease, 0)
        store.add_episode(made, [payload(made.headers[0])])
        store.ledger.commit()
        made = episode(lease, 1)
        store.add_episode(made, [payload(made.headers[0])])  # queued, not committed yet
        copy = tmp_path / f"copy{number}"
        shutil.copytree(tmp_path / "live", copy)
        seen = open_store(copy, ppo)
        assert seen.offered == number + 1
        assert seen.groups[group.group_id].state == "leased"
        assert seen.groups[group.group_id].leasable(3) == []
        seen.end_lease(lease, is_lost=True)
        assert seen.groups[group.group_id].leasable(3) == [1]
        assert audit(copy / "ledger.sqlite").ok
        seen.ledger.close()
    store.ledger.close()


def test_each_epoch_has_a_new_order() -> None:
    first, second = permutation(1, 0, 50), permutation(1, 1, 50)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert first == permutation(1, 0, 50)


def test_unshuffled_rows_keep_the_order_of_the_file(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "l", fingerprint={})
    ppo = experiment(tmp_path).trainer.ppo
    store = GroupStore(ledger, tasks(3), ppo=ppo, sampler=Permutation(3, seed=1, shuffle=False))
    assert [store.sampler.draw(n) for n in range(4)] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    ledger.close()


def test_unwritable_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"Cannot use the ledger .*/file/ledger"):
        Ledger(tmp_path / "file" / "ledger.sqlite", fingerprint={})
    (tmp_path / "junk").write_text("this is not a database, and long enough to tell " * 20)
    with pytest.raises(UserError, match="not a database"):
        Ledger(tmp_path / "junk", fingerprint={})


def test_full_disk_stops_the_run_and_keeps_all_commits(tmp_path: Path) -> None:
    ppo = experiment(tmp_path).trainer.ppo
    store = open_store(tmp_path, ppo)
    store.version = 0
    group = store.next_group()
    assert group
    lease = store.lease(group, worker_id="w", credit=2)
    store.ledger.commit()
    pages = store.ledger.connection.execute("PRAGMA page_count").fetchone()[0]
    store.ledger.connection.execute(f"PRAGMA max_page_count = {pages}")
    large = Payload(prompt=b"", turns=os.urandom(1_000_000))
    store.add_episode(episode(lease, 0), [large])
    with pytest.raises(InvariantError, match=r"cannot write the ledger .*full"):
        store.ledger.commit()
    store.ledger.close()
    again = open_store(tmp_path, ppo)
    assert again.groups["g0"].finished == {}
    again.ledger.close()


def answer(member: int) -> Payload:
    return Payload(prompt=b"prompt", turns=b"turns %d" % member)


def test_payloads_are_read_in_order(tmp_path: Path) -> None:
    ppo = experiment(tmp_path).trainer.ppo
    store = open_store(tmp_path, ppo)
    store.version = 0
    group = store.next_group()
    assert group
    lease = store.lease(group, worker_id="w", credit=2)
    for member in range(2):
        store.add_episode(episode(lease, member), [answer(member)])
    store.ledger.commit()
    found = read_payloads(store.ledger.path, ["g0/1/agent", "g0/0/agent"])
    assert found == [answer(1), answer(0)]
    with pytest.raises(InvariantError, match="g9/0/agent is in a batch"):
        read_payloads(store.ledger.path, ["g9/0/agent"])
    store.ledger.close()


@pytest.mark.parametrize("is_bounded", [True, False])
def test_overlapping_readers_do_not_let_the_log_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_bounded: bool
) -> None:
    """SQLite itself resets its log only while there is no reader, which never happens here."""
    monkeypatch.setattr(ledger_module, "LOG_BYTES", (1 << 20) if is_bounded else 1 << 40)
    monkeypatch.setattr(ledger_module, "READERS_MS", 60_000)  # a loaded machine's readers are slow
    monkeypatch.setattr(ledger_module, "MAX_READERS_MS", 60_000)
    ledger = Ledger(tmp_path / "l", fingerprint={})
    ledger.connection.execute("PRAGMA wal_autocheckpoint = 16")
    sizes: list[int] = []
    with closing(overlap(ledger.path)) as readers, ThreadPoolExecutor(1) as pool:
        next(readers)
        for number in range(50):
            payload = Payload(prompt=b"", turns=os.urandom(200_000))
            ledger.add_trajectory(header("g0", number), payload)
            written = pool.submit(ledger.commit)
            while is_bounded and not wait([written], 0.01).done:  # for readers to go on
                next(readers)
            written.result()
            next(readers)
            sizes.append((tmp_path / "l-wal").stat().st_size)
    ledger.close()
    assert (max(sizes) < 4 << 20) is is_bounded, sizes
    with closing(connect(ledger.path, read_only=True)) as db:
        assert db.execute("SELECT COUNT(*) FROM trajectories").fetchone() == (50,)


def test_ledger_in_an_unwritable_folder_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(tmp_path / "l", fingerprint={})
    ledger.close()
    monkeypatch.setattr(os, "access", lambda *_: False)
    with closing(connect(ledger.path, read_only=True)) as db:
        assert db.execute("SELECT COUNT(*) FROM groups").fetchone() == (0,)
        assert os.listdir(tmp_path) == ["l"]


def overlap(path: Path) -> Generator[None, None, None]:
    """Always have a snapshot open: each iteration opens one and closes the previous one."""
    with ExitStack() as stack:
        while True:
            reader = connect(path, read_only=True)
            reader.execute("BEGIN")
            reader.execute("SELECT COUNT(*) FROM groups").fetchone()
            stack.close()
            stack.callback(reader.close)
            yield
