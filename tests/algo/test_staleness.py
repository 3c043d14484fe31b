"""Simulate the staleness contract with random latencies, failures and filters, for each η."""

from __future__ import annotations

import heapq
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arealite.algo.staleness import Candidate, blocking_groups, fits, may_lease, select_batch


class Simulation:
    """An event simulation of a trainer, a slow publisher, and groups of random duration."""

    def __init__(self, seed: int, *, policy: str, eta: int, num_groups: int, steps: int) -> None:
        self.dice = random.Random(seed)
        self.policy, self.eta, self.num_groups, self.steps = policy, eta, num_groups, steps
        self.running: dict[int, int] = {}
        self.complete: dict[int, int] = {}
        self.version, self.step, self.now = 0, 0, 0.0
        self.filtered = 0
        self.events: list[tuple[float, int, str]] = []
        self.ages: list[int] = []
        self.trainer_idle = True

    def run(self) -> None:
        seq = 0
        while self.step < self.steps:
            outstanding = len(self.ages) + len(self.running) + len(self.complete)
            kwargs = {"eta": self.eta, "num_groups": self.num_groups}
            while len(self.running) < 12 and may_lease(outstanding, self.version, **kwargs):
                self.running[seq] = self.version
                slow = 40.0 if self.dice.random() < 0.1 else 1.0
                self.push(self.dice.expovariate(1.0) * slow, seq, "done")
                seq, outstanding = seq + 1, outstanding + 1
            self.try_batch()
            assert self.events, "deadlock"
            self.now, item, kind = heapq.heappop(self.events)
            getattr(self, kind)(item)

    def push(self, after: float, item: int, kind: str) -> None:
        heapq.heappush(self.events, (self.now + after, item, kind))

    def done(self, seq: int) -> None:
        start = self.running.pop(seq)
        draw = self.dice.random()
        if draw < 0.05:  # the worker was lost: restart the group with the current version
            self.running[seq] = self.version
            self.push(self.dice.random(), seq, "done")
        elif draw < 0.2:
            self.filtered += 1
        else:
            self.complete[seq] = start

    def try_batch(self) -> None:
        if not self.trainer_idle:
            return
        found = [Candidate(start=s, seq=q, is_complete=False) for q, s in self.running.items()]
        found += [Candidate(start=s, seq=q, is_complete=True) for q, s in self.complete.items()]
        chosen = select_batch(
            found, self.step, policy=self.policy, eta=self.eta, num_groups=self.num_groups
        )
        if chosen is None:
            return
        for candidate in chosen:
            self.ages.append(self.step - self.complete.pop(candidate.seq))
        self.trainer_idle = False
        self.push(self.dice.random() * 3, self.step, "trained")

    def trained(self, step: int) -> None:
        self.step, self.trainer_idle = step + 1, True
        self.push(self.dice.random(), step + 1, "published")

    def published(self, version: int) -> None:
        self.version = max(self.version, version)


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    eta=st.integers(0, 5),
    num_groups=st.integers(1, 5),
)
def test_wait_bounds_every_age_and_never_deadlocks(seed: int, eta: int, num_groups: int) -> None:
    run = Simulation(seed, policy="wait", eta=eta, num_groups=num_groups, steps=25)
    run.run()
    assert len(run.ages) == 25 * num_groups
    assert max(run.ages) <= eta
    assert min(run.ages) >= 0


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), eta=st.integers(0, 3))
def test_mask_releases_full_batches(seed: int, eta: int) -> None:
    run = Simulation(seed, policy="mask", eta=eta, num_groups=3, steps=25)
    run.run()
    assert len(run.ages) == 75


def test_mask_exceeds_the_staleness_bound() -> None:
    """The simulation produces ages above the bound, so the bound is tested."""
    ages: list[int] = []
    for seed in range(20):
        run = Simulation(seed, policy="mask", eta=2, num_groups=2, steps=25)
        run.run()
        ages += run.ages
    assert max(ages) > 2


