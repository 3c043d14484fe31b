"""A run whose groups are all filtered is reported, and ends at `datapipe.max_filtered_groups`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from arealite.api.config import ExperimentConfig, run_paths
from arealite.api.rollout_messages import Episode, Lease
from arealite.api.trainer_messages import Finish, Published, StepReport, Waiting
from arealite.base.errors import InvariantError
from arealite.system.datapipe import datapipe, filtered
from arealite.system.datapipe.datapipe import Datapipe
from arealite.system.datapipe.filtered import REPORTED_FROM
from arealite.system.datapipe.group_store import GroupStore
from arealite.system.health.waits import GROUP_FILTER, Wait, table
from arealite.system.ledger import group as open_group
from arealite.system.ledger.audit import audit
from arealite.system.ledger.ledger import Ledger
from arealite.system.links.trainer_link import TrainerLink
from tests.system.scenes import FakeWorker, episode, experiment, failed, in_thread, piped, tasks

Script = Callable[[Lease, int], Episode]


def equal(lease: Lease, member: int) -> Episode:
    return episode(lease, member, reward=1.0)


def first_fails(lease: Lease, member: int) -> Episode:
    """Fail one episode of each group: a small share of all episodes."""
    return failed(lease, member, "boom") if member == 0 else episode(lease, member, reward=member)


# ---------------------------------------------------------------- the count


@pytest.fixture
def open_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    monkeypatch.setattr(open_group, "BACK_OFF_S", 0.0)
    ledgers: list[Ledger] = []

    def build(**ppo: Any) -> GroupStore:
        """Open the ledger, also again as after kill -9: with its committed state."""
        for before in ledgers:
            before.close()
        ledgers[:] = [Ledger(tmp_path / "ledger.sqlite", fingerprint={})]
        options = {"filter_zero_variance": True, "max_attempts": 1, **ppo}
        config = experiment(tmp_path, group_size=2, **options).trainer.ppo
        store = GroupStore(ledgers[0], tasks(4), ppo=config, seed=1, shuffle=True)
        store.version = 0
        return store

    yield build
    for ledger in ledgers:
        ledger.close()


def close_group(store: GroupStore, *rewards: float | None) -> None:
    """Finish the episodes of a new group with these rewards; None: the episode fails."""
    group = store.next_group()
    assert group is not None
    lease = store.lease(group, worker_id="w", credit=8)
    for member, reward in enumerate(rewards):
        if reward is None:
            store.add_episode(failed(lease, member, "boom"), [])
        else:
            store.add_episode(episode(lease, member, reward=reward), [b""])


def test_filtered_groups_count_by_reason_until_a_group_is_complete(open_store) -> None:
    store = open_store()
    for _ in range(3):
        close_group(store, 1.0, 1.0)
    close_group(store, 1.0, None)
    assert store.filtered.counts == {"zero_variance": 3, "failed:boom": 1}
    says = store.filtered.describe()
    assert says.startswith("4 groups in a row were filtered, and none was completed: ")
    assert "3 zero_variance, 1 failed:boom." in says
    assert "trainer.ppo.filter_zero_variance=false" in says
    close_group(store, 1.0, 0.0)
    assert store.filtered.length == 0
    close_group(store, None, 1.0)
    assert store.filtered.counts == {"failed:boom": 1}
    assert "arealite audit" in store.filtered.describe()


def test_group_that_loses_its_workers_counts(open_store) -> None:
    """No episode of it ends, so `max_failed_share` does not count it."""
    store = open_store()
    group = store.next_group()
    lease = store.lease(group, worker_id="w", credit=8)
    store.end_lease(lease, is_lost=True)
    assert store.filtered.counts == {"failed:worker_lost": 1}


def test_stale_groups_do_not_count(open_store) -> None:
    """Only a trained step makes a complete group too old, so the run makes progress."""
    store = open_store(staleness_policy="drop", max_staleness=0)
    close_group(store, 1.0, 0.0)
    store.next_step = 1
    assert store.compose() is None
    assert store.counts["filtered:stale"] == 1
    assert store.filtered.length == 0


@pytest.mark.parametrize("is_committed", [True, False])
def test_count_after_a_kill_is_that_of_the_closed_groups(open_store, is_committed: bool) -> None:
    store = open_store()
    for _ in range(3):
        close_group(store, 1.0, 1.0)
    store.ledger.commit()
    close_group(store, 1.0, None)
    if is_committed:
        store.ledger.commit()
    store = open_store()
    closed = store.ledger.connection.execute(
        "SELECT reason, COUNT(*) FROM groups WHERE state = 'filtered' GROUP BY reason"
    )
    assert store.filtered.counts == dict(closed.fetchall())
    assert store.filtered.length == (4 if is_committed else 3)
    store = open_store()
    while store.filtered.length:
        close_group(store, 1.0, 0.0)
    store.ledger.commit()
    assert open_store().filtered.length == 0


# ---------------------------------------------------------------- the datapipe


def make_config(root: Path, limit: int, **ppo: Any) -> ExperimentConfig:
    options = {"filter_zero_variance": True, **ppo}
    pipe = {"max_filtered_groups": limit, "max_failed_share": 0.6}
    return experiment(root, num_groups=2, group_size=2, pipe=pipe, **options)


async def stop_of(config: ExperimentConfig, script: Script) -> tuple[str, str, int]:
    """Run until the datapipe stops; return the trainer's and the datapipe's error, and the count.

    The deadline ends a run that never stops.
    """
    pipe = Datapipe(config, train=tasks(5), eval=[], registry=None)
    running = asyncio.create_task(pipe.run())
    await pipe.ready.wait()
    working = asyncio.create_task(FakeWorker(lambda: pipe.address, script=script).run())
    link = TrainerLink(lambda: pipe.address, rank=0, world_size=1)

    def body() -> None:
        link.start(0)
        link.report(Published(0))
        link.next_batch(0)

    try:
        async with asyncio.timeout(60):
            with pytest.raises(InvariantError) as of_trainer:
                await in_thread(body)
            with pytest.raises(InvariantError) as of_pipe:
                await running
    finally:
        running.cancel()
        working.cancel()
        await asyncio.gather(running, working, return_exceptions=True)
        link.close()
    return str(of_trainer.value), str(of_pipe.value), pipe.store.filtered.length


@pytest.mark.parametrize(
    ("script", "reason"), [(equal, "zero_variance"), (first_fails, "failed:boom")]
)
async def test_filtered_groups_in_a_row_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: Script, reason: str
) -> None:
    monkeypatch.setattr(datapipe, "REFUSAL_S", 0.5)
    monkeypatch.setattr(open_group, "BACK_OFF_S", 0.0)
    config = make_config(tmp_path, 12, partial_group="drop")
    of_trainer, of_pipe, count = await stop_of(config, script)
    assert of_pipe in of_trainer
    assert of_pipe.startswith(f"{count} groups in a row were filtered, and none was completed: ")
    assert f"{count} {reason}." in of_pipe and "(datapipe.max_filtered_groups=12)" in of_pipe
    assert 12 <= count < 12 + 2 * 3, "it stops before it leases further groups"
    assert audit(run_paths(config).ledger).filtered_by_reason[reason] == count


async def test_trainer_that_starts_again_restarts_the_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resume after the stop: the user may have corrected the reward."""
    monkeypatch.setattr(datapipe, "REFUSAL_S", 0.5)
    config = make_config(tmp_path, 12)
    *_, count = await stop_of(config, equal)
    before = audit(run_paths(config).ledger).filtered_by_reason["zero_variance"]
    assert before == count >= 12
    *_, again = await stop_of(config, equal)
    both = audit(run_paths(config).ledger).filtered_by_reason["zero_variance"]
    # Groups that were leased before the resume may end before the trainer starts.
    assert again >= 12 and both >= before + again


