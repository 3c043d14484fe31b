"""Reward 1 when an answer is the ground truth in the same words, for answers that are no numbers.

Compared as SQuAD does it (Rajpurkar et al., 2016): without case, punctuation and articles.
"""

from __future__ import annotations

import re

from arealite.api.reward import Reward


class ExactMatchReward(Reward):
    """Scores what stands after the last "answer:" (or "answer is"), else the last line."""

    async def score(self, completion: str, ground_truth: str) -> float:
        """Return 1.0 or 0.0."""
        said = re.split(r"\banswer(?:\s*:|\s+is\b)", completion.strip(), flags=re.IGNORECASE)
        last = said[-1].strip().split("\n")
        return float(words(last[0 if len(said) > 1 else -1]) == words(ground_truth))


def words(text: str) -> list[str]:
    """Return the words of a text, without case, punctuation and articles, if that leaves any."""
    found = re.findall(r"(?<!\w)-\d+|\w+", re.sub(r"['’]", "", text.casefold()))
    return [word for word in found if word not in ("a", "an", "the")] or found or text.split()
