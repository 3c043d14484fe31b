"""The reward `exact_match`: 1 if the answer has the same words as the ground truth, else 0.

The comparison is SQuAD's (Rajpurkar et al., 2016): without case, punctuation and articles. Use
`math_verify` for numbers.
"""

import re

from arealite.api.reward import Reward


class ExactMatchReward(Reward):
    """Scores the text after the last "answer:" or "answer is"; without one, the last line."""

    async def score(self, completion: str, ground_truth: str) -> float:
        """Return 1.0 or 0.0."""
        parts = re.split(r"\banswer(?:\s*:|\s+is\b)", completion.strip(), flags=re.IGNORECASE)
        last = parts[-1].strip().split("\n")
        return float(words(last[0 if len(parts) > 1 else -1]) == words(ground_truth))


def words(text: str) -> list[str]:
    """Return the lower-case words of a text without punctuation and articles.

    If no word is left, articles and punctuation are kept.
    """
    found = re.findall(r"(?<!\w)-\d+|\w+", re.sub(r"['’]", "", text.casefold()))
    return [word for word in found if word not in ("a", "an", "the")] or found or text.split()