async def test_without_a_bound_the_report_lasts_until_a_group_is_complete(tmp_path: Path) -> None:
    """The report is a wait, which console, panel and `arealite why` show."""
    config = make_config(tmp_path, 0)
    is_equal = True
    published: list[Wait] = []
    told: list[str] = []

    def script(lease: Lease, member: int) -> Episode:
        return episode(lease, member, reward=1.0 if is_equal else float(member))

    async with piped(config) as pipe:
        worker = FakeWorker(lambda: pipe.address, script=script)
        link = TrainerLink(lambda: pipe.address, rank=0, world_size=1)

        def see(waiting: Waiting) -> bool:
            nonlocal is_equal
            found = [wait for wait in list(table) if wait.owner == GROUP_FILTER]
            if found and is_equal:
                assert pipe.store.filtered.length >= REPORTED_FROM
                published.extend(found)
                told.extend([found[0].detail, waiting.detail])
                is_equal = False
            return False

        def body() -> None:
            link.start(0)
            link.report(Published(0))
            answer = link.next_batch(0, on_wait=see)
            assert answer is not None
            assert not [wait for wait in list(table) if wait.owner == GROUP_FILTER]
            ids = [header.trajectory_id for header in answer[0].headers]
            link.report(StepReport(0, ids, {}))
            link.report(Finish("over"))

        async with asyncio.timeout(60):
            await asyncio.gather(worker.run(), in_thread(body))
        link.close()
    (wait,) = published
    assert wait.on == "datapipe-0"
    assert "groups in a row were filtered, and none was completed" in told[0]
    assert "groups filtered in a row" in told[1]


def test_every_known_reason_has_advice() -> None:
    assert {*filtered.FIXES} == {"zero_variance", "failed"}
