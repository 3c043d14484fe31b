"""Groups with failed episodes, late results, roll-backs and resumed turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from arealite.api.rollout_messages import Episode, Lease, Progress, TurnHeader
from arealite.api.trajectory import TrajectoryHeader
from arealite.system.datapipe.group_store import GroupStore
from arealite.system.ledger import group as open_group
from arealite.system.ledger.ledger import Ledger, read_turns
from tests.system.scenes import episode, experiment, failed, header, tasks

Make = Callable[..., GroupStore]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setattr(open_group, "BACK_OFF_S", 0.0)
    ledgers: list[Ledger] = []

    def build(
        *, group_size: int = 3, again: GroupStore | None = None, max_attempts: int = 2, **ppo: Any
    ) -> GroupStore:
        """Open a new store; or, as after kill -9, the committed state of `again`."""
        file = tmp_path / f"{len(ledgers)}.sqlite"
        if again is not None:
            again.ledger.commit()
            again.ledger.close()
            file = again.ledger.path
        ledgers.append(Ledger(file, fingerprint={}))
        ppo |= {"group_size": group_size, "max_attempts": max_attempts}
        config = experiment(tmp_path, **ppo).trainer.ppo
        store = GroupStore(ledgers[-1], tasks(4), ppo=config, seed=1, shuffle=True)
        if again is None:
            publish(store, 0)
        return store

    yield build
    for ledger in ledgers:
        ledger.close()


def publish(store: GroupStore, version: int) -> None:
    store.version = version
    store.ledger.set_meta("version", str(version))


def turn(index: int, *, member: int = 0, version: int = 0, seat: str = "agent"):
    return TurnHeader(member, seat, index, version)


def tell(store: GroupStore, lease: Lease, *turns: TurnHeader) -> None:
    """Store turns of a running episode; each payload is the lease id and the turn's index."""
    payloads = [f"{lease.lease_id} {t.seat} {t.index}".encode() for t in turns]
    store.add_turns(Progress("w", lease.lease_id, lease.group_id, list(turns)), payloads)


def lease_next(store: GroupStore, credit: int = 8) -> Lease:
    group = store.next_group()
    assert group
    return store.lease(group, worker_id="w", credit=credit)


def replace_headers(made: Episode, headers: list[TrajectoryHeader]) -> Episode:
    return Episode(made.lease_id, made.group_id, made.member, headers, None)


def stored(store: GroupStore, lease: Lease) -> list[bytes]:
    """Return the payloads that are sent with a lease."""
    store.ledger.commit()
    headers, payloads = read_turns(store.ledger.path, lease)
    assert headers == lease.turns
    return payloads


def turns_in(store: GroupStore) -> int:
    store.ledger.commit()
    return store.ledger.connection.execute("SELECT COUNT(*) FROM turns").fetchone()[0]


def run(store: GroupStore, outcome: Callable[[int], bool], *, version: int | None = None) -> Any:
    """Lease the next group, and finish or fail each member by `outcome`."""
    group = store.next_group()
    assert group
    lease = store.lease(group, worker_id="w", credit=8)
    for member in lease.members:
        if outcome(member):
            fields = {} if version is None else {"version": version}
            store.add_episode(episode(lease, member, **fields), [b""])
        else:
            store.add_episode(failed(lease, member), [])
    return group


def test_retry_leases_only_failed_members_and_then_filters(make: Make) -> None:
    store = make(partial_group="retry")
    group = run(store, lambda m: m != 1)
    assert group.state == "leased"
    assert group.leasable(2) == [1]
    assert run(store, lambda m: False) is group
    assert group.state == "filtered"
    assert store.counts["filtered:failed:episode_timeout"] == 1


def test_min_size_completes_a_group_with_two_members(make: Make) -> None:
    store = make(partial_group="min_size")
    group = run(store, lambda m: m != 1)
    assert run(store, lambda m: False) is group
    assert group.state == "complete"
    assert [h.member for h in group.headers] == [0, 2]
    other = run(store, lambda m: m == 0)
    run(store, lambda m: False)
    assert other.state == "filtered"


