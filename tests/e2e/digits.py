"""A reward that a random model gets for some of its answers, so that its weights change."""

from __future__ import annotations


def begins_with_digit(completion: str) -> float:
    return float(completion[:1].isdigit())
