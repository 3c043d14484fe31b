"""A run whose groups are all filtered is reported, and ends at `datapipe.max_filtered_groups`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from arealite.api.experiment_config import run_paths
from arealite.api.rollout_messages import Episode, Lease
from arealite.api.trainer_messages import Finish, StepReport, Waiting
from arealite.ext.audit.audit import audit
from arealite.system.datapipe import filtered
from arealite.system.datapipe.filtered import REPORTED_FROM
from arealite.system.health.waits import GROUP_FILTER, Wait, table
from arealite.system.ledger import group as open_group
from arealite.system.links.trainer_link import TrainerLink
from tests.system.datapipe.stores import OpenStore, close_group, lease_next
from tests.system.live import StartPipe, begin
from tests.system.scenes import episode, failed

Script = Callable[[Lease, int], Episode]


def equal(lease: Lease, member: int) -> Episode:
    return episode(lease, member, reward=1.0)


def first_fails(lease: Lease, member: int) -> Episode:
    """Fail one episode of each group: a small share of all episodes."""
    return failed(lease, member, "boom") if member == 0 else episode(lease, member, reward=member)


# ---------------------------------------------------------------- the count


COUNTED = {"group_size": 2, "filter_zero_variance": True, "max_attempts": 1}


def test_filtered_groups_count_by_reason_until_a_group_is_complete(open_store: OpenStore) -> None:
    store = open_store(**COUNTED)
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


def test_group_that_loses_its_workers_counts(open_store: OpenStore) -> None:
    """No episode of it ends, so `max_failed_share` does not count it."""
    store = open_store(**COUNTED)
    store.end_lease(lease_next(store), is_lost=True)
    assert store.filtered.counts == {"failed:worker_lost": 1}


def test_stale_groups_do_not_count(open_store: OpenStore) -> None:
    """Only a trained step makes a complete group too old, so the run makes progress."""
    store = open_store(staleness_policy="drop", max_staleness=0, **COUNTED)
    close_group(store, 1.0, 0.0)
    store.next_step = 1
    assert store.compose() is None
    assert store.counts["filtered:stale"] == 1
    assert store.filtered.length == 0


@pytest.mark.parametrize("is_committed", [True, False])
def test_count_after_a_kill_is_that_of_the_closed_groups(
    open_store: OpenStore, is_committed: bool
) -> None:
    store = open_store(**COUNTED)
    for _ in range(3):
        close_group(store, 1.0, 1.0)
    store.ledger.commit()
    close_group(store, 1.0, None)
    if is_committed:
        store.ledger.commit()
    store = open_store(again=store, commits=False, **COUNTED)
    closed = store.ledger.connection.execute(
        "SELECT reason, COUNT(*) FROM groups WHERE state = 'filtered' GROUP BY reason"
    )
    assert store.filtered.counts == dict(closed.fetchall())
    assert store.filtered.length == (4 if is_committed else 3)
    store = open_store(again=store, commits=False, **COUNTED)
    while store.filtered.length:
        close_group(store, 1.0, 0.0)
    store.ledger.commit()
    assert open_store(again=store, **COUNTED).filtered.length == 0


# ---------------------------------------------------------------- the datapipe


OPTIONS = {"num_groups": 2, "group_size": 2, "filter_zero_variance": True}


def stopped_at(limit: int) -> dict[str, Any]:
    return {"pipe": {"max_filtered_groups": limit, "max_failed_share": 0.6}, **OPTIONS}


def request(link: TrainerLink) -> None:
    begin(link)
    link.next_batch(0)


@pytest.mark.parametrize(
    ("script", "reason"), [(equal, "zero_variance"), (first_fails, "failed:boom")]
)
async def test_filtered_groups_in_a_row_stop_the_run(
    start_pipe: StartPipe, monkeypatch: pytest.MonkeyPatch, script: Script, reason: str
) -> None:
    monkeypatch.setattr(open_group, "BACK_OFF_S", 0.0)
    live = await start_pipe(partial_group="drop", **stopped_at(12))
    live.work(script=script)
    error = await live.refused(request)
    count = live.pipe.machine.store.filtered.length
    assert error.startswith(f"{count} groups in a row were filtered, and none was completed: ")
    assert f"{count} {reason}." in error and "(datapipe.max_filtered_groups=12)" in error
    assert 12 <= count < 12 + 2 * 3, "it stops before it leases further groups"
    assert audit(run_paths(live.config).ledger).filtered_by_reason[reason] == count


async def test_trainer_that_starts_again_restarts_the_count(start_pipe: StartPipe) -> None:
    """Resume after the stop: the user may have corrected the reward."""
    counts: list[int] = []
    totals: list[int] = []
    for _ in range(2):
        live = await start_pipe(**stopped_at(12))
        live.work(script=equal)
        await live.refused(request)
        counts.append(live.pipe.machine.store.filtered.length)
        totals.append(audit(run_paths(live.config).ledger).filtered_by_reason["zero_variance"])
        await live.close()
    assert totals[0] == counts[0] >= 12
    # Groups that were leased before the resume may end before the trainer starts.
    assert counts[1] >= 12 and totals[1] >= totals[0] + counts[1]


async def test_without_a_bound_the_report_lasts_until_a_group_is_complete(
    start_pipe: StartPipe,
) -> None:
    """The report is a wait, which console, panel and `arealite why` show."""
    live = await start_pipe(**stopped_at(0))
    is_equal = True
    published: list[Wait] = []
    details: list[str] = []

    def script(lease: Lease, member: int) -> Episode:
        return episode(lease, member, reward=1.0 if is_equal else float(member))

    def reports() -> list[Wait]:
        return [wait for wait in list(table) if wait.owner == GROUP_FILTER]

    def see(waiting: Waiting) -> bool:
        nonlocal is_equal
        if is_equal and reports():
            assert live.pipe.machine.store.filtered.length >= REPORTED_FROM
            published.extend(reports())
            details.extend([reports()[0].detail, waiting.detail])
            is_equal = False
        return False

    def body(link: TrainerLink) -> None:
        begin(link)
        answer = link.next_batch(0, on_wait=see)
        assert answer is not None
        assert not reports()
        link.report(
            StepReport(
                step=0, trained=[header.trajectory_id for header in answer[0].headers], metrics={}
            )
        )
        link.report(Finish(reason="over"))

    live.work(script=script)
    async with asyncio.timeout(60):
        await live.trainer(body)
    await live.end()
    (wait,) = published
    assert wait.on == "datapipe-0"
    assert "groups in a row were filtered, and none was completed" in details[0]
    assert "groups filtered in a row" in details[1]


def test_every_known_reason_has_advice() -> None:
    assert {*filtered.FIXES} == {"zero_variance", "failed"}