def test_drop_filters_at_the_first_failure(make: Make) -> None:
    store = make(partial_group="drop")
    assert run(store, lambda m: m != 0).state == "filtered"
    assert store.counts["leased"] == 0


def test_group_with_equal_rewards_is_filtered_and_replaced(make: Make) -> None:
    store = make(filter_zero_variance=True, max_staleness=0)
    for _ in range(3):
        assert run(store, lambda m: True).state == "filtered"
    assert store.next_group() is not None, "filtered groups do not count against admission"


@pytest.mark.parametrize("won", [1.0, 0.5])
def test_zero_variance_is_decided_per_seat(make: Make, won: float) -> None:
    """If x wins every game, the group has no variance, although the rewards of the seats differ."""
    store = make(filter_zero_variance=True, max_staleness=0)
    lease = lease_next(store)
    for member in lease.members:
        reward = won if member == 0 else 1.0
        seats = [
            header(lease.group_id, member, version=lease.version, reward=r, seat=seat)
            for seat, r in (("x", reward), ("o", -1.0))
        ]
        store.add_episode(replace_headers(episode(lease, member), seats), [b"", b""])
    assert store.counts["filtered:zero_variance"] == (won == 1.0)


@pytest.mark.parametrize(
    ("rewards", "is_filtered"),
    [
        ((1.0, None, 1.0), True),
        ((1.0, None, 0.0), False),
        ((0.0, None, None), True),
        ((None, None, None), True),
    ],
)
def test_zero_variance_compares_only_scores(
    make: Make, rewards: tuple[float | None, ...], is_filtered: bool
) -> None:
    store = make(filter_zero_variance=True, max_staleness=0)
    lease = lease_next(store)
    for member, reward in enumerate(rewards):
        store.add_episode(episode(lease, member, reward=reward), [b""])
    assert store.counts["filtered:zero_variance"] == is_filtered


def test_seat_without_scores_does_not_filter_the_group_of_another_seat(make: Make) -> None:
    store = make(group_size=2, filter_zero_variance=True, max_staleness=0)
    lease = lease_next(store)
    for member in lease.members:
        seats = [
            header(lease.group_id, member, version=lease.version, reward=r, seat=seat)
            for seat, r in (("x", float(member)), ("o", None))
        ]
        store.add_episode(replace_headers(episode(lease, member), seats), [b"", b""])
    assert store.counts["filtered:zero_variance"] == 0


def test_lengths_of_dropped_stale_groups_are_counted(make: Make) -> None:
    store = make(staleness_policy="drop", max_staleness=0, group_size=1)
    store.ppo = replace(store.ppo, batch_size=1)
    stale = run(store, lambda m: True)
    store.next_step = 1
    assert store.compose() is None
    assert stale.state == "filtered"
    assert dict(store.dropped_lengths) == {16: 1}
    assert store.counts["filtered:stale"] == 1


@pytest.mark.parametrize("policy", ["retry", "drop"])
def test_episode_that_always_kills_its_worker_fails_for_good(make: Make, policy: str) -> None:
    store = make(group_size=2, partial_group=policy)
    group = store.next_group()
    assert group
    lease = store.lease(group, worker_id="w", credit=2)
    store.add_episode(episode(lease, 0), [b""])
    store.end_lease(lease, is_lost=True)
    assert group.leasable(2) == [1], "only what was not in is an attempt, and one is not enough"
    store.end_lease(store.lease(group, worker_id="w", credit=2))
    assert group.leasable(2) == [1], "a lease that was given up is no attempt"
    store.end_lease(store.lease(group, worker_id="w", credit=2), is_lost=True)
    assert group.state == "filtered"
    assert store.counts["filtered:failed:worker_lost"] == 1
    assert sum(store.failed_window) == 0, "lost workers are not failing episodes"


