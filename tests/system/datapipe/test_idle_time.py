"""The trainer's idle time is counted by cause; the share of slow episodes is a moving average."""

from __future__ import annotations

import pytest

from arealite.system.datapipe import trainer_request_handler
from arealite.system.datapipe.trainer_request_handler import SHARE_WINDOW_S, IdleClock


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch):
    now = 100.0
    monkeypatch.setattr(trainer_request_handler.time, "monotonic", lambda: now)

    def pass_by(clock: IdleClock, seconds: float, then: str | None) -> None:
        nonlocal now
        now += seconds
        clock.mark(then)

    return pass_by


def test_seconds_count_for_the_previous_cause(wait) -> None:
    clock = IdleClock()
    wait(clock, 5.0, "groups")  # busy until now
    wait(clock, 2.0, "slow_episodes")
    wait(clock, 3.0, "slow_episodes")
    wait(clock, 1.0, None)
    wait(clock, 9.0, "groups")
    assert clock.take() == {"groups_wait_s": 2.0, "slow_episodes_wait_s": 4.0}
    assert clock.take() == {"groups_wait_s": 0.0, "slow_episodes_wait_s": 0.0}


def test_share_rises_during_pacing_and_falls_after(wait) -> None:
    clock = IdleClock()
    wait(clock, 1000.0, "slow_episodes")
    assert clock.slow_share == 0.0
    wait(clock, 0.25 * SHARE_WINDOW_S, "slow_episodes")
    assert 0.2 < clock.slow_share < 0.25
    for _ in range(400):  # marks in between change nothing
        wait(clock, 0.01 * SHARE_WINDOW_S, "slow_episodes")
    assert clock.slow_share == pytest.approx(1.0, abs=0.02)
    wait(clock, 0.0, None)
    wait(clock, SHARE_WINDOW_S, None)
    assert clock.slow_share == pytest.approx(0.36, abs=0.02)


def test_share_converges_to_the_share_of_time(wait) -> None:
    clock = IdleClock()
    for _ in range(500):
        wait(clock, 0.7, "slow_episodes")
        wait(clock, 0.3, None)
    assert clock.slow_share == pytest.approx(0.3, abs=0.02)
