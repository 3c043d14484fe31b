"""Score a debater by rules: seven scores in [0, 1] that need no model.

The rules count words and do not understand them. Use them for first experiments and for tests, and
a model as judge for anything else.
"""

import re
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

from arealite.base.files import read_toml

WORDS: dict[str, list[str]] = read_toml(__file__, "words.toml")
FILLERS = frozenset(WORDS["fillers"])
ENOUGH = 3
"""Number of different markers of one kind that gives the full score."""


def judge(
    claim: str,
    speeches: Sequence[str],
    other_speeches: Sequence[str],
    *,
    words: int,
    first: bool,
) -> dict[str, float]:
    """Return the scores of one side by name, each in [0, 1].

    Length, evidence, reasoning, structure and relevance are means over the speeches. Consistency
    and coverage are scores of the whole debate.

    Args:
        claim: The claim of the debate.
        speeches: Speeches of this side, in order.
        other_speeches: Speeches of the other side, in order.
        words: Number of words that a speech should have.
        first: Whether this side speaks first.
    """
    claim_words = content(claim)
    scores_by_speech = [score_speech(speech, claim_words, words) for speech in speeches]
    scores: dict[str, float] = {}
    for name in scores_by_speech[0]:
        scores[name] = fmean(speech_scores[name] for speech_scores in scores_by_speech)
    scores["consistency"] = consistency(speeches)
    scores["coverage"] = coverage(
        speeches,
        other_speeches,
        claim_words,
        first=first,
    )
    return scores


def score_speech(speech: str, claim_words: set[str], words: int) -> dict[str, float]:
    """Return the scores of one speech by name.

    Args:
        speech: The speech.
        claim_words: Words of the claim, as from `content`.
        words: Number of words that a speech should have.
    """
    return {
        "length": length(speech, words),
        "evidence": marks(speech, WORDS["evidence"], numbers=True),
        "reasoning": marks(speech, WORDS["reasons"]),
        "structure": structure(speech),
        "relevance": relevance(speech, claim_words),
    }


def length(speech: str, words: int) -> float:
    """Score the number of words.

    The score is 1 from `words` to twice `words`, and falls to 0 at half of and at three times
    `words`. The number of counted words is at most twice the number of different words.
    """
    spoken_words = re.findall(r"\w+", speech.lower())
    num_spoken = len(spoken_words)
    num_different = len(set(spoken_words))
    num_counted = min(num_spoken, 2 * num_different)
    rising = 2 * num_counted / words - 1
    falling = 3 - num_spoken / words
    return max(0.0, min(1.0, rising, falling))


def marks(speech: str, markers: Sequence[str], *, numbers: bool = False) -> float:
    """Score the number of different markers of one kind in a speech.

    Args:
        speech: The speech.
        markers: Words and phrases that count.
        numbers: Whether a digit counts as a marker, too.
    """
    lower = speech.lower()
    num_markers = 0
    for marker in markers:
        if marker not in lower:  # ten times as fast as the pattern below
            continue
        if re.search(rf"(?<!\w){re.escape(marker)}(?!\w)", lower):
            num_markers += 1
    if numbers and re.search(r"\d", speech):
        num_markers += 1
    return share_of_enough(num_markers)


def share_of_enough(count: int) -> float:
    """Return `count` divided by ENOUGH, at most 1."""
    return min(1.0, count / ENOUGH)


def structure(speech: str) -> float:
    """Score the words that order a speech, and its sentences."""
    order = marks(speech, WORDS["order"])
    return (order + sentences(speech)) / 2


def sentences(speech: str) -> float:
    """Score the number of sentences with at least three words; four give the full score."""
    num_sentences = 0
    for sentence in re.split(r"[.!?]+(?:\s|$)", speech):
        if len(sentence.split()) >= 3:
            num_sentences += 1
    return min(1.0, num_sentences / 4)


def relevance(speech: str, claim_words: set[str]) -> float:
    """Return the share of the claim's words that the speech has, too."""
    speech_words = content(speech)
    shared_words = speech_words & claim_words
    return len(shared_words) / max(1, len(claim_words))


def consistency(speeches: Sequence[str]) -> float:
    """Score whether a side concedes nothing and returns to its points without repeating itself."""
    firmness = fmean(concedes_nothing(speech) for speech in speeches)
    if len(speeches) == 1:
        return firmness
    continuity_scores: list[float] = []
    for earlier, later in pairwise(map(content, speeches)):
        score = share_of_enough(len(earlier & later))
        is_repetition = earlier == later
        if is_repetition:
            score = 0.0
        continuity_scores.append(score)
    return (firmness + fmean(continuity_scores)) / 2


def concedes_nothing(speech: str) -> bool:
    """Return whether a speech has words, none of which concede a point."""
    if not speech:
        return False
    lower = speech.lower()
    return not any(concession in lower for concession in WORDS["concessions"])


def coverage(
    speeches: Sequence[str],
    other_speeches: Sequence[str],
    claim_words: set[str],
    *,
    first: bool,
) -> float:
    """Score how many words of the other side's preceding speeches a side takes up.

    Words of the claim do not count. A speech that copies more than 80 % of its words scores 0. If
    there is no preceding speech, the score is 0.5.
    """
    answers = speeches[1:] if first else speeches
    scores: list[float] = []
    for answer, answered in zip(answers, other_speeches, strict=False):
        answer_words = content(answer) - claim_words
        answered_words = content(answered) - claim_words
        num_shared = len(answer_words & answered_words)
        score = share_of_enough(num_shared)
        is_copy = num_shared > 0.8 * len(answer_words)
        if is_copy:
            score = 0.0
        scores.append(score)
    if not scores:
        return 0.5
    return fmean(scores)


def content(speech: str) -> set[str]:
    """Return the first six letters of each longer word of a text, without fillers."""
    longer_words = re.findall(r"[^\W\d_]{4,}", speech.lower())
    return {word[:6] for word in longer_words if word not in FILLERS}
