"""Servers in 16 bits whose scores did not change."""

from __future__ import annotations

import numpy as np
import pytest

from arealite.ext.served_policy.scores import Evidence, ServerScores, Tolerance

NOISE = np.tile([0.03, -0.03], 8)
"""The server's scores minus the trainer's, if both have the same weights."""
FIRST = np.linspace(-6.0, -2.0, 16)


def evidence(change: float, own_change: float, *, is_mixture: bool = False) -> Evidence:
    """The trainer's scores have changed since version 3, and the server's own scores, too."""
    tolerance = Tolerance("bfloat16", is_mixture=is_mixture)
    tolerance.learn(tolerance.errors(FIRST + NOISE, FIRST), FIRST)
    return Evidence(
        version=5,
        scores=ServerScores(
            prompt_T=FIRST + NOISE + own_change, fresh_K=np.zeros(0), cached_K=np.zeros(0)
        ),
        expected={3: FIRST, 4: FIRST + change / 2, 5: FIRST + change},
        tolerance=tolerance,
        previous_version=3,
        previous_T=FIRST + NOISE,
        drops_caches=True,
    )


@pytest.mark.parametrize("change", [0.0, 0.001, 0.0025])
def test_change_that_a_server_rounds_away_is_no_fault(change: float) -> None:
    """Ordinary publishes had such changes where the noise was 0.03 nats."""
    assert not evidence(change, own_change=0.0).fault()


def test_server_that_follows_the_trainer_has_no_fault() -> None:
    assert not evidence(0.02, own_change=0.02).fault()


def test_scores_that_stay_equal_for_two_versions_are_old() -> None:
    assert "the scores did not change, and the trainer's did by 0.02" in evidence(0.02, 0.0).fault()


def test_experts_that_rounding_chooses_are_no_old_weights() -> None:
    """The trainer moved from one side of the server to the other, and is as near as before."""
    moved = evidence(0.0, 0.0, is_mixture=True)
    moved.expected[5] = FIRST + 1.9 * NOISE
    assert not moved.fault()
    dense = evidence(0.0, 0.0)
    dense.expected[5] = FIRST + 1.9 * NOISE
    assert "the scores did not change" in dense.fault()


def test_old_weights_of_a_mixture_are_found_from_half_of_the_bound_on() -> None:
    assert "old weights" in evidence(0.15, 0.0, is_mixture=True).fault()
