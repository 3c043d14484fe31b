"""The reward exact_match."""

from __future__ import annotations

import pytest

from arealite.api.reward import RewardConfig, make_reward


@pytest.mark.parametrize(
    ("completion", "truth", "score"),
    [
        ("Paris", "paris", 1.0),
        ("I looked it up.\nThe Eiffel Tower!", "Eiffel tower", 1.0),
        ("The answer is: Paris.", "Paris", 1.0),
        ("Answer: Lyon? No.\nAnswer: Paris\nbecause of its tower", "Paris", 1.0),
        ("Paris or Lyon", "Paris", 0.0),
        ("Paris\nLyon", "Paris", 0.0),
        ("O'Neill", "ONeill", 1.0),
        ("42", "42", 1.0),
        ("4.2", "42", 0.0),
        ("-42", "42", 0.0),
        ("well-known", "well known", 1.0),
        ("", "Paris", 0.0),
        ("answer:", "Paris", 0.0),
        ("Ägypten", "ägypten", 1.0),
        ("The answer is A.", "A", 1.0),
        ("", "A", 0.0),
        ("the", "A", 0.0),
        ("...", "+", 0.0),
        ("answer: +", "+", 1.0),
    ],
)
async def test_answer_scores_1_if_it_matches_the_truth(
    completion: str, truth: str, score: float
) -> None:
    reward = make_reward(RewardConfig(type="exact_match"))
    assert await reward.score(completion, truth) == score
