"""A hundred runs of the simulation, and checks that it is strict and repeatable."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulation.simulation import Outcome, simulate

SEEDS = range(100)


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    return [simulate(seed) for seed in SEEDS]


def test_no_seed_violates_an_invariant(outcomes: list[Outcome]) -> None:
    broken = {o.seed: o.violation for o in outcomes if o.violation}
    assert not broken, "play it again: python tools/simulate.py --seed N --trace"


def test_every_kind_of_fault_occurs(outcomes: list[Outcome]) -> None:
    """A simulation without faults would pass every test."""
    sums: Counter[str] = Counter()
    for outcome in outcomes:
        sums.update(outcome.counts)
    assert sums["kills"] > 100
    for name in ("lost", "duplicated", "partitions", "resets", "launches", "unroutable"):
        assert sums[name] > 10, name
    assert sum(o.checked for o in outcomes) > 50_000


@pytest.mark.parametrize("seed", [3, 11, 42])
def test_same_seed_gives_the_same_run(seed: int, outcomes: list[Outcome]) -> None:
    first, second = outcomes[seed], simulate(seed)
    assert (first.digest, first.virtual_s, first.counts) == (
        second.digest,
        second.virtual_s,
        second.counts,
    )
    assert first.digest != outcomes[seed + 1].digest