def test_late_result_of_a_lost_lease_counts_once(make: Make) -> None:
    store = make(group_size=2)
    group = store.next_group()
    assert group
    lost = store.lease(group, worker_id="a", credit=2)
    store.end_lease(lost, is_lost=True)
    again = store.lease(group, worker_id="b", credit=2)
    assert again.lease_id != lost.lease_id
    store.add_episode(episode(lost, 0, reward=0.5), [b"late"])
    store.add_episode(episode(again, 0, reward=1.0), [b"second"])
    store.add_episode(episode(again, 1), [b"other"])
    assert group.state == "complete"
    assert [h.reward for h in group.headers] == [0.5, 1.0]


def test_late_result_beyond_the_staleness_bound_is_ignored(make: Make) -> None:
    store = make(group_size=1, max_staleness=1)
    group = store.next_group()
    assert group
    lost = store.lease(group, worker_id="a", credit=1)
    store.end_lease(lost, is_lost=True)
    store.version = store.next_step = 5
    again = store.lease(group, worker_id="b", credit=1)
    store.add_episode(episode(lost, 0, version=0), [b""])
    assert (group.finished, store.late_results) == ({}, 1)
    store.add_episode(episode(again, 0), [b""])
    assert group.state == "complete"


def test_admission_stops_at_eta_plus_one_batches(make: Make) -> None:
    store = make(max_staleness=1)
    for _ in range(4):
        run(store, lambda m: True)
    assert store.next_group() is None
    store.version = 1
    assert store.next_group() is not None


# ---------------------------------------------------------------- turns of running episodes


def test_turns_of_a_lost_lease_are_sent_with_the_next_lease(make: Make) -> None:
    store = make(group_size=2)
    lost = lease_next(store)
    tell(store, lost, turn(0), turn(0, member=1))
    tell(store, lost, turn(1))
    publish(store, 2)
    store.end_lease(lost, is_lost=True)
    group = store.groups[lost.group_id]
    assert group.start == 0, "what is kept may not get older than eta unseen"
    again = store.lease(group, worker_id="w2", credit=1)
    assert again.turns == [turn(0), turn(1)], "of its own members only"
    assert again.version == 0
    assert stored(store, again) == [b"g0.1.1 agent 0", b"g0.1.1 agent 1"]
    other = store.lease(group, worker_id="w3", credit=1)
    assert (other.members, other.turns) == ([1], [turn(0, member=1)])


def test_lease_without_turns_has_the_confirmed_version(make: Make) -> None:
    store = make(group_size=1)
    lost = lease_next(store)
    publish(store, 2)
    store.end_lease(lost, is_lost=True)
    again = lease_next(store)
    assert (again.group_id, again.version, again.turns) == ("g0", 2, [])


@pytest.mark.parametrize("end", ["finished", "failed", "given up", "filtered"])
def test_turns_are_deleted_when_the_episode_ends(make: Make, end: str) -> None:
    store = make(group_size=2, partial_group="drop" if end == "filtered" else "min_size")
    lease = lease_next(store)
    tell(store, lease, turn(0), turn(1), turn(0, member=1))
    assert turns_in(store) == 3
    if end == "finished":
        store.add_episode(episode(lease, 0), [b""])
    elif end == "failed":
        store.add_episode(failed(lease, 0), [])
    elif end == "filtered":
        store.add_episode(failed(lease, 1), [])
    else:
        store.add_episode(episode(lease, 1), [b""])
        store.end_lease(lease, is_lost=True)
        store.end_lease(lease_next(store), is_lost=True)
        assert store.counts["filtered:failed:worker_lost"] == 1
    left = {"finished": 1, "failed": 1, "given up": 0, "filtered": 0}[end]
    assert turns_in(store) == left
    assert sum(len(t) for g in store.groups.values() for t in g.turns.values()) == left


