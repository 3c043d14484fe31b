"""Concurrency settles at the target utilisation, follows the environment, and is bounded."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arealite.ext.scaling.autoscale import Autoscaler, Reading

DT = 0.5
PERIOD_S = 5.0


class World:
    """A simulated server with `room` slots, and episodes that alternate with an environment.

    `room` may be less than the reported `capacity`.
    """

    def __init__(self, *, capacity: int, generate_s: float, think_s: float, room: int = 0) -> None:
        self.capacity, self.room = capacity, room or capacity
        self.generate_s, self.think_s = generate_s, think_s
        self.rng = random.Random(1)
        self.queue: deque[float] = deque()
        self.running: list[float] = []
        self.thinking: list[float] = []

    @property
    def in_flight(self) -> int:
        return len(self.queue) + len(self.running) + len(self.thinking)

    def advance(self, target: int) -> Reading:
        """Advance by DT seconds; return the reading."""
        around = self.rng.uniform
        for _ in range(target - self.in_flight):
            self.queue.append(self.generate_s * around(0.5, 1.5))
        self.admit()
        self.running = [left - DT for left in self.running]
        self.thinking = [left - DT for left in self.thinking]
        done = sum(left <= 0 for left in self.running)
        back = sum(left <= 0 for left in self.thinking)
        self.running = [left for left in self.running if left > 0]
        self.thinking = [left for left in self.thinking if left > 0]
        self.thinking += [self.think_s * around(0.5, 1.5) for _ in range(done)]
        for _ in range(back):  # an episode ends, or starts another turn if it is still wanted
            if self.in_flight < target:
                self.queue.append(self.generate_s * around(0.5, 1.5))
        self.admit()
        return Reading(
            running=len(self.running),
            waiting=len(self.queue),
            capacity=self.capacity,
            in_flight=self.in_flight,
        )

    def admit(self) -> None:
        while self.queue and len(self.running) < self.room:
            self.running.append(self.queue.popleft())


def play(
    scaler: Autoscaler, world: World, periods: int, *, least: int = 1, most: int = 10_000
) -> list[int]:
    """Return the target of each period."""
    targets: list[int] = []
    for _ in range(periods):
        readings = [world.advance(scaler.target) for _ in range(int(PERIOD_S / DT))]
        targets.append(scaler.decide(readings, least=least, most=most))
    return targets


def spread(targets: list[int]) -> float:
    return (max(targets) - min(targets)) / max(targets)


def busy(world: World, target: int, periods: int = 10) -> float:
    """Return the mean share of `room` that the server uses."""
    readings = [world.advance(target) for _ in range(int(periods * PERIOD_S / DT))]
    return sum(r.running for r in readings) / len(readings) / world.room


@settings(max_examples=12, deadline=None)
@given(
    capacity=st.integers(8, 64),
    generate_s=st.floats(1.0, 4.0),
    ratio=st.floats(0.7, 5.0),
    start=st.integers(1, 500),
)
def test_concurrency_settles_at_the_target_utilisation(
    capacity: int, generate_s: float, ratio: float, start: int
) -> None:
    world = World(capacity=capacity, generate_s=generate_s, think_s=generate_s * ratio)
    scaler = Autoscaler(utilisation=0.9, target=start)
    play(scaler, world, 40)
    settled = play(scaler, world, 20)
    assert spread(settled) <= 0.25 + 2 / settled[-1]
    assert settled[-1] == pytest.approx(0.9 * capacity * (1 + ratio), rel=0.25, abs=3)
    assert busy(world, scaler.target) > 0.7


def test_concurrency_follows_a_slow_and_then_a_fast_environment() -> None:
    world = World(capacity=32, generate_s=2.0, think_s=0.2)
    scaler = Autoscaler(utilisation=0.9, target=8)
    fast = play(scaler, world, 20)[-1]
    world.think_s = 10.0
    slow = play(scaler, world, 20)
    world.think_s = 0.2
    again = play(scaler, world, 20)[-1]
    assert fast == pytest.approx(32, rel=0.2)
    assert slow[-1] == pytest.approx(0.9 * 32 * 6, rel=0.2)
    assert again == pytest.approx(fast, rel=0.2)
    assert slow[9] > 3 * fast, "within ten periods"


def test_servers_with_overstated_capacity_get_no_long_queue() -> None:
    world = World(capacity=256, generate_s=2.0, think_s=1.0, room=20)
    scaler = Autoscaler(utilisation=0.9, target=64)
    play(scaler, world, 20)
    settled = play(scaler, world, 40)
    assert max(settled) < 1.6 * 20 * 1.5 and min(settled) > 0.7 * 20 * 1.5
    assert busy(world, scaler.target) > 0.8


def test_servers_without_a_reported_capacity_are_filled_until_requests_queue() -> None:
    world = World(capacity=0, generate_s=2.0, think_s=1.0, room=20)
    scaler = Autoscaler(utilisation=0.9, target=2)
    play(scaler, world, 20)
    assert busy(world, scaler.target) > 0.8
    assert scaler.target < 60


@given(st.lists(st.tuples(*[st.integers(0, 500)] * 4), max_size=30), st.integers(1, 50))
def test_concurrency_stays_within_its_bounds_for_any_readings(
    readings: list[tuple[int, int, int, int]], least: int
) -> None:
    scaler = Autoscaler(utilisation=0.9, target=least)
    for running, waiting, capacity, in_flight in readings:
        scaler.adjust_damping(running, allowed=waiting)
        reading = Reading(running=running, waiting=waiting, capacity=capacity, in_flight=in_flight)
        assert least <= scaler.decide([reading], least=least, most=least + 99) <= least + 99


def test_paused_servers_and_idle_workers_do_not_change_concurrency() -> None:
    scaler = Autoscaler(utilisation=0.9, target=40)
    for reading in (
        Reading(running=0, waiting=30, capacity=32, in_flight=40),
        Reading(running=0, waiting=0, capacity=32, in_flight=0),
    ):
        assert scaler.decide([reading] * 5, least=1, most=100) == 40


@pytest.mark.parametrize("surplus_rate", [1.3, 3.0, 10.0])
@pytest.mark.parametrize("num_groups", [2, 16])
def test_damping_keeps_the_surplus_of_rollouts_in_a_band(
    surplus_rate: float, num_groups: int
) -> None:
    """At full concurrency, `surplus_rate` batches are generated per trained batch."""
    scaler, eta, buffer, dampings, surpluses = Autoscaler(utilisation=0.9, target=9), 4, 0.0, [], []
    for _ in range(200):
        made = surplus_rate * scaler.damping * num_groups
        buffer = min(max(buffer, num_groups) - num_groups + made, (eta + 1) * num_groups)
        surplus = int(max(buffer - num_groups, 0))
        scaler.adjust_damping(surplus, allowed=eta * num_groups)
        dampings.append(scaler.damping * surplus_rate)
        surpluses.append(surplus / num_groups / eta)
    late = dampings[-60:]
    assert 0.6 < min(late) <= max(late) < 1.6
    assert sum(surpluses[-60:]) / 60 < 0.75, "not stale"
    assert sum(s == 0 for s in surpluses[-60:]) < 30, "seldom empty"


def test_synchronous_trainer_is_never_damped() -> None:
    scaler = Autoscaler(utilisation=0.9, target=9)
    for _ in range(10):
        scaler.adjust_damping(0, allowed=0)
    assert scaler.damping == 1.0


def test_damping_recovers_soon_after_a_long_surplus() -> None:
    world = World(capacity=100, generate_s=2.0, think_s=2.0)
    scaler = Autoscaler(utilisation=0.9, target=100)
    full = play(scaler, world, 20)[-1]
    for _ in range(200):
        scaler.adjust_damping(100, allowed=100)
        play(scaler, world, 1, least=20)
    assert scaler.target == 20
    for _ in range(20):
        scaler.adjust_damping(0, allowed=100)
        play(scaler, world, 1, least=20)
    assert scaler.target > 0.7 * full
