"""Score a debater by rules: seven scores in [0, 1] that need no model.

The rules count words and do not understand them. Use them for first experiments and for tests, and
a model as judge for anything else.
"""

import re
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

from arealite.base.data import read_toml

WORDS: dict[str, list[str]] = read_toml(__file__, "words.toml")
FILLERS = frozenset(WORDS["fillers"])
ENOUGH = 3
"""Number of different markers of one kind that gives the full score."""


def judge(
    claim: str, own: Sequence[str], other: Sequence[str], *, words: int, first: bool
) -> dict[str, float]:
    """Return the scores of one side by name, each in [0, 1].

    Length, evidence, reasoning, structure and relevance are means over the speeches. Consistency
    and coverage are scores of the whole debate.

    Args:
        claim: The claim of the debate.
        own: Speeches of this side, in order.
        other: Speeches of the other side, in order.
        words: Number of words that a speech should have.
        first: Whether this side speaks first.
    """
    claimed = content(claim)
    return {
        "length": fmean(length(text, words) for text in own),
        "evidence": fmean(marks(text, WORDS["evidence"], numbers=True) for text in own),
        "reasoning": fmean(marks(text, WORDS["reasons"]) for text in own),
        "structure": fmean((marks(text, WORDS["order"]) + sentences(text)) / 2 for text in own),
        "relevance": fmean(len(content(t) & claimed) / max(1, len(claimed)) for t in own),
        "consistency": consistency(own),
        "coverage": coverage(own, other, claimed, first=first),
    }


def length(text: str, words: int) -> float:
    """Score the number of words.

    The score is 1 from `words` to twice `words`, and falls to 0 at half of and at three times
    `words`. The number of counted words is at most twice the number of different words.
    """
    spoken = re.findall(r"\w+", text.lower())
    ratio = min(len(spoken), 2 * len({*spoken})) / words
    return max(0.0, min(1.0, 2 * ratio - 1, 3 - len(spoken) / words))


def marks(text: str, known: Sequence[str], *, numbers: bool = False) -> float:
    """Score the number of different markers of one kind in a speech.

    Args:
        text: The speech.
        known: Words and phrases that count.
        numbers: Whether a digit counts as a marker, too.
    """
    lower = text.lower()
    here = [mark for mark in known if mark in lower]  # ten times as fast as the pattern below
    found = sum(bool(re.search(rf"(?<!\w){re.escape(mark)}(?!\w)", lower)) for mark in here)
    return min(1.0, (found + (numbers and bool(re.search(r"\d", text)))) / ENOUGH)


def sentences(text: str) -> float:
    """Score the number of sentences with at least three words; four give the full score."""
    whole = [s for s in re.split(r"[.!?]+(?:\s|$)", text) if len(s.split()) >= 3]
    return min(1.0, len(whole) / 4)


def consistency(own: Sequence[str]) -> float:
    """Score whether a side concedes nothing and returns to its points without repeating itself."""
    kept = fmean(bool(t) and not any(c in t.lower() for c in WORDS["concessions"]) for t in own)
    if len(own) == 1:
        return kept
    pairs = [(content(a), content(b)) for a, b in pairwise(own)]
    same = fmean(min(1.0, len(a & b) / ENOUGH) if a != b else 0.0 for a, b in pairs)
    return (kept + same) / 2


def coverage(own: Sequence[str], other: Sequence[str], claimed: set[str], *, first: bool) -> float:
    """Score how many words of the other side's preceding speeches a side takes up.

    Words of the claim do not count. A speech that copies more than 80 % of its words scores 0. If
    there is no preceding speech, the score is 0.5.
    """
    answers = list(zip(own[1:] if first else own, other, strict=False))
    scores = list[float]()
    for mine, theirs in ((content(a) - claimed, content(b) - claimed) for a, b in answers):
        is_copy = len(mine & theirs) > 0.8 * len(mine)
        scores.append(0.0 if is_copy else min(1.0, len(mine & theirs) / ENOUGH))
    return fmean(scores) if scores else 0.5


def content(text: str) -> set[str]:
    """Return the first six letters of each longer word of a text, without fillers."""
    return {w[:6] for w in re.findall(r"[^\W\d_]{4,}", text.lower()) if w not in FILLERS}
