"""The reward `exact_match`: 1 if the answer has the same words as the ground truth, else 0.

The comparison is SQuAD's (Rajpurkar et al., 2016): without case, punctuation and articles. Use
`math_verify` for numbers.
"""

import re

from arealite.api.reward import Reward

ANCHOR = re.compile(r"\banswer(?:\s*:|\s+is\b)", re.IGNORECASE)
ARTICLES = ("a", "an", "the")


class ExactMatchReward(Reward):
    """Scores the text after the last "answer:" or "answer is"; without one, the last line."""

    async def score(self, completion: str, ground_truth: str) -> float:
        """Return 1.0 or 0.0."""
        return float(words(answer_line(completion)) == words(ground_truth))


def answer_line(completion: str) -> str:
    """Return the line that begins after the last "answer:" or "answer is", else the last line."""
    *before_anchors, after_anchor = ANCHOR.split(completion.strip())
    lines = after_anchor.strip().split("\n")
    return lines[0] if before_anchors else lines[-1]


def words(answer: str) -> list[str]:
    """Return the lower-case words of a text without punctuation and articles.

    If no word is left, articles and punctuation are kept.
    """
    without_apostrophes = re.sub(r"['’]", "", answer.casefold())
    all_words = re.findall(r"(?<!\w)-\d+|\w+", without_apostrophes)
    without_articles = [word for word in all_words if word not in ARTICLES]
    return without_articles or all_words or answer.split()