def test_progress_that_is_late_too_old_or_unleased_is_ignored(make: Make) -> None:
    store = make(group_size=2)
    lost = lease_next(store)
    tell(store, lost, turn(0))
    store.end_lease(lost, is_lost=True)
    publish(store, 1)
    again = lease_next(store)
    tell(store, lost, turn(1), turn(0), turn(0, member=1))  # its worker is alive after all
    assert stored(store, again) == [b"g0.1.1 agent 0"]
    store.add_episode(episode(again, 1), [b""])
    tell(store, again, turn(0, member=1))  # of an episode that has ended
    fresh = lease_next(store)
    tell(store, fresh, turn(0, version=0))  # older than its lease: it would break the bound
    strange = Lease("e0-0.1.1", "e0-0", "eval-0", fresh.task, [0], 0)
    tell(store, strange, turn(0))
    assert turns_in(store) == 1
    assert store.groups[fresh.group_id].start == 1


def test_turn_replaces_only_the_stored_turn_of_its_index(make: Make) -> None:
    """Concurrent turns end in any order, so a turn of a lower index deletes no other turn."""
    store = make(group_size=1, max_attempts=9)
    lost = lease_next(store)
    tell(store, lost, turn(0), turn(1), turn(2), turn(2, seat="judge"))
    store.end_lease(lost, is_lost=True)
    other = lease_next(store)
    tell(store, other, turn(1))
    store.end_lease(other, is_lost=True)
    last = lease_next(store)
    assert last.turns == [turn(0), turn(1), turn(2), turn(2, seat="judge")]
    names = [b"g0.1.1 agent 0", b"g0.1.2 agent 1", b"g0.1.1 agent 2", b"g0.1.1 judge 2"]
    assert stored(store, last) == names


def test_restart_restores_turns_attempts_and_failures(make: Make) -> None:
    store = make(group_size=3, max_attempts=3)
    lost = lease_next(store)
    tell(store, lost, turn(0), turn(1), turn(0, member=1), turn(0, member=2))
    store.add_episode(failed(lost, 1), [])
    store.end_lease(lost, is_lost=True)
    running = lease_next(store, credit=1)
    tell(store, running, turn(2))
    before = store.groups["g0"]
    store = make(group_size=3, max_attempts=3, again=store)
    after = store.groups["g0"]
    assert (after.turns, sorted(after.failures)) == (before.turns, sorted(before.failures))
    assert sorted(after.turns) == [0, 2]
    assert (after.start, after.leasable(3)) == (0, [1, 2])
    assert (after.exhausted(1), after.exhausted(2)) == ({0, 1, 2}, set())
    (held,) = after.leases.values()
    assert (held.lease_id, held.members, held.version) == (running.lease_id, [0], 0)
    tell(store, held, turn(3))
    assert [t.index for t in after.turns[0].values()] == [0, 1, 2, 3]


def train_step(store: GroupStore) -> list[int] | None:
    """Compose and train the next batch; return the ages of its tokens."""
    step, groups = store.next_step, store.compose()
    if groups is None:
        return None
    store.mark_trained(step)
    publish(store, step + 1)
    return [step - h.oldest_version for group in groups for h in group.headers]


def test_resumed_episode_holds_batches_back(make: Make) -> None:
    """Stored turns count between a worker's death and the next lease, or tokens get too old."""
    store = make(group_size=1, max_staleness=1)
    store.ppo = replace(store.ppo, batch_size=1)
    lost = lease_next(store)
    tell(store, lost, turn(0))
    run(store, lambda m: True)
    assert train_step(store) == [0]
    run(store, lambda m: True)
    assert store.counts["complete"] == 1
    store.end_lease(lost, is_lost=True)
    assert train_step(store) is None, "g0 is due in batch 1"
    again = lease_next(store)
    assert (again.group_id, again.version) == ("g0", 0)
    store.add_episode(episode(again, 0, version=0), [b""])
    assert train_step(store) == [1]


