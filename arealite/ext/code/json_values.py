"""Encode values as JSON, for messages between a program under test and its tests; compare values.

Types that JSON lacks have a name in the encoding. Answers are decoded to plain data, so no code and
no comparison method of a program runs in the process that judges it.
"""

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple


class Shape(NamedTuple):
    """Conversions of a type that JSON lacks. Values of subclasses are converted, too."""

    classes: Any
    """A class, or a tuple of classes."""
    to_plain: Callable[[Any], Any]
    from_plain: Callable[[Any], Any]


SHAPES: dict[str, Shape] = {
    "dict": Shape(
        classes=dict,
        to_plain=lambda mapping: [list(pair) for pair in mapping.items()],
        from_plain=dict,
    ),
    "tuple": Shape(tuple, list, tuple),
    "set": Shape(set, list, set),
    "frozenset": Shape(frozenset, list, frozenset),
    "bytes": Shape(
        classes=(bytes, bytearray),
        to_plain=lambda octets: octets.hex(),
        from_plain=bytes.fromhex,
    ),
    "complex": Shape(
        classes=complex,
        to_plain=lambda number: [number.real, number.imag],
        from_plain=lambda pair: complex(*pair),
    ),
    "range": Shape(
        classes=range,
        to_plain=lambda numbers: [numbers.start, numbers.stop, numbers.step],
        from_plain=lambda bounds: range(*bounds),
    ),
}
"""The shape of each type, under the name that the encoding has for the type."""


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
        return [encode(element, keep) for element in value]
    for name, shape in SHAPES.items():
        if isinstance(value, shape.classes):
            plain_value = shape.to_plain(value)
            return {name: encode(plain_value, keep)}
    if type(value).__module__ == "numpy":
        return encode(value.tolist(), keep)
    if value is None:
        return None
    return {"handle": keep(value)}


def decode(data: object, find: Callable[[int], object]) -> object:
    """Return the value of encoded data.

    Args:
        data: A result of `encode`.
        find: Called with each handle; returns its value.

    Raises:
        ValueError, TypeError, KeyError, RecursionError: The data is invalid.
    """
    if isinstance(data, list):
        return [decode(element, find) for element in data]
    if not isinstance(data, dict):
        return data
    ((name, encoded),) = data.items()
    if name == "handle":
        return find(encoded)
    shape = SHAPES[name]
    return shape.from_plain(decode(encoded, find))


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
        return same_dict(got, expected, tolerance)
    if isinstance(got, (set, frozenset)) and isinstance(expected, list):
        got = sorted(got, key=repr)
        expected = sorted(expected, key=repr)
    if isinstance(expected, (list, tuple)):
        if not isinstance(got, (list, tuple)):
            return False
        if len(got) != len(expected):
            return False
        pairs = zip(got, expected, strict=True)
        return all(same(element, wanted, tolerance) for element, wanted in pairs)
    if isinstance(expected, float) or isinstance(got, float):
        return close(got, expected, tolerance)
    return type(got) is not object and got == expected


def same_dict(
    got: dict[Any, object],
    expected: dict[Any, object],
    tolerance: float,
) -> bool:
    """Return whether two dicts are equal; a key of `got` equals its text in `expected`."""
    got_by_key = {key if key in expected else str(key): value for key, value in got.items()}
    if got_by_key.keys() != expected.keys():
        return False
    return all(same(got_by_key[key], wanted, tolerance) for key, wanted in expected.items())


def close(got: object, expected: object, tolerance: float) -> bool:
    """Return whether two numbers are equal within the tolerance; NaN equals NaN."""
    if not isinstance(got, (int, float)):
        return False
    if not isinstance(expected, (int, float)):
        return False
    if isinstance(got, bool) is not isinstance(expected, bool):
        return False
    both_nan = got != got and expected != expected
    if both_nan:
        return True
    return math.isclose(
        got,
        expected,
        rel_tol=tolerance,
        abs_tol=tolerance,
    )


def same_text(got: str, expected: str, tolerance: float) -> bool:
    """Return whether two outputs have the same words in each line, numbers within the tolerance."""
    got_lines = words_by_line(got)
    expected_lines = words_by_line(expected)
    if len(got_lines) != len(expected_lines):
        return False
    line_pairs = zip(got_lines, expected_lines, strict=True)
    return all(same_words(words, wanted, tolerance) for words, wanted in line_pairs)


def words_by_line(output: str) -> list[list[str]]:
    """Return the words of each line, without empty lines at the end."""
    lines = output.rstrip().splitlines()
    return [line.split() for line in lines]


def same_words(got: list[str], expected: list[str], tolerance: float) -> bool:
    """Return whether two lines have the same words, numbers within the tolerance."""
    if len(got) != len(expected):
        return False
    return all(
        word == wanted or close(number(word), number(wanted), tolerance)
        for word, wanted in zip(got, expected, strict=True)
    )


def number(word: str) -> float | None:
    """Return the value of a number written with a point or an exponent; None for other words."""
    if not re.search(r"[.eE]", word):
        return None
    try:
        return float(word)
    except ValueError:
        return None
