"""Find the choice that an answer names. All games use this module."""

import re
from functools import lru_cache


def chosen(answer: str, choices: tuple[str, ...]) -> str | None:
    """Return the choice that the answer names last, as a whole word in any case; None if none."""
    if answer in choices:
        return answer
    named = _pattern(choices).findall(answer)
    if not named:
        return None
    last_named = named[-1].lower()
    for choice in choices:
        if choice.lower() == last_named:
            return choice
    return None


@lru_cache
def _pattern(choices: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern that matches each choice as a whole word, a longer choice first."""
    longest_first = sorted(choices, key=len, reverse=True)
    any_choice = "|".join(map(re.escape, longest_first))
    return re.compile(rf"(?<!\w)(?:{any_choice})(?!\w)", re.IGNORECASE)
