"""Special cases of staleness, filters and roll-backs; `test_histories` has all usual histories."""

from __future__ import annotations

import pytest

from arealite.api.rollout_messages import Lease, TurnHeader
from arealite.system.datapipe.group_store import GroupStore
from arealite.system.ledger import group as open_group
from tests.payloads import GARBAGE
from tests.system.datapipe.stores import (
    OpenStore,
    add_turns,
    close_group,
    finish,
    lease_next,
    publish,
    seated,
    train_step,
)
from tests.system.scenes import failed

ONE = {"num_groups": 1, "group_size": 1, "max_attempts": 2}
"""Options of batches of one episode."""
WON, LOST, UNSCORED = 1.0, 0.0, None


@pytest.mark.parametrize(
    ("episodes", "is_filtered"),
    [
        # Rewards of the seats x and o: if x wins every game, no seat has variance.
        ([(1.0, -1.0), (1.0, -1.0)], True),
        ([(0.5, -1.0), (1.0, -1.0)], False),
        # A seat without scores does not filter the group of another seat.
        ([(0.0, UNSCORED), (1.0, UNSCORED)], False),
        ([(WON,), (UNSCORED,), (WON,)], True),
        ([(WON,), (UNSCORED,), (LOST,)], False),
        ([(LOST,), (UNSCORED,), (UNSCORED,)], True),
        ([(UNSCORED,), (UNSCORED,), (UNSCORED,)], True),
    ],
)
def test_zero_variance_compares_the_scores_of_each_seat(
    open_store: OpenStore, episodes: list[tuple[float | None, ...]], is_filtered: bool
) -> None:
    store = open_store(group_size=len(episodes), filter_zero_variance=True, max_staleness=0)
    lease = lease_next(store)
    for member, rewards in enumerate(episodes):
        made = seated(lease, member, dict(zip("xo", rewards, strict=False)))
        store.add_episode(made, [GARBAGE] * len(rewards))
    assert store.counts["filtered:zero_variance"] == is_filtered


def test_lengths_of_dropped_stale_groups_are_counted(open_store: OpenStore) -> None:
    store = open_store(staleness_policy="drop", max_staleness=0, **ONE)
    stale = close_group(store, 1.0)
    store.next_step = 1
    assert store.compose() is None
    assert stale.state == "filtered"
    assert dict(store.dropped_lengths) == {16: 1}
    assert store.counts["filtered:stale"] == 1


def test_late_result_beyond_the_staleness_bound_is_ignored(open_store: OpenStore) -> None:
    store = open_store(group_size=1, max_staleness=1)
    lost = lease_next(store)
    group = store.groups[lost.group_id]
    store.end_lease(lost, is_lost=True)
    store.version = store.next_step = 5
    again = store.lease(group, worker_id="b", credit=1)
    finish(store, lost, version=0)
    assert (group.finished, store.late_results) == ({}, 1)
    finish(store, again)
    assert group.state == "complete"


# ---------------------------------------------------------------- turns of running episodes


def turn(index: int) -> TurnHeader:
    return TurnHeader(member=0, seat="agent", index=index, oldest_version=0)


def test_resumed_episode_holds_batches_back(open_store: OpenStore) -> None:
    """Stored turns count between a worker's death and the next lease, or tokens get too old."""
    store = open_store(max_staleness=1, **ONE)
    lost = lease_next(store)
    add_turns(store, lost, [turn(0)])
    close_group(store, 1.0)
    assert train_step(store) == [0]
    close_group(store, 1.0)
    assert store.counts["complete"] == 1
    store.end_lease(lost, is_lost=True)
    assert train_step(store) is None, "g0 is due in batch 1"
    again = lease_next(store)
    assert (again.group_id, again.version) == ("g0", 0)
    finish(store, again, version=0)
    assert train_step(store) == [1]


@pytest.mark.parametrize("policy", ["wait", "drop"])
def test_turns_too_old_for_a_smaller_eta_are_deleted(open_store: OpenStore, policy: str) -> None:
    """Under `wait` this occurs only if the run is restarted with a smaller eta."""
    store = open_store(max_staleness=2, staleness_policy=policy, **ONE)
    slow = lease_next(store)
    add_turns(store, slow, [turn(0), turn(1)])
    for _ in range(2):
        close_group(store, 1.0)
        assert train_step(store)
    store = open_store(again=store, max_staleness=1, staleness_policy=policy, **ONE)
    store.end_lease(slow, is_lost=True)
    again = lease_next(store)
    assert (again.group_id, again.turns, again.version) == ("g0", [], 2)
    store.ledger.commit()
    assert not store.ledger.connection.execute("SELECT * FROM turns").fetchall()
    finish(store, again)
    assert train_step(store) == [0]


def test_groups_too_old_for_a_smaller_eta_hold_no_batch_back(open_store: OpenStore) -> None:
    """Three groups of version 0 fit under η = 1; under η = 0, batch 0 takes two of them."""
    options = {"group_size": 1, "num_groups": 2, "max_attempts": 9}
    store = open_store(max_staleness=1, **options)
    leases = [lease_next(store) for _ in range(4)]
    for lease in leases[1:]:
        finish(store, lease)
    store.end_lease(leases[0], is_lost=True)
    store = open_store(again=store, max_staleness=0, **options)
    assert store.next_group() is None, "g0 would be a fourth one"
    assert train_step(store) == [0, 0]
    assert close_group(store, 1.0).group_id == "g0"
    assert train_step(store) is None
    assert store.counts["filtered:stale"] == 1
    close_group(store, 1.0)
    assert train_step(store) == [0, 0]


