"""Values as plain data, by which a program under test and its tests speak to each other, and how
they are compared.

JSON with a word for what JSON has not: so that nothing a program answers can run or compare itself
where its verdict is made.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import chain
from typing import Any

SHAPES: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "dict": (dict, lambda value: [list(item) for item in value.items()], dict),
    "tuple": (tuple, list, tuple),
    "set": (set, list, set),
    "frozenset": (frozenset, list, frozenset),
    "bytes": ((bytes, bytearray), lambda value: value.hex(), bytes.fromhex),
    "complex": (complex, lambda value: [value.real, value.imag], lambda pair: complex(*pair)),
    "range": (range, lambda value: [value.start, value.stop, value.step], lambda r: range(*r)),
}
"""By name: which classes (and theirs), and the way to data and back."""


def encode(value: Any, keep: Callable[[Any], Any]) -> Any:
    """Return a value as data for JSON; what is no plain data becomes what `keep` makes of it."""
    for plain in (bool, int, float, str):
        if isinstance(value, plain):
            return plain(value)
    if isinstance(value, list):
        return [encode(item, keep) for item in value]
    for name, (kind, parts, _) in SHAPES.items():
        if isinstance(value, kind):
            return {name: encode(parts(value), keep)}
    if type(value).__module__ == "numpy":
        return encode(value.tolist(), keep)
    return value if value is None else {"handle": keep(value)}


def decode(data: Any, find: Callable[[Any], Any]) -> Any:
    """Return the value that data stands for; `find` gives what `encode` kept.

    Raises:
        ValueError, TypeError, KeyError, RecursionError: it stands for none.
    """
    if isinstance(data, list):
        return [decode(item, find) for item in data]
    if not isinstance(data, dict):
        return data
    ((name, inner),) = data.items()
    return find(inner) if name == "handle" else SHAPES[name][2](decode(inner, find))


def same(got: Any, due: Any, tolerance: float) -> bool:
    """Return whether a result is the expected one. As the expected values come from JSON, a tuple
    is a list, a set a list in any order, and keys may be texts of what they are."""
    if isinstance(due, dict):
        if not isinstance(got, dict):
            return False
        named = {key if key in due else str(key): value for key, value in got.items()}
        return named.keys() == due.keys() and all(
            same(named[key], value, tolerance) for key, value in due.items()
        )
    if isinstance(got, (set, frozenset)) and isinstance(due, list):
        got, due = sorted(got, key=repr), sorted(due, key=repr)
    if isinstance(due, (list, tuple)):
        return (
            isinstance(got, (list, tuple))
            and len(got) == len(due)
            and all(same(*pair, tolerance) for pair in zip(got, due, strict=True))
        )
    if isinstance(due, float) or isinstance(got, float):
        return close(got, due, tolerance)
    return type(got) is not object and got == due


def close(got: Any, due: Any, tolerance: float) -> bool:
    """Return whether two numbers are the same, or nearly; NaN is NaN."""
    numbers = all(isinstance(each, (int, float)) for each in (got, due))
    if not numbers or isinstance(got, bool) is not isinstance(due, bool):
        return False
    both_nan = got != got and due != due
    return both_nan or math.isclose(got, due, rel_tol=tolerance, abs_tol=tolerance)


def same_text(got: str, due: str, tolerance: float) -> bool:
    """Return whether two outputs have the same words in each line; numbers may nearly be."""
    lines = [[line.split() for line in text.rstrip().splitlines()] for text in (got, due)]
    if list(map(len, lines[0])) != list(map(len, lines[1])):
        return False
    words = zip(*(chain.from_iterable(text) for text in lines), strict=True)
    return all(a == b or close(number(a), number(b), tolerance) for a, b in words)


def number(word: str) -> float | None:
    """Return a number written with a point or an exponent."""
    try:
        return float(word) if re.search(r"[.eE]", word) else None
    except ValueError:
        return None
