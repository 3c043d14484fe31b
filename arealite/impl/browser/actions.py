"""The language of actions on pages, and the addresses that agents may open.

This module needs no browser: it parses actions and refuses invalid ones by their text.
"""

import re
from collections.abc import Collection
from urllib.parse import urljoin, urlsplit

import msgspec

from arealite.base.data import read_toml

RULES: dict[str, str] = read_toml(__file__, "actions.toml")

LINE = re.compile(r"^\W*(click|type|select|press|scroll|goto|stop)\b[ \t]*(.*?)`*\s*$", re.I | re.M)
WITH_ID = re.compile(r"\[?(\d+)\]?(?:\s+(.*))?$", re.S)
SCROLL = re.compile(r"\[?(up|down)\]?(?:\s+\[?(\d+)\]?)?$", re.I)
MAX_TEXT = 2000


class BadAction(ValueError):
    """The agent's text is not a valid action. The agent gets the error's text."""


class Command(msgspec.Struct, frozen=True):
    """One parsed action."""

    verb: str
    element: int | None = None
    """Id of the element; None for an action without one."""
    text: str = ""
    """Depending on the verb: text to type, option, key, direction, address or answer."""


def parse(text: str) -> Command:
    """Parse the last action in an agent's text.

    Raises:
        BadAction: There is no action, or it lacks an argument; the text shows the right form.
    """
    if not (found := LINE.findall(text)):
        raise BadAction("that is no action; write one, as in: click [3]")
    verb = found[-1][0].lower()
    rest = found[-1][1].strip()
    if len(rest) > MAX_TEXT:
        raise BadAction(f"an action has at most {MAX_TEXT} characters")
    if verb in ("click", "type", "select"):
        return _with_id(verb, rest)
    if verb == "scroll":
        if (way := SCROLL.match(rest)) is None:
            raise BadAction("write scroll [up] or scroll [down]")
        return Command(verb, int(way[2]) if way[2] else None, way[1].lower())
    if verb != "stop" and not bare(rest):
        raise BadAction(f"{verb} what? As in: {verb} [{'Enter' if verb == 'press' else 'url'}]")
    return Command(verb, None, bare(rest))


def _with_id(verb: str, rest: str) -> Command:
    given = WITH_ID.match(rest)
    if given is None or (verb == "select" and given[2] is None):
        more = {"click": "", "type": " [text]", "select": " [option]"}[verb]
        raise BadAction(f"{verb} needs the id of an element, as in: {verb} [3]{more}")
    return Command(verb, int(given[1]), bare(given[2] or ""))


def bare(text: str) -> str:
    """Return an argument without the brackets around it."""
    text = text.strip()
    return text[1:-1] if text[:1] == "[" and text[-1:] == "]" else text


def origin(url: str) -> str:
    """Return `host:port` of an http(s) address; "" for any other address."""
    try:
        parts = urlsplit(url)
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    except (ValueError, KeyError):
        return ""
    return f"{parts.hostname}:{port}" if parts.hostname else ""


def destination(url: str, *, base: str, allowed: Collection[str]) -> str:
    """Return the absolute address of a `goto`.

    Args:
        url: The agent's address, absolute or relative.
        base: Address of the current page.
        allowed: `host:port` of the task's sites.

    Raises:
        BadAction: The address is not on one of the task's sites.
    """
    try:
        whole = urljoin(base, url.strip())
    except ValueError:
        whole = url
    if origin(whole) not in allowed or "@" in urlsplit(whole).netloc:
        raise BadAction(f"{whole[:200]} is not on a site of this task; you cannot go there")
    return whole
