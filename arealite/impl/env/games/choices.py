"""Find the choice that an answer names. All games use this module."""

import re
from functools import lru_cache


def chosen(text: str, choices: tuple[str, ...]) -> str | None:
    """Return the choice that the text names last, as a whole word in any case; None if none."""
    if text in choices:
        return text
    found = _words(choices).findall(text)
    return next((c for c in choices if found and c.lower() == found[-1].lower()), None)


@lru_cache
def _words(choices: tuple[str, ...]) -> re.Pattern[str]:
    either = "|".join(re.escape(choice) for choice in sorted(choices, key=len, reverse=True))
    return re.compile(rf"(?<!\w)(?:{either})(?!\w)", re.IGNORECASE)
