"""What becomes of groups whose episodes fail, and of results that come late."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from arealite.system import datapipe_groups
from arealite.system.datapipe_groups import GroupBook
from arealite.system.ledger import Ledger
from tests.system.scenes import episode, experiment, failed, tasks

Make = Callable[..., GroupBook]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setattr(datapipe_groups, "BACK_OFF_S", 0.0)
    ledgers: list[Ledger] = []

    def build(*, group_size: int = 3, **ppo: Any) -> GroupBook:
        ledgers.append(Ledger(tmp_path / f"{len(ledgers)}.sqlite", fingerprint={}))
        config = experiment(tmp_path, group_size=group_size, max_attempts=2, **ppo).trainer.ppo
        book = GroupBook(ledgers[-1], tasks(4), ppo=config, seed=1, shuffle=True)
        book.version = 0
        return book

    yield build
    for ledger in ledgers:
        ledger.close()


def run(book: GroupBook, outcome: Callable[[int], bool], *, version: int | None = None) -> Any:
    """Lease the next group whole, and end each member as `outcome` says."""
    group = book.next_offer()
    assert group
    lease = book.lease(group, worker_id="w", credit=8)
    for member in lease.members:
        if outcome(member):
            fields = {} if version is None else {"version": version}
            book.add(episode(lease, member, **fields), [b""])
        else:
            book.add(failed(lease, member), [])
    return group


def test_retry_offers_only_what_failed_and_then_filters(make: Make) -> None:
    book = make(partial_group="retry")
    group = run(book, lambda m: m != 1)
    assert group.state == "leased"
    assert group.missing(2) == [1]
    assert run(book, lambda m: False) is group
    assert group.state == "filtered"
    assert book.counts["filtered:failed:episode_timeout"] == 1


def test_min_size_keeps_two(make: Make) -> None:
    book = make(partial_group="min_size")
    group = run(book, lambda m: m != 1)
    assert run(book, lambda m: False) is group
    assert group.state == "complete"
    assert [h.member for h in group.headers] == [0, 2]
    other = run(book, lambda m: m == 0)
    run(book, lambda m: False)
    assert other.state == "filtered"


def test_drop_filters_at_the_first_failure(make: Make) -> None:
    book = make(partial_group="drop")
    assert run(book, lambda m: m != 0).state == "filtered"
    assert book.counts["leased"] == 0


def test_equal_rewards_are_filtered_and_refilled(make: Make) -> None:
    book = make(filter_zero_variance=True, max_staleness=0)
    for _ in range(3):
        assert run(book, lambda m: True).state == "filtered"
    assert book.next_offer() is not None, "filtered groups do not count against admission"


def test_stale_groups_are_dropped_with_their_lengths(make: Make) -> None:
    book = make(staleness_policy="drop", max_staleness=0, group_size=1)
    book.ppo = replace(book.ppo, batch_size=1)
    stale = run(book, lambda m: True)
    book.next_step = 1
    assert book.compose() is None
    assert stale.state == "filtered"
    assert dict(book.dropped_lengths) == {16: 1}
    assert book.counts["filtered:stale"] == 1


@pytest.mark.parametrize("policy", ["retry", "drop"])
def test_an_episode_that_always_kills_its_worker_is_given_up(make: Make, policy: str) -> None:
    book = make(group_size=2, partial_group=policy)
    group = book.next_offer()
    assert group
    lease = book.lease(group, worker_id="w", credit=2)
    book.add(episode(lease, 0), [b""])
    book.lose(lease)
    assert group.missing(2) == [1], "only what was not in is an attempt, and one is not enough"
    book.end(book.lease(group, worker_id="w", credit=2))
    assert group.missing(2) == [1], "a lease that was given up is no attempt"
    book.lose(book.lease(group, worker_id="w", credit=2))
    assert group.state == "filtered"
    assert book.counts["filtered:failed:worker_lost"] == 1
    assert sum(book.failed_window) == 0, "lost workers are not failing episodes"


def test_a_late_result_of_a_lost_lease_counts_once(make: Make) -> None:
    book = make(group_size=2)
    group = book.next_offer()
    assert group
    lost = book.lease(group, worker_id="a", credit=2)
    book.lose(lost)
    again = book.lease(group, worker_id="b", credit=2)
    assert again.lease_id != lost.lease_id
    book.add(episode(lost, 0, reward=0.5), [b"late"])
    book.add(episode(again, 0, reward=1.0), [b"second"])
    book.add(episode(again, 1), [b"other"])
    assert group.state == "complete"
    assert [h.reward for h in group.headers] == [0.5, 1.0]


def test_a_late_result_that_is_too_old_is_not_kept(make: Make) -> None:
    book = make(group_size=1, max_staleness=1)
    group = book.next_offer()
    assert group
    lost = book.lease(group, worker_id="a", credit=1)
    book.lose(lost)
    book.version = book.next_step = 5
    again = book.lease(group, worker_id="b", credit=1)
    book.add(episode(lost, 0, version=0), [b""])
    assert (group.finished, book.too_late) == ({}, 1)
    book.add(episode(again, 0), [b""])
    assert group.state == "complete"


def test_admission_stops_at_eta_plus_one_batches(make: Make) -> None:
    book = make(max_staleness=1)
    for _ in range(4):
        run(book, lambda m: True)
    assert book.next_offer() is None
    book.version = 1
    assert book.next_offer() is not None
