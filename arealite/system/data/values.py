"""Converts the values of rows to plain values, which every process of a run sees alike.

A plain value is None, a bool, a str, an int of 64 bits, a finite float, a list, or a dict with str
keys. JSON and msgpack keep each of them. docs/data.md lists the result for each type.
"""

import importlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from typing import Any, cast
from uuid import UUID

import numpy as np

from arealite.base.errors import UserError, one_line

SMALLEST = -(2**63)
LARGEST = 2**64 - 1
"""Bounds of an integer in msgpack."""
ALWAYS_PLAIN = {str, bool, type(None)}
MISSING = {"NAType", "NaTType"}
"""Classes of the missing values of pandas."""
NARROW = {16: np.float16, 32: np.float32}
"""Numbers by their bits in Arrow."""
BY_TYPE = re.compile(r"float|map<")
"""Matches the text of an Arrow type that `_by_type` converts: halffloat, float and maps."""


def plain_row(row: Mapping[Any, object], where: str) -> dict[str, Any]:
    """Return a row with plain values.

    Args:
        row: Values by column.
        where: The row's place, for errors.

    Raises:
        UserError: A value has no plain form; the error names its column and type.
    """
    return {str(name): _plain(value, str(name), where) for name, value in row.items()}


def _plain(value: Any, column: str, where: str) -> Any:
    kind = cast(type[object], type(value))
    if kind in ALWAYS_PLAIN or (kind is int and SMALLEST <= value <= LARGEST):
        return value
    try:
        if kind is dict:
            members = cast(dict[Any, Any], value).items()
            return {_key(key): _plain(item, f"{column}.{key}", where) for key, item in members}
        if hasattr(value, "tolist"):  # of numpy, torch or pandas
            value = np.asarray(value)[()]  # a scalar if the array has no dimension
        if isinstance(value, list | tuple | np.ndarray):
            items = [*cast(Iterable[Any], value)]
            pairs = () if _is_plain(items) else enumerate(items)
            return [_plain(item, f"{column}[{n}]", where) for n, item in pairs] or items
        return _plain_scalar(value)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{where}: column `{column}` has the type {kind.__name__}: {error}"
        ) from error


def _is_plain(items: list[Any]) -> bool:
    """Return whether all items are plain values of one type; fast for a list of tokens."""
    kinds: set[type] = {*map(type, items)}
    if kinds == {int}:
        return min(items) >= SMALLEST and max(items) <= LARGEST
    if kinds == {float}:
        return all(map(math.isfinite, items))
    return kinds <= ALWAYS_PLAIN


def _key(key: Any) -> str:
    return key if type(key) is str else str(_plain_scalar(key))


def _plain_scalar(value: object) -> Any:
    if type(value).__name__ in MISSING:
        return None
    for kinds, convert in CONVERSIONS:
        if isinstance(value, kinds):
            return convert(value)
    raise ValueError("no form in JSON. Convert it to a text, a number, a list or a dict.")


def _float(value: Any) -> float | None:
    """Return a number; of float16 and float32 the shortest decimal number that rounds to it."""
    number = float(str(cast(object, value))) if isinstance(value, np.floating) else float(value)
    if math.isinf(number):
        raise ValueError("infinite. Write a finite number, a text or null.")
    return None if math.isnan(number) else number


def _integer(value: Any) -> int:
    if SMALLEST <= value <= LARGEST:
        return int(value)
    raise ValueError(f"{value} has more than 64 bits. Write it as a text.")


def _in_microseconds(value: Any) -> Any:
    """Return a time; refuse a Timestamp or Timedelta of pandas that has nanoseconds."""
    if getattr(value, "nanosecond", 0) or getattr(value, "nanoseconds", 0):
        raise ValueError(f"{value} has nanoseconds. Round it to microseconds, or write a text.")
    return value


def _text(value: Any) -> str:
    try:
        return bytes(value).decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"not UTF-8 ({error}). Write base64 text, or remove the column."
        ) from error


CONVERSIONS: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (Enum, lambda member: _plain_scalar(member.value)),
    ((str, UUID, PurePath), str),
    ((bool, np.bool_), bool),
    (np.timedelta64, lambda duration: _float(duration / np.timedelta64(1, "s"))),
    (timedelta, lambda duration: _in_microseconds(duration).total_seconds()),
    ((int, np.integer), _integer),
    ((float, np.floating), _float),
    (Decimal, lambda number: format(number, "f") if number.is_finite() else _float(number)),
    ((date, time), lambda moment: _in_microseconds(moment).isoformat()),  # a datetime is a date
    ((bytes, bytearray), _text),
)
"""Functions by the types that they convert; the first match counts."""


# ------------------------------------------------------------ tables


def rows_of(data: Any, place: object) -> Iterable[Any]:
    """Return the rows of a datasets.Dataset, a DataFrame or an Arrow table; else the data itself.

    Args:
        data: Rows in memory.
        place: The place of the data, for errors.
    """
    if hasattr(data, "with_format") and hasattr(data, "to_list"):  # datasets.Dataset
        data = data.with_format("arrow")[:]
    if hasattr(data, "to_arrow"):  # polars.DataFrame
        data = data.to_arrow()
    if hasattr(data, "to_pylist"):
        return arrow_rows(data, place)
    if hasattr(data, "iterrows"):  # pandas.DataFrame
        columns = [column.array for _, column in data.items()]
        return (dict(zip(data.columns, cells, strict=True)) for cells in zip(*columns, strict=True))
    return data


def arrow_rows(table: Any, place: object) -> Iterator[dict[str, Any]]:
    """Yield the rows of an Arrow table.

    Raises:
        UserError: Python has no value for a value of Arrow, as for nanoseconds.
    """
    names: list[str] = table.column_names
    columns = [_arrow_values(table[name], f"column `{name}`", place) for name in names]
    for values in zip(*columns, strict=True):
        yield dict(zip(names, values, strict=True))


def _arrow_values(column: Any, name: str, place: object) -> list[Any]:
    with suppress(ValueError, KeyError):
        values: list[Any] = column.to_pylist()
        is_special = BY_TYPE.search(str(column.type))
        return [_by_type(value, column.type) for value in values] if is_special else values
    for number, scalar in enumerate(column):
        try:
            scalar.as_py()
        except (ValueError, KeyError) as error:
            raise UserError(
                f"{place}, row {number}: {name} has the type {column.type}, but Python cannot "
                f"hold its value: {one_line(error):.200}. Cast it to text, or to microseconds."
            ) from error
    raise UserError(f"{place}: {name} has the type {column.type}. Cast it to text.")


def _by_type(value: Any, kind: Any) -> Any:
    """Return a value of Arrow with maps as dicts, and float16 and float32 as numbers of numpy."""
    types = importlib.import_module("pyarrow").types
    if value is None:
        return None
    if types.is_floating(kind):
        return NARROW.get(kind.bit_width, float)(value)
    if types.is_map(kind):
        return {key: _by_type(item, kind.item_type) for key, item in value}
    if types.is_struct(kind):
        return {field.name: _by_type(value[field.name], field.type) for field in kind}
    if isinstance(value, list):
        return [_by_type(item, kind.value_type) for item in cast(list[Any], value)]
    return _by_type(value, kind.value_type) if types.is_dictionary(kind) else value
