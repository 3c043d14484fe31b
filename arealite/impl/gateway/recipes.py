"""Renderings of messages of one form, with gaps for their texts.

A template is rendered once with marks in place of the texts. It may write a mark. What it asks
about a mark is answered for the text, and recorded: texts with the same answers are rendered the
same way. Anything else that it does with a mark ends the attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

MARK = "q7Xe\"'\\\n<{}é&>Zk4j"
"""Has characters that filters escape."""
ASKED = ("startswith", "endswith", "__contains__", "__eq__", "__ne__")
STRIPS = ("strip", "lstrip", "rstrip")
OWN = ("__add__", "__doc__", "__getattribute__", "__new__", "__str__")
FILTERS = ("trim", "tojson", "length", "first", "last", "list", "items")
UNSEEN = ("Concat", "Macro", "AssignBlock", "FilterBlock", "Mod")
"""Parts of templates that make plain texts of marks. What is done with these cannot be seen."""


class UnknownUse(Exception):
    """A template does more with a mark than it may."""


class Mark(str):
    """The mark of a text, or a text that contains marks."""

    text: str | None = None
    """The text; None: several."""
    asked: list[tuple[str, Any, Any]]
    """Name of a method, its arguments and its result; None: the text itself."""

    def __bool__(self) -> bool:
        return True

    def __add__(self, other: str) -> Mark:
        return Mark(str.__add__(self, other))

    def __radd__(self, other: str) -> Mark:
        return Mark(str.__add__(other, self))


def _method(name: str) -> Callable[..., Any]:
    def method(self: Mark, *args: Any) -> Any:
        if self.text is None or name not in (*ASKED, *STRIPS) or isinstance([*args, 0][0], Mark):
            raise UnknownUse
        found = getattr(self.text, name)(*args)
        if name in STRIPS and found != self.text:
            raise UnknownUse
        self.asked.append((name, args, None if name in STRIPS else found))
        return self if name in STRIPS else found

    return method


for _name in vars(str).keys() - {*OWN}:
    setattr(Mark, _name, _method(_name))


def can_see(template: Any) -> bool:
    """Return whether all that a parsed template does with texts can be seen."""
    for each in template.find_all(object):
        kind = type(each).__name__
        hidden = kind == "Getattr" and each.attr in ("join", "format", "replace")
        hidden |= kind == "Filter" and each.name not in FILTERS
        if hidden or kind in UNSEEN:
            return False
    return True


class Recipe:
    """The rendering of messages of one form.

    Args:
        texts: The texts of the messages.
        render: Renders the messages with other texts; None: the template refuses them.
    """

    def __init__(self, texts: Sequence[str], render: Callable[[Sequence[str]], str | None]) -> None:
        marks = [Mark(f"{MARK}{number}z") for number in range(len(texts))]
        for mark, text in zip(marks, texts, strict=True):
            mark.text, mark.asked = text, []
        rest, self.parts = render(marks) or "", list[str]()
        for number in range(len(texts)):
            part, _, rest = rest.partition(f"{MARK}{number}z")
            self.parts.append(part)
        self.end, self.asked = rest, [mark.asked for mark in marks]
        self.is_usable = MARK not in "".join([*self.parts, rest])
        self.is_usable = self.fill(texts) == render(texts)

    def fill(self, texts: Sequence[str]) -> str | None:
        """Return the rendering with these texts; None: they need one of their own."""
        if not self.is_usable:
            return None
        for text, asked in zip(texts, self.asked, strict=True):
            for name, args, found in asked:
                if getattr(text, name)(*args) != (text if found is None else found):
                    return None
            if not text:
                return None
        pairs = zip(self.parts, texts, strict=True)
        return "".join([each for pair in pairs for each in pair]) + self.end
