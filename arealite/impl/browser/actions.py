"""The language in which agents act on pages, and which addresses they may go to.

Apart from the browser, so that what an agent writes is read and refused without one.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from urllib.parse import urljoin, urlsplit

import msgspec

SHORT = (
    "Actions: click [id] | type [id] [text] | select [id] [option] | press [key] | "
    "scroll [up|down] | goto [url] | stop [answer]"
)
FULL = f"""You act on a web page. Each of your turns is one action, on a line of its own.
{SHORT}
Elements have their id before them, as in [3] button "OK". Ids change whenever the page does.
type replaces what is in the field. press takes a key's name, as Enter or Control+a. scroll moves
the window, or with an id, as in scroll [down] [3], that element. stop ends the task: with the
answer, if a question was asked."""
RULES = {"full": FULL, "short": SHORT, "none": ""}

LINE = re.compile(r"^\W*(click|type|select|press|scroll|goto|stop)\b[ \t]*(.*?)`*\s*$", re.I | re.M)
WITH_ID = re.compile(r"\[?(\d+)\]?(?:\s+(.*))?$", re.S)
SCROLL = re.compile(r"\[?(up|down)\]?(?:\s+\[?(\d+)\]?)?$", re.I)
MAX_TEXT = 2000


class BadAction(ValueError):
    """What the agent wrote is no action; the text tells it why."""


class Command(msgspec.Struct, frozen=True):
    """One action, as the agent meant it."""

    verb: str
    element: int | None = None
    text: str = ""


def parse(text: str) -> Command:
    """Read the last action in a text.

    Raises:
        BadAction: there is none, or it lacks something; says how it is written.
    """
    found = LINE.findall(text)
    if not found:
        raise BadAction("that is no action; write one, as in: click [3]")
    verb, rest = found[-1][0].lower(), found[-1][1].strip()
    if len(rest) > MAX_TEXT:
        raise BadAction(f"an action has at most {MAX_TEXT} characters")
    if verb in ("click", "type", "select"):
        return _with_id(verb, rest)
    if verb == "scroll":
        way = SCROLL.match(rest)
        if way is None:
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
    """Return `host:port` of an http(s) address, "" for any other."""
    try:
        parts = urlsplit(url)
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    except (ValueError, KeyError):
        return ""
    return f"{parts.hostname}:{port}" if parts.hostname else ""


def destination(url: str, *, base: str, allowed: Collection[str]) -> str:
    """Return the whole address that `goto` on the page `base` means.

    Raises:
        BadAction: it is not on a site of the task, or no page of a site at all.
    """
    try:
        whole = urljoin(base, url.strip())
    except ValueError:
        whole = url
    if origin(whole) not in allowed or "@" in urlsplit(whole).netloc:
        raise BadAction(f"{whole[:200]} is not on a site of this task; you cannot go there")
    return whole