@pytest.mark.parametrize("policy", ["wait", "drop"])
def test_turns_too_old_for_a_smaller_eta_are_deleted(make: Make, policy: str) -> None:
    """Under `wait` this occurs only if the run is restarted with a smaller eta."""
    about = {"group_size": 1, "staleness_policy": policy, "num_groups": 1}
    store = make(max_staleness=2, **about)
    slow = lease_next(store)
    tell(store, slow, turn(0), turn(1))
    for _ in range(2):
        lease = lease_next(store)
        store.add_episode(episode(lease, 0), [b""])
        assert train_step(store)
    store = make(again=store, max_staleness=1, **about)
    store.end_lease(slow, is_lost=True)
    again = lease_next(store)
    assert (again.group_id, again.turns, again.version) == ("g0", [], 2)
    assert turns_in(store) == 0
    store.add_episode(episode(again, 0), [b""])
    assert train_step(store) == [0]


def test_groups_too_old_for_a_smaller_eta_hold_no_batch_back(make: Make) -> None:
    """Three groups of version 0 fit under η = 1; under η = 0, batch 0 takes two of them."""
    about = {"group_size": 1, "num_groups": 2, "max_attempts": 9}
    store = make(max_staleness=1, **about)
    leases = [lease_next(store) for _ in range(4)]
    for lease in leases[1:]:
        store.add_episode(episode(lease, 0), [b""])
    store.end_lease(leases[0], is_lost=True)
    store = make(again=store, max_staleness=0, **about)
    assert store.next_group() is None, "g0 would be a fourth one"
    assert train_step(store) == [0, 0]
    assert run(store, lambda m: True).group_id == "g0"
    assert train_step(store) is None
    assert store.counts["filtered:stale"] == 1
    run(store, lambda m: True)
    assert train_step(store) == [0, 0]


def test_masked_tokens_may_have_any_age(make: Make) -> None:
    store = make(group_size=1, staleness_policy="mask", max_staleness=0)
    lost = lease_next(store)
    tell(store, lost, turn(0))
    store.end_lease(lost, is_lost=True)
    store.version = store.next_step = 7
    assert lease_next(store).turns == [turn(0)]


# ---------------------------------------------------------------- roll-back and back-off


def test_after_a_roll_back_no_lease_before_the_next_publish(make: Make) -> None:
    about = {"group_size": 1, "num_groups": 1, "max_staleness": 1}
    store = make(**about)
    for _ in range(3):
        run(store, lambda m: True)
        assert train_step(store)
    running = lease_next(store)
    assert store.roll_back(1) == 2
    assert store.next_group() is None
    assert running.lease_id in store.groups[running.group_id].leases, "it goes on"
    store = make(again=store, **about)  # killed here
    assert store.version is None
    assert store.next_group() is None
    publish(store, 1)
    store.add_episode(episode(running, 0), [b""])
    assert store.groups[running.group_id].state == "complete"


def test_roll_back_to_the_confirmed_version_keeps_it(make: Make) -> None:
    store = make(group_size=1, num_groups=1)
    run(store, lambda m: True)
    assert train_step(store)
    store.roll_back(1)
    assert store.version == 1


def test_leases_lost_over_a_roll_back_do_not_block_batches(make: Make) -> None:
    """If all were leased at the old version, one batch would have to contain all of them."""
    store = make(group_size=1, num_groups=1, max_staleness=2, max_attempts=9)
    for _ in range(5):
        run(store, lambda m: True)
        assert train_step(store) == [0]
    held = [lease_next(store) for _ in range(3)]
    store.roll_back(3)
    for lease in held:
        store.end_lease(lease, is_lost=True)
    publish(store, 3)
    ages: list[int] = []
    for _ in range(5):
        while (group := store.next_group()) is not None:
            lease = store.lease(group, worker_id="w", credit=1)
            store.add_episode(episode(lease, 0), [b""])
        done = train_step(store)
        assert done is not None, "policy wait waits for ever"
        ages += done
    assert max(ages) <= 2
    assert not store.counts["filtered:stale"]


def test_rolled_back_batches_too_old_for_a_smaller_eta_are_not_repeated(make: Make) -> None:
    """Otherwise the trainer would refuse their tokens at every start."""
    about = {"group_size": 1, "num_groups": 1}
    store = make(max_staleness=2, **about)
    for _ in range(3):
        run(store, lambda m: True)  # all of version 0
    assert [store.compose() is not None for _ in range(3)] == [True] * 3
    store = make(again=store, max_staleness=1, **about)
    store.roll_back(0)
    publish(store, 0)
    assert [train_step(store) for _ in range(2)] == [[0], [1]]
    assert train_step(store) is None
    run(store, lambda m: True)
    assert train_step(store) == [0]
    assert store.counts["filtered:stale"] == 1


