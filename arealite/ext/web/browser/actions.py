"""The language of actions on pages, and the addresses that agents may open.

This module needs no browser: it parses actions and refuses invalid ones by their text.
"""

import re
from collections.abc import Collection
from urllib.parse import urljoin, urlsplit

import msgspec

from arealite.base.files import read_toml

RULES: dict[str, str] = read_toml(__file__, "actions.toml")

LINE = re.compile(r"^\W*(click|type|select|press|scroll|goto|stop)\b[ \t]*(.*?)`*\s*$", re.I | re.M)
"""Matches a line with an action. Groups: verb, arguments."""
WITH_ID = re.compile(r"\[?(?P<id>\d+)\]?(?:\s+(?P<argument>.*))?$", re.S)
SCROLL = re.compile(r"\[?(?P<direction>up|down)\]?(?:\s+\[?(?P<id>\d+)\]?)?$", re.I)
FORMS_WITH_ID = {
    "click": "click [3]",
    "type": "type [3] [text]",
    "select": "select [3] [option]",
}
"""Examples of the actions on an element, by verb."""
MAX_TEXT = 2000


class BadAction(ValueError):
    """The agent's text is not a valid action. The agent gets the error's text."""


class PageAction(msgspec.Struct, frozen=True, kw_only=True):
    """One parsed action."""

    verb: str
    element: int | None = None
    """Id of the element; None for an action without one."""
    argument: str = ""
    """Depending on the verb: text to type, option, key, direction, address or answer."""


def parse(answer: str) -> PageAction:
    """Parse the last action in an agent's text.

    Raises:
        BadAction: There is no action, or it lacks an argument; the text shows the right form.
    """
    actions = LINE.findall(answer)
    if not actions:
        raise BadAction("that is no action; write one, as in: click [3]")
    verb, arguments = actions[-1]
    verb = verb.lower()
    arguments = arguments.strip()
    if len(arguments) > MAX_TEXT:
        raise BadAction(f"an action has at most {MAX_TEXT} characters")
    if verb in FORMS_WITH_ID:
        return _with_id(verb, arguments)
    if verb == "scroll":
        return _scroll(arguments)
    argument = bare(arguments)
    if verb != "stop" and not argument:
        example = "Enter" if verb == "press" else "url"
        raise BadAction(f"{verb} what? As in: {verb} [{example}]")
    return PageAction(verb=verb, element=None, argument=argument)


def _with_id(verb: str, arguments: str) -> PageAction:
    match = WITH_ID.match(arguments)
    lacks_option = match is not None and match["argument"] is None and verb == "select"
    if match is None or lacks_option:
        form = FORMS_WITH_ID[verb]
        raise BadAction(f"{verb} needs the id of an element, as in: {form}")
    return PageAction(verb=verb, element=int(match["id"]), argument=bare(match["argument"] or ""))


def _scroll(arguments: str) -> PageAction:
    match = SCROLL.match(arguments)
    if match is None:
        raise BadAction("write scroll [up] or scroll [down]")
    element = int(match["id"]) if match["id"] else None
    return PageAction(verb="scroll", element=element, argument=match["direction"].lower())


def bare(argument: str) -> str:
    """Return an argument without the brackets around it."""
    argument = argument.strip()
    if argument.startswith("[") and argument.endswith("]"):
        return argument[1:-1]
    return argument


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
        absolute_url = urljoin(base, url.strip())
    except ValueError:
        absolute_url = url
    is_allowed = origin(absolute_url) in allowed
    if not is_allowed or "@" in urlsplit(absolute_url).netloc:
        raise BadAction(f"{absolute_url[:200]} is not on a site of this task; you cannot go there")
    return absolute_url
