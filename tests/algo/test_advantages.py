"""Group advantages by id: hand-computed values, and freedom from order and position."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arealite.algo.advantages import group_advantages, group_counts
from arealite.api.trajectory import TrajectoryHeader
from arealite.base.errors import UserError


def header(group: str, reward: float, *, member: int = 0, seat: str = "agent") -> TrajectoryHeader:
    return TrajectoryHeader(
        trajectory_id=f"{group}/{member}/{seat}",
        group_id=group,
        member=member,
        seat=seat,
        task_id=group,
        reward=reward,
        reward_parts={},
        segment_lengths=[4],
        trained_tokens=2,
        oldest_version=0,
        newest_version=0,
        turns=1,
        truncated=False,
        interruptions=0,
        seconds=0.1,
        waits={},
    )


def test_values_by_hand() -> None:
    headers = [header("a", 1.0), header("b", 5.0), header("a", 0.0), header("a", 2.0)]
    assert group_advantages(headers, kind="dr_grpo", eps=0.0) == [0.0, 0.0, -1.0, 1.0]
    assert group_advantages(headers, kind="grpo", eps=1.0) == [0.0, 0.0, -0.5, 0.5]


def test_seats_of_one_group_are_apart() -> None:
    headers = [
        header("a", 1.0, seat="x"),
        header("a", 9.0, seat="y"),
        header("a", 3.0, seat="x"),
        header("a", 9.0, seat="y"),
    ]
    assert group_advantages(headers, kind="dr_grpo", eps=0.0) == [-1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo"])
def test_groups_of_one_and_equal_rewards_get_zero(kind: str) -> None:
    # 0.1 three times: a mean of floats is not exactly 0.1, a std of 1e-17 would blow up.
    headers = [header("one", 7.0), *(header("same", 0.1, member=i) for i in range(3))]
    assert group_advantages(headers, kind=kind, eps=1e-12) == [0.0] * 4
    assert group_counts(headers) == {
        "groups": 2.0,
        "groups_of_one": 1.0,
        "groups_zero_variance": 1.0,
    }


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(UserError, match="Unknown advantage type 'gae'"):
        group_advantages([], kind="gae", eps=0.0)


rewards = st.lists(
    st.tuples(st.sampled_from("abc"), st.floats(-10, 10, allow_nan=False)), max_size=20
)


@given(rewards, st.randoms(use_true_random=False))
def test_order_does_not_matter_and_groups_sum_to_zero(
    drawn: list[tuple[str, float]], rng: random.Random
) -> None:
    headers = [header(group, reward, member=i) for i, (group, reward) in enumerate(drawn)]
    of = {
        h.trajectory_id: a
        for h, a in zip(headers, group_advantages(headers, kind="grpo", eps=1e-6), strict=True)
    }
    rng.shuffle(headers)
    again = group_advantages(headers, kind="grpo", eps=1e-6)
    assert again == pytest.approx([of[h.trajectory_id] for h in headers], abs=1e-6)
    for group in "abc":
        total = sum(of[h.trajectory_id] for h in headers if h.group_id == group)
        assert abs(total) < 1e-6
    assert all(abs(a) < 20 for a in of.values())
