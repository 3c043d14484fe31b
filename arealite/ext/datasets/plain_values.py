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
from arealite.system.data.dataset import LARGEST, PLAIN, SMALLEST

MISSING = {"NAType", "NaTType"}
"""Classes of the missing values of pandas."""
NARROW = {16: np.float16, 32: np.float32}
"""Numbers by their bits in Arrow."""
BY_TYPE = re.compile(r"float|map<")
"""Matches the text of an Arrow type that `_by_type` converts: halffloat, float and maps."""


def plain_row(
    row: Mapping[Any, object],
    place: str,
) -> dict[str, Any]:
    """Return a row with plain values (hook `plain_row`).

    Args:
        row: Values by column.
        place: The row's place, for errors.

    Raises:
        UserError: A value has no plain form; the error names its column and type.
    """
    return {str(name): _plain(cell, str(name), place) for name, cell in row.items()}


def _plain(
    cell: Any,
    column: str,
    place: str,
) -> Any:
    """Return a plain value.

    Args:
        cell: The value.
        column: Its column, for errors; with the keys and indices inside a nested value.
        place: The row's place, for errors.

    Raises:
        UserError: it has no plain form.
    """
    kind = cast(type[object], type(cell))
    if kind in PLAIN or (kind is int and SMALLEST <= cell <= LARGEST):
        return cell
    try:
        if kind is dict:
            return {
                _key(key): _plain(member, f"{column}.{key}", place)
                for key, member in cast(dict[Any, Any], cell).items()
            }
        if hasattr(cell, "tolist"):  # of numpy, torch or pandas
            cell = np.asarray(cell)[()]  # a scalar if the array has no dimension
        if isinstance(cell, list | tuple | np.ndarray):
            elements = [*cast(Iterable[Any], cell)]
            if _is_plain(elements):
                return elements
            return [
                _plain(element, f"{column}[{index}]", place)
                for index, element in enumerate(elements)
            ]
        return _plain_scalar(cell)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{place}: column `{column}` has the type {kind.__name__}: {error}"
        ) from error


def _is_plain(elements: list[Any]) -> bool:
    """Return whether all elements are plain values of one type; fast for a list of tokens."""
    kinds: set[type] = {*map(type, elements)}
    if kinds == {int}:
        return min(elements) >= SMALLEST and max(elements) <= LARGEST
    if kinds == {float}:
        return all(map(math.isfinite, elements))
    return kinds <= PLAIN


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
    shortest = str(cast(object, value)) if isinstance(value, np.floating) else value
    number = float(shortest)
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


def rows_of(
    data: Any,
    place: object,
) -> Iterable[Any]:
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
        rows = zip(*columns, strict=True)
        return (dict(zip(data.columns, cells, strict=True)) for cells in rows)
    return data


def arrow_rows(
    table: Any,
    place: object,
) -> Iterator[dict[str, Any]]:
    """Yield the rows of an Arrow table.

    Raises:
        UserError: Python has no value for a value of Arrow, as for nanoseconds.
    """
    names: list[str] = table.column_names
    columns = [_arrow_values(table[name], f"column `{name}`", place) for name in names]
    for cells in zip(*columns, strict=True):
        yield dict(zip(names, cells, strict=True))


def _arrow_values(
    column: Any,
    name: str,
    place: object,
) -> list[Any]:
    """Return the values of a column of an Arrow table.

    Raises:
        UserError: as `arrow_rows`.
    """
    with suppress(ValueError, KeyError):
        cells: list[Any] = column.to_pylist()
        if BY_TYPE.search(str(column.type)) is None:
            return cells
        return [_by_type(cell, column.type) for cell in cells]
    for number, scalar in enumerate(column):
        try:
            scalar.as_py()
        except (ValueError, KeyError) as error:
            raise UserError(
                f"{place}, row {number}: {name} has the type {column.type}, but Python cannot "
                f"hold its value: {one_line(error):.200}. Cast it to text, or to microseconds."
            ) from error
    raise UserError(f"{place}: {name} has the type {column.type}. Cast it to text.")


def _by_type(
    value: Any,
    kind: Any,
) -> Any:
    """Return a value of Arrow with maps as dicts, and float16 and float32 as numbers of numpy."""
    types = importlib.import_module("pyarrow").types
    if value is None:
        return None
    if types.is_floating(kind):
        return NARROW.get(kind.bit_width, float)(value)
    if types.is_map(kind):
        return {key: _by_type(member, kind.item_type) for key, member in value}
    if types.is_struct(kind):
        return {field.name: _by_type(value[field.name], field.type) for field in kind}
    if isinstance(value, list):
        return [_by_type(element, kind.value_type) for element in cast(list[Any], value)]
    if types.is_dictionary(kind):
        return _by_type(value, kind.value_type)
    return value