def test_lost_episode_is_leased_even_if_no_group_fits_a_smaller_batch(make: Make) -> None:
    """Groups that do not fit are dropped only once complete, so their episodes must run."""
    store = make(group_size=2, num_groups=2, max_staleness=1, max_attempts=9)
    for _ in range(4):
        run(store, lambda m: True)
    assert train_step(store) and train_step(store)
    lost = lease_next(store)
    store.add_episode(episode(lost, 0), [b""])
    store = make(again=store, group_size=2, num_groups=1, max_staleness=1, max_attempts=9)
    store.roll_back(0)
    publish(store, 0)
    store.end_lease(store.groups[lost.group_id].leases[lost.lease_id], is_lost=True)
    assert train_step(store) is None, "policy wait waits for running and pending episodes"
    again = lease_next(store)
    assert (again.group_id, again.members) == (lost.group_id, [1])
    store.add_episode(episode(again, 1), [b""])
    assert train_step(store) == [0, 0]


def test_lease_after_a_roll_back_makes_no_group_too_old(make: Make) -> None:
    """Groups of later versions are not all leased at the old version, due in one batch."""
    store = make(group_size=2, num_groups=1, max_staleness=2, max_attempts=9)
    for _ in range(2):
        run(store, lambda m: True)
        assert train_step(store)
    held = [lease_next(store) for _ in range(3)]
    for lease in held:
        store.add_episode(episode(lease, 0), [b""])
    store.roll_back(0)
    publish(store, 0)
    assert store.compose() and store.compose(), "a rank asks for the planned batches at once"
    for lease in held:
        store.end_lease(lease, is_lost=True)
    given: list[Lease] = []
    while (group := store.next_group()) is not None:
        given.append(store.lease(group, worker_id="w", credit=2))
    assert [lease.group_id for lease in given] == [held[0].group_id]
    for step in range(2):
        store.mark_trained(step)
        publish(store, step + 1)
    ages: list[int] = []
    for _ in range(4):
        while (group := store.next_group()) is not None:
            given.append(store.lease(group, worker_id="w", credit=2))
        for lease in given:
            for member in lease.members:
                store.add_episode(episode(lease, member), [b""])
        done = train_step(store)
        assert done is not None, "policy wait waits for ever"
        ages += done
    assert max(ages) <= 2
    assert not store.counts["filtered"]


def test_failed_episode_backs_off_longer_each_time(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    store = make(group_size=1, max_attempts=9, max_staleness=0, num_groups=1)
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


def test_batch_order_is_the_same_after_a_restart(make: Make):
    """Otherwise the shard of a rank that requests the batch again would not match the others."""
    store = make(group_size=2, num_groups=1)
    lease = lease_next(store)
    for member in (1, 0):
        made = [header(lease.group_id, member, seat=seat) for seat in ("white", "black", "judge")]
        store.add_episode(replace_headers(episode(lease, member), made), [b"x"] * 3)
    composed = store.compose()
    assert composed
    before = [h.trajectory_id for h in composed[0].headers]
    again = make(group_size=2, num_groups=1, again=store)
    assert [h.trajectory_id for h in again.batches[0][0].headers] == before


def test_at_most_one_batch_of_groups_is_created_beyond_the_last_step(make: Make) -> None:
    store = make(num_groups=2, max_staleness=4, total_steps=2)
    leases = []
    while (group := store.next_group()) is not None:
        leases.append(store.lease(group, worker_id="w", credit=8))
    assert len(leases) == 3 * 2, "two batches, and one so that the last waits for no straggler"
    publish(store, 2)
    store.end_lease(leases[0], is_lost=True)
    assert store.next_group() is None, "after the last step nobody needs it"
