"""Encode values as JSON, for messages between a program under test and its tests; compare values.

Types that JSON lacks have a name in the encoding. Answers are decoded to plain data, so no code and
no comparison method of a program runs in the process that judges it.
"""

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
"""By name: the classes (subclasses included), and the conversions to data and back."""


def encode(value: Any, keep: Callable[[object], object]) -> object:
    """Return a value as data for JSON.

    Args:
        value: A value of any type.
        keep: Called with each value that is not plain data; returns a handle for it.
    """
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


def decode(data: object, find: Callable[[int], object]) -> object:
    """Return the value of encoded data.

    Args:
        data: A result of `encode`.
        find: Called with each handle; returns its value.

    Raises:
        ValueError, TypeError, KeyError, RecursionError: The data is invalid.
    """
    if isinstance(data, list):
        return [decode(item, find) for item in data]
    if not isinstance(data, dict):
        return data
    ((name, inner),) = data.items()
    return find(inner) if name == "handle" else SHAPES[name][2](decode(inner, find))


def same(got: object, expected: object, tolerance: float) -> bool:
    """Return whether a result equals the expected value.

    Expected values come from JSON. So a tuple equals a list, a set equals a list in any order, and
    a key equals its text.

    Args:
        got: The result.
        expected: The expected value.
        tolerance: Relative and absolute tolerance of numbers.
    """
    if isinstance(expected, dict):
        if not isinstance(got, dict):
            return False
        named = {key if key in expected else str(key): value for key, value in got.items()}
        return named.keys() == expected.keys() and all(
            same(named[key], value, tolerance) for key, value in expected.items()
        )
    if isinstance(got, (set, frozenset)) and isinstance(expected, list):
        got = sorted(got, key=repr)
        expected = sorted(expected, key=repr)
    if isinstance(expected, (list, tuple)):
        if not isinstance(got, (list, tuple)) or len(got) != len(expected):
            return False
        return all(same(*pair, tolerance) for pair in zip(got, expected, strict=True))
    if isinstance(expected, float) or isinstance(got, float):
        return close(got, expected, tolerance)
    return type(got) is not object and got == expected


def close(got: object, expected: object, tolerance: float) -> bool:
    """Return whether two numbers are equal within the tolerance; NaN equals NaN."""
    if not isinstance(got, (int, float)) or not isinstance(expected, (int, float)):
        return False
    if isinstance(got, bool) is not isinstance(expected, bool):
        return False
    both_nan = got != got and expected != expected
    return both_nan or math.isclose(got, expected, rel_tol=tolerance, abs_tol=tolerance)


def same_text(got: str, expected: str, tolerance: float) -> bool:
    """Return whether two outputs have the same words in each line, numbers within the tolerance."""
    lines = [[line.split() for line in text.rstrip().splitlines()] for text in (got, expected)]
    if list(map(len, lines[0])) != list(map(len, lines[1])):
        return False
    words = zip(*(chain.from_iterable(text) for text in lines), strict=True)
    return all(a == b or close(number(a), number(b), tolerance) for a, b in words)


def number(word: str) -> float | None:
    """Return the value of a number written with a point or an exponent; None for other words."""
    try:
        return float(word) if re.search(r"[.eE]", word) else None
    except ValueError:
        return None