def test_wait_withholds_a_batch_that_would_deadlock_a_later_one() -> None:
    """b and c of version 0 are both due in batch 2, so batch 1 must not train d first."""
    b, c, d = (
        Candidate(start=0, seq=1, is_complete=False),
        Candidate(start=0, seq=2, is_complete=False),
        Candidate(start=1, seq=3, is_complete=True),
    )
    assert select_batch([b, c, d], 1, policy="wait", eta=2, num_groups=1) is None
    assert select_batch([b, c, d], 1, policy="mask", eta=2, num_groups=1) == [d]


def test_eta_0_is_synchronous() -> None:
    assert [may_lease(n, 0, eta=0, num_groups=2) for n in range(4)] == [True, True, False, False]
    late = Candidate(start=0, seq=9, is_complete=False)
    full = [Candidate(start=0, seq=seq, is_complete=True) for seq in range(2)]
    assert select_batch([*full, late], 0, policy="wait", eta=0, num_groups=2) is None
    assert select_batch(full, 0, policy="wait", eta=0, num_groups=2) == full


def test_no_lease_before_a_version_is_published() -> None:
    assert not may_lease(0, None, eta=4, num_groups=64)


def test_batch_takes_oldest_groups_first_then_in_order() -> None:
    found = [
        Candidate(start=1, seq=0, is_complete=True),
        Candidate(start=0, seq=5, is_complete=True),
        Candidate(start=0, seq=2, is_complete=True),
    ]
    chosen = select_batch(found, 1, policy="wait", eta=3, num_groups=2)
    assert chosen is not None
    assert [c.seq for c in chosen] == [2, 5]


def test_blocking_groups_are_the_slow_ones() -> None:
    slow, fine = (
        Candidate(start=0, seq=3, is_complete=False),
        Candidate(start=2, seq=4, is_complete=False),
    )
    kwargs = {"eta": 2, "num_groups": 1}
    assert blocking_groups(
        [fine, slow, Candidate(start=0, seq=1, is_complete=True)], 2, **kwargs
    ) == [slow]
    assert blocking_groups([fine, Candidate(start=0, seq=1, is_complete=True)], 2, **kwargs) == []


def test_blocking_groups_include_groups_due_in_the_same_batch() -> None:
    """Neither b nor c is late alone, but both are due in batch 2."""
    b, c, d = (
        Candidate(start=0, seq=1, is_complete=False),
        Candidate(start=0, seq=2, is_complete=False),
        Candidate(start=1, seq=3, is_complete=True),
    )
    late = Candidate(start=1, seq=4, is_complete=False)
    assert blocking_groups([d, late, c, b], 1, eta=2, num_groups=1) == [b, c]


@settings(max_examples=200, deadline=None)
@given(
    groups=st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=12),
    step=st.integers(0, 4),
    eta=st.integers(0, 4),
    num_groups=st.integers(1, 3),
)
def test_blocking_groups_exist_exactly_if_wait_withholds_a_full_batch(
    groups: list[tuple[int, bool]], step: int, eta: int, num_groups: int
) -> None:
    found = [
        Candidate(start=start, seq=seq, is_complete=done)
        for seq, (start, done) in enumerate(groups)
    ]
    if sum(c.is_complete for c in found) < num_groups:
        return
    everyone = [c.start for c in found]
    if not fits(everyone, step, eta=eta, num_groups=num_groups):
        return  # admission and earlier steps never produce such a set
    kwargs = {"eta": eta, "num_groups": num_groups}
    is_kept_back = select_batch(found, step, policy="wait", **kwargs) is None
    assert bool(blocking_groups(found, step, **kwargs)) is is_kept_back


@pytest.mark.parametrize(
    ("starts", "expected"), [([], True), ([1, 1, 2, 2], True), ([1, 1, 1], False), ([0], False)]
)
def test_fits_compares_groups_with_their_due_batches(starts: list[int], expected: bool) -> None:
    assert fits(starts, 3, eta=2, num_groups=2) is expected
