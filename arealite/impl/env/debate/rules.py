"""Scores a debater by rules: seven scores in [0, 1] that need no model.

They see words and not meaning: good for a first curve and for tests of the loop; for more, let a
model judge.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean

WORDS: dict[str, list[str]] = tomllib.loads(
    Path(__file__).with_name("words.toml").read_text(encoding="utf-8")
)
FILLERS = frozenset(WORDS["fillers"])
ENOUGH = 3
"""So many different marks of one kind give the full score."""


def judge(
    claim: str, own: Sequence[str], other: Sequence[str], *, words: int, first: bool
) -> dict[str, float]:
    """Return the scores of one side by name, each in [0, 1].

    `own` and `other` are both sides' speeches in order; `first`: this side spoke first. Length,
    evidence, reasoning, structure and relevance are means over the speeches; consistency and
    coverage (of what the other side says) are of the whole debate.
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
    """Score the number of words: 1 from `words` to twice that, 0 from half and to three times it.

    Saying the same words again counts at most as often as they are new.
    """
    said = re.findall(r"\w+", text.lower())
    ratio = min(len(said), 2 * len({*said})) / words
    return max(0.0, min(1.0, 2 * ratio - 1, 3 - len(said) / words))


def marks(text: str, known: Sequence[str], *, numbers: bool = False) -> float:
    """Score how many different marks of a kind a speech has."""
    lower = text.lower()
    here = [mark for mark in known if mark in lower]  # a pattern is ten times as slow
    found = sum(bool(re.search(rf"(?<!\w){re.escape(mark)}(?!\w)", lower)) for mark in here)
    return min(1.0, (found + (numbers and bool(re.search(r"\d", text)))) / ENOUGH)


def sentences(text: str) -> float:
    """Score how many sentences of at least three words a speech has; four are enough."""
    whole = [s for s in re.split(r"[.!?]+(?:\s|$)", text) if len(s.split()) >= 3]
    return min(1.0, len(whole) / 4)


def consistency(own: Sequence[str]) -> float:
    """Score how far a side keeps to itself: it concedes nothing, and comes back to its points
    without repeating a speech."""
    kept = fmean(bool(t) and not any(c in t.lower() for c in WORDS["concessions"]) for t in own)
    if len(own) == 1:
        return kept
    pairs = [(content(a), content(b)) for a, b in pairwise(own)]
    same = fmean(min(1.0, len(a & b) / ENOUGH) if a != b else 0.0 for a, b in pairs)
    return (kept + same) / 2


def coverage(own: Sequence[str], other: Sequence[str], claimed: set[str], *, first: bool) -> float:
    """Score how much of each speech before its own a side takes up; 0.5 where there is none.

    Words of the claim do not count, and a speech that is nearly all the other's words gets 0.
    """
    answers = list(zip(own[1:] if first else own, other, strict=False))
    scores = list[float]()
    for mine, theirs in ((content(a) - claimed, content(b) - claimed) for a, b in answers):
        is_copy = len(mine & theirs) > 0.8 * len(mine)
        scores.append(0.0 if is_copy else min(1.0, len(mine & theirs) / ENOUGH))
    return fmean(scores) if scores else 0.5


def content(text: str) -> set[str]:
    """Return the beginnings of a text's longer words: what it is about."""
    return {w[:6] for w in re.findall(r"[^\W\d_]{4,}", text.lower()) if w not in FILLERS}
