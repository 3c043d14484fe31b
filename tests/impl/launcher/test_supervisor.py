"""The budget of a role's deaths, and its pauses."""

from __future__ import annotations

from arealite.impl.launcher.supervisor import Budget


def test_pauses_grow_while_deaths_follow_each_other():
    budget = Budget(limit=100)
    pauses = [budget.spend("x", mark=0, lived_s=1.0) for _ in range(9)]
    assert pauses == [0.0, 0.25, 0.5, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0]
    assert budget.spend("x", mark=0, lived_s=11.0) == 0.0, "it had lived for long"
    assert budget.spend("x", mark=0, lived_s=1.0) == 0.0, "the first of a new row"


def test_one_death_more_than_the_limit_is_the_end():
    budget = Budget(limit=2)
    said = [budget.spend(str(n), mark=-1, lived_s=1.0) is None for n in range(3)]
    assert said == [False, False, True]
    assert (budget.deaths, budget.first) == (3, "0")


def test_progress_begins_count_and_pauses_anew():
    budget = Budget(limit=1)
    for mark in range(6):
        assert budget.spend(f"at {mark}", mark=mark, lived_s=1.0) == 0.0
    assert (budget.deaths, budget.first) == (1, "at 5")
    assert budget.spend("again", mark=5, lived_s=1.0) is None
    assert budget.first == "at 5"
