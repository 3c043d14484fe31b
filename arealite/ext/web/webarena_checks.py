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
    supported_kinds = {"string_match", "url_match", "program_html"}
    unsupported_checks = sorted(set(checks["eval_types"]) - supported_kinds)
    targets = checks.get("program_html") or []
    locations = [str(target[key]) for target in targets for key in ("url", "locator")]
    unsupported_checks += [location for location in locations if location.startswith("func:")]
    return ", ".join(unsupported_checks)


def clean(phrase: str) -> str:
    """Return a text in lower case, without the quotes around it."""
    unquoted = re.sub(
        r"^(['\"])(.*)\1$",
        r"\2",
        phrase.strip(),
        flags=re.DOTALL,
    )
    return unquoted.lower()


def words(phrase: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation."""
    return re.findall(r"\w+", phrase.lower())


def includes(content: str, wanted: str, *, as_word: bool = False) -> bool:
    """Return whether `content` contains `wanted`.

    Args:
        content: The text to search.
        wanted: The text to find.
        as_word: Whether a single letter or digit must be a separate word.
    """
    clean_wanted = clean(wanted)
    clean_content = clean(content)
    if as_word and len(clean_wanted) == 1:
        return clean_wanted in words(clean_content)
    return clean_wanted in clean_content


async def string_match(answer: str, references: Mapping[str, Any], judge: Judge) -> bool:
    """Return whether an answer passes all comparisons of `reference_answers`."""
    clean_answer = clean(answer)
    if "exact_match" in references:
        exact = str(references["exact_match"])
        if clean_answer != clean(exact):
            return False
    phrases = [str(phrase) for phrase in references.get("must_include") or []]
    is_only_phrase = len(phrases) == 1
    for phrase in phrases:
        if not includes(answer, phrase, as_word=is_only_phrase):
            return False
    fuzzy = references.get("fuzzy_match") or []
    if isinstance(fuzzy, str):
        fuzzy = [fuzzy]
    for reference in map(str, fuzzy):
        if clean_answer == clean(reference):
            continue
        if not await judge(reference, answer):
            return False
    return True


def url_match(url: str, reference: str) -> bool:
    """Return whether an address matches a reference.

    The address must contain one of the addresses in `reference`. For each query parameter of these,
    it must have one of their values.
    """
    path, query = _split(url)
    is_accepted_path = False
    accepted_query: dict[str, set[str]] = {}
    for accepted_url in reference.split(OR):
        reference_path, reference_query = _split(accepted_url)
        if reference_path in path:
            is_accepted_path = True
        for name, parameters in reference_query.items():
            accepted_query.setdefault(name, set()).update(parameters)
    if not is_accepted_path:
        return False
    for name, accepted_parameters in accepted_query.items():
        if accepted_parameters.isdisjoint(query.get(name, [])):
            return False
    return True


def _split(url: str) -> tuple[str, dict[str, list[str]]]:
    """Return host and path of an address, and the parameters of its query."""
    parts = urlsplit(url.strip().rstrip("/"))
    path = parts.netloc + parts.path
    return path.rstrip("/"), parse_qs(parts.query)


def content_match(content: str, required: Mapping[str, Any]) -> bool:
    """Return whether text of a page passes a target's `required_contents`.

    Raises:
        UnsupportedCheck: The kind of comparison is not implemented.
    """
    content = html.unescape(content)
    if "exact_match" in required:
        exact = str(required["exact_match"])
        return clean(content) == clean(exact)
    if "must_include" not in required:
        raise UnsupportedCheck(f"required_contents: {', '.join(required)}")
    return all(
        any(includes(content, phrase) for phrase in alternatives.split(OR))
        for alternatives in required["must_include"]
    )
