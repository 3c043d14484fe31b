"""WebArena's checks of an episode: the answer, the address, the contents of pages.

Each check gives 0 or 1, and a task's score is their product. Source of the rules: the paper
(Zhou et al. 2023, arXiv:2307.13854, section 3.2) and the fields of its published tasks.
"""

import html
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import parse_qs, urlsplit

from arealite.base.errors import EpisodeError

OR = " |OR| "
Judge = Callable[[str, str], Awaitable[bool]]
"""Called with the right answer and the given answer; returns whether they mean the same."""


class UnsupportedCheck(EpisodeError, failure_class="unsupported_check"):
    """The task has a check that is not implemented."""


def unsupported(task: Mapping[str, Any]) -> str:
    """Return the unsupported checks of a task, joined by commas; "" if all are supported.

    `func:` is unsupported: it calls a program of WebArena for one site.
    """
    checks: Mapping[str, Any] = task["eval"]
    kinds = set(checks["eval_types"]) - {"string_match", "url_match", "program_html"}
    targets = checks.get("program_html") or []
    where = [str(target[key]) for target in targets for key in ("url", "locator")]
    return ", ".join([*sorted(kinds), *[text for text in where if text.startswith("func:")]])


def clean(text: str) -> str:
    """Return a text in lower case, without the quotes around it."""
    return re.sub(r"^(['\"])(.*)\1$", r"\2", text.strip(), flags=re.DOTALL).lower()


def words(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation."""
    return re.findall(r"\w+", text.lower())


def includes(text: str, wanted: str, *, as_word: bool = False) -> bool:
    """Return whether `text` contains `wanted`.

    Args:
        text: The text.
        wanted: The text to find.
        as_word: Whether a single letter or digit must be a separate word.
    """
    inner = clean(wanted)
    outer = clean(text)
    return inner in words(outer) if as_word and len(inner) == 1 else inner in outer


async def string_match(answer: str, references: Mapping[str, Any], judge: Judge) -> bool:
    """Return whether an answer passes all comparisons of `reference_answers`."""
    if "exact_match" in references and clean(answer) != clean(str(references["exact_match"])):
        return False
    wanted = [str(each) for each in references.get("must_include") or []]
    if not all(includes(answer, each, as_word=len(wanted) == 1) for each in wanted):
        return False
    fuzzy = references.get("fuzzy_match") or []
    for each in [fuzzy] if isinstance(fuzzy, str) else fuzzy:
        if clean(answer) != clean(str(each)) and not await judge(str(each), answer):
            return False
    return True


def url_match(url: str, reference: str) -> bool:
    """Return whether an address matches a reference.

    The address must contain one of the addresses in `reference`. For each query parameter of these,
    it must have one of their values.
    """
    place, given = _split(url)
    accepted = [_split(each) for each in reference.split(OR)]
    names = {name for _, query in accepted for name in query}
    return any(base in place for base, _ in accepted) and all(
        {v for _, query in accepted for v in query.get(name, [])} & set(given.get(name, []))
        for name in names
    )


def _split(url: str) -> tuple[str, dict[str, list[str]]]:
    parts = urlsplit(url.strip().rstrip("/"))
    return (parts.netloc + parts.path).rstrip("/"), parse_qs(parts.query)


def content_match(content: str, required: Mapping[str, Any]) -> bool:
    """Return whether text of a page passes a target's `required_contents`.

    Raises:
        UnsupportedCheck: The kind of comparison is not implemented.
    """
    content = html.unescape(content)
    if "exact_match" in required:
        return clean(content) == clean(str(required["exact_match"]))
    if "must_include" not in required:
        raise UnsupportedCheck(f"required_contents: {', '.join(required)}")
    wanted = (each.split(OR) for each in required["must_include"])
    return all(any(includes(content, text) for text in texts) for texts in wanted)
