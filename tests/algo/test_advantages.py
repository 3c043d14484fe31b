"""Advantages: values by hand, naive implementations, and independence of order."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arealite.algo import advantages
from arealite.api.algorithm import AdvantageConfig


def group_advantages(
    rewards: list[float | None], groups: list, *, kind: str, eps: float
) -> list[float]:
    config = AdvantageConfig(type=kind, eps=eps)
    return advantages.group_advantages(rewards, groups, config.function, config)


def test_group_advantages_match_values_by_hand() -> None:
    rewards, groups = [1.0, 5.0, 0.0, 2.0], ["a", "b", "a", "a"]
    assert group_advantages(rewards, groups, kind="dr_grpo", eps=0.0) == [0.0, 0.0, -1.0, 1.0]
    assert group_advantages(rewards, groups, kind="grpo", eps=1.0) == [0.0, 0.0, -0.5, 0.5]
    # The others' means are 1, 1.5 and 0.5.
    assert group_advantages(rewards, groups, kind="rloo", eps=0.0) == [0.0, 0.0, -1.5, 1.5]


def test_seats_of_one_group_have_separate_baselines() -> None:
    groups = [("a", "x"), ("a", "y"), ("a", "x"), ("a", "y")]
    got = group_advantages([1.0, 9.0, 3.0, 9.0], groups, kind="dr_grpo", eps=0.0)
    assert got == [-1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
def test_groups_of_one_and_equal_rewards_get_zero(kind: str) -> None:
    # 0.1 three times: a mean of floats is not exactly 0.1, a std of 1e-17 would blow up.
    rewards, groups = [7.0, 0.1, 0.1, 0.1], ["one", "same", "same", "same"]
    assert group_advantages(rewards, groups, kind=kind, eps=1e-12) == [0.0] * 4


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
def test_episode_without_a_score_takes_no_part_in_its_group(kind: str) -> None:
    scored = group_advantages([1.0, 0.0, 5.0], ["a"] * 3, kind=kind, eps=1e-6)
    rewards = [1.0, None, 0.0, 5.0, None]
    got = group_advantages(rewards, ["a"] * 5, kind=kind, eps=1e-6)
    assert got == [scored[0], 0.0, scored[1], scored[2], 0.0]


def test_group_with_fewer_than_two_scores_has_no_variance() -> None:
    groups = [*"aabbccc"]
    rewards = [None, None, None, 1.0, 1.0, 0.0, None]
    assert group_advantages(rewards, groups, kind="grpo", eps=0.0)[:4] == [0.0] * 4


drawn_rewards = st.lists(
    st.tuples(st.sampled_from("abc"), st.floats(-10, 10, allow_nan=False)), max_size=20
)


@given(
    drawn_rewards, st.sampled_from(["grpo", "dr_grpo", "rloo"]), st.randoms(use_true_random=False)
)
def test_advantages_are_independent_of_order_and_sum_to_zero_per_group(
    drawn: list[tuple[str, float]], kind: str, rng: random.Random
) -> None:
    def of(members: list[int]) -> list[float]:
        rewards, groups = [drawn[i][1] for i in members], [drawn[i][0] for i in members]
        return group_advantages(rewards, groups, kind=kind, eps=1e-6)

    order = list(range(len(drawn)))
    first = of(order)
    rng.shuffle(order)
    assert of(order) == pytest.approx([first[i] for i in order], abs=1e-6)
    for group in "abc":
        total = sum(a for a, (key, _) in zip(first, drawn, strict=True) if key == group)
        assert abs(total) < 1e-6


@given(drawn_rewards)
def test_rloo_is_the_reward_minus_the_mean_of_the_others(drawn: list[tuple[str, float]]) -> None:
    rewards, groups = [r for _, r in drawn], [g for g, _ in drawn]
    got = group_advantages(rewards, groups, kind="rloo", eps=0.0)
    for i, (group, reward) in enumerate(drawn):
        others = [r for j, (g, r) in enumerate(drawn) if g == group and j != i]
        expected = reward - sum(others) / len(others) if others else 0.0
        assert got[i] == pytest.approx(expected, abs=1e-9)
