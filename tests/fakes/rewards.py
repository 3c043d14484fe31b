"""Reward functions of tests. The process that calls them imports this module, and little else."""

from __future__ import annotations


def is_right(completion: str, ground_truth: str) -> bool:
    """Return whether an answer is the expected text."""
    return completion == ground_truth