def test_masked_tokens_may_have_any_age(open_store: OpenStore) -> None:
    store = open_store(staleness_policy="mask", max_staleness=0, **ONE)
    lost = lease_next(store)
    add_turns(store, lost, [turn(0)])
    store.end_lease(lost, is_lost=True)
    store.version = store.next_step = 7
    assert lease_next(store).turns == [turn(0)]


# ---------------------------------------------------------------- roll-back and back-off


def test_leases_lost_over_a_roll_back_do_not_block_batches(open_store: OpenStore) -> None:
    """If all were leased at the old version, one batch would have to contain all of them."""
    store = open_store(group_size=1, num_groups=1, max_staleness=2, max_attempts=9)
    for _ in range(5):
        close_group(store, 1.0)
        assert train_step(store) == [0]
    held = [lease_next(store) for _ in range(3)]
    store.roll_back(3)
    for lease in held:
        store.end_lease(lease, is_lost=True)
    publish(store, 3)
    ages: list[int] = []
    for _ in range(5):
        for lease in lease_all(store):
            finish(store, lease)
        done = train_step(store)
        assert done is not None, "policy wait waits for ever"
        ages += done
    assert max(ages) <= 2
    assert not store.counts["filtered:stale"]


def lease_all(store: GroupStore) -> list[Lease]:
    """Lease groups until none is due."""
    leases: list[Lease] = []
    while (group := store.next_group()) is not None:
        leases.append(store.lease(group, worker_id="w", credit=8))
    return leases


def test_rolled_back_batches_too_old_for_a_smaller_eta_are_not_repeated(
    open_store: OpenStore,
) -> None:
    """Otherwise the trainer would refuse their tokens at every start."""
    store = open_store(max_staleness=2, **ONE)
    for _ in range(3):
        close_group(store, 1.0)  # all of version 0
    assert [store.compose() is not None for _ in range(3)] == [True] * 3
    store = open_store(again=store, max_staleness=1, **ONE)
    store.roll_back(0)
    publish(store, 0)
    assert [train_step(store) for _ in range(2)] == [[0], [1]]
    assert train_step(store) is None
    close_group(store, 1.0)
    assert train_step(store) == [0]
    assert store.counts["filtered:stale"] == 1


def test_lost_episode_is_leased_even_if_no_group_fits_a_smaller_batch(
    open_store: OpenStore,
) -> None:
    """Groups that do not fit are dropped only once complete, so their episodes must run."""
    options = {"group_size": 2, "max_staleness": 1, "max_attempts": 9}
    store = open_store(num_groups=2, **options)
    for _ in range(4):
        close_group(store, 1.0, 1.0)
    assert train_step(store) and train_step(store)
    lost = lease_next(store)
    finish(store, lost, 0)
    store = open_store(again=store, num_groups=1, **options)
    store.roll_back(0)
    publish(store, 0)
    store.end_lease(store.groups[lost.group_id].leases[lost.lease_id], is_lost=True)
    assert train_step(store) is None, "policy wait waits for running and pending episodes"
    again = lease_next(store)
    assert (again.group_id, again.members) == (lost.group_id, [1])
    finish(store, again)
    assert train_step(store) == [0, 0]


def test_lease_after_a_roll_back_makes_no_group_too_old(open_store: OpenStore) -> None:
    """Groups of later versions are not all leased at the old version, due in one batch."""
    store = open_store(group_size=2, num_groups=1, max_staleness=2, max_attempts=9)
    for _ in range(2):
        close_group(store, 1.0, 1.0)
        assert train_step(store)
    held = [lease_next(store) for _ in range(3)]
    for lease in held:
        finish(store, lease, 0)
    store.roll_back(0)
    publish(store, 0)
    assert store.compose() and store.compose(), "a rank asks for the planned batches at once"
    for lease in held:
        store.end_lease(lease, is_lost=True)
    leases = lease_all(store)
    assert [lease.group_id for lease in leases] == [held[0].group_id]
    for step in range(2):
        store.mark_trained(step)
        publish(store, step + 1)
    ages: list[int] = []
    for _ in range(4):
        leases += lease_all(store)
        for lease in leases:
            finish(store, lease)
        done = train_step(store)
        assert done is not None, "policy wait waits for ever"
        ages += done
    assert max(ages) <= 2
    assert not store.counts["filtered"]


def test_failed_episode_backs_off_longer_each_time(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    store = open_store(group_size=1, max_attempts=9, max_staleness=0, num_groups=1)
    monkeypatch.setattr(open_group, "BACK_OFF_S", 0.2)
    monkeypatch.setattr(open_group.time, "monotonic", lambda: now)
    rests: list[float] = []
    for _ in range(7):
        lease = lease_next(store)
        store.add_episode(failed(lease, 0), [])
        begin = now
        while store.next_group() is None:
            now += 0.1
        rests.append(now - begin)
    assert rests == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0], abs=0.11)
    store.end_lease(lease_next(store), is_lost=True)
    assert store.next_group() is not None, "a dead worker is no reason to wait"


def test_at_most_one_batch_of_groups_is_created_beyond_the_last_step(
    open_store: OpenStore,
) -> None:
    store = open_store(num_groups=2, max_staleness=4, total_steps=2)
    leases = lease_all(store)
    assert len(leases) == 3 * 2, "two batches, and one so that the last waits for no straggler"
    publish(store, 2)
    store.end_lease(leases[0], is_lost=True)
    assert store.next_group() is None, "after the last step nobody needs it"
