"""How WebArena scores an episode: by the answer, by the address, by what pages contain.

Each check gives 0 or 1, and a task's score is their product. Source of the rules: the paper
(Zhou et al. 2023, arXiv:2307.13854, section 3.2) and the fields of its published tasks.
"""

from __future__ import annotations

import html
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import parse_qs, urlsplit

from arealite.base.errors import EpisodeError

OR = " |OR| "
Judge = Callable[[str, str], Awaitable[bool]]
"""(what is right, the answer) → whether they mean the same."""


class UnsupportedCheck(EpisodeError):
    """The task asks for a check that is not implemented here."""

    failure_class = "unsupported_check"


def unsupported(task: Mapping[str, Any]) -> str:
    """Name what of a task's checks is not implemented, "" for nothing.

    That is `func:`, which calls programs of WebArena's for one site each.
    """
    checks: Mapping[str, Any] = task["eval"]
    kinds = set(checks["eval_types"]) - {"string_match", "url_match", "program_html"}
    targets = checks.get("program_html") or []
    where = [str(target[key]) for target in targets for key in ("url", "locator")]
    calls = [text for text in where if text.startswith("func:")]
    return ", ".join([*sorted(kinds), *calls])


def clean(text: str) -> str:
    """Return a text without the quotes around it, in small letters."""
    text = text.strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1]
    return text.lower()


def words(text: str) -> list[str]:
    """Return a text's words, without signs, in small letters."""
    return re.findall(r"\w+", text.lower())


def includes(text: str, wanted: str, *, as_word: bool = False) -> bool:
    """Say whether a text has another in it; `as_word`: a single letter or digit counts only as a
    word of its own."""
    inner, outer = clean(wanted), clean(text)
    return inner in words(outer) if as_word and len(inner) == 1 else inner in outer


async def string_match(answer: str, references: Mapping[str, Any], judge: Judge) -> bool:
    """Compare the answer in each of the ways that `reference_answers` names."""
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
    """Say whether the address contains one of those in `reference`, with its parameters: of each
    name, one value that any of them has."""
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
    """Compare what was found in a page with a target's `required_contents`."""
    content = html.unescape(content)
    if "exact_match" in required:
        return clean(content) == clean(str(required["exact_match"]))
    if "must_include" not in required:
        raise UnsupportedCheck(f"required_contents: {', '.join(required)}")
    return all(
        any(includes(content, each) for each in wanted.split(OR))
        for wanted in required["must_include"]
    )
