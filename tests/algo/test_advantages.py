"""Advantages: hand-computed values, naive second implementations, and freedom from order."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arealite.algo.advantages import group_advantages, group_counts
from arealite.base.errors import UserError


def test_values_by_hand() -> None:
    rewards, groups = [1.0, 5.0, 0.0, 2.0], ["a", "b", "a", "a"]
    assert group_advantages(rewards, groups, kind="dr_grpo", eps=0.0) == [0.0, 0.0, -1.0, 1.0]
    assert group_advantages(rewards, groups, kind="grpo", eps=1.0) == [0.0, 0.0, -0.5, 0.5]
    # The others' means are 1, 1.5 and 0.5.
    assert group_advantages(rewards, groups, kind="rloo", eps=0.0) == [0.0, 0.0, -1.5, 1.5]


def test_seats_of_one_group_are_apart() -> None:
    groups = [("a", "x"), ("a", "y"), ("a", "x"), ("a", "y")]
    got = group_advantages([1.0, 9.0, 3.0, 9.0], groups, kind="dr_grpo", eps=0.0)
    assert got == [-1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
def test_groups_of_one_and_equal_rewards_get_zero(kind: str) -> None:
    # 0.1 three times: a mean of floats is not exactly 0.1, a std of 1e-17 would blow up.
    rewards, groups = [7.0, 0.1, 0.1, 0.1], ["one", "same", "same", "same"]
    assert group_advantages(rewards, groups, kind=kind, eps=1e-12) == [0.0] * 4
    assert group_counts(rewards, groups) == {
        "groups": 2.0,
        "groups_of_one": 1.0,
        "groups_zero_variance": 1.0,
    }


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(UserError, match="Unknown advantage type 'gae'"):
        group_advantages([], [], kind="gae", eps=0.0)


drawn_rewards = st.lists(
    st.tuples(st.sampled_from("abc"), st.floats(-10, 10, allow_nan=False)), max_size=20
)


@given(
    drawn_rewards, st.sampled_from(["grpo", "dr_grpo", "rloo"]), st.randoms(use_true_random=False)
)
def test_order_does_not_matter_and_groups_sum_to_zero(
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
def test_leave_one_out_is_the_reward_less_the_others_mean(drawn: list[tuple[str, float]]) -> None:
    rewards, groups = [r for _, r in drawn], [g for g, _ in drawn]
    got = group_advantages(rewards, groups, kind="rloo", eps=0.0)
    for i, (group, reward) in enumerate(drawn):
        others = [r for j, (g, r) in enumerate(drawn) if g == group and j != i]
        expected = reward - sum(others) / len(others) if others else 0.0
        assert got[i] == pytest.approx(expected, abs=1e-9)
