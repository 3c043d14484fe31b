"""Reads the rows of a dataset: JSONL files, and what extensions read.

Each row comes with its place, such as "data.jsonl, line 3", for errors.
"""

import copy
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from arealite.api.hooks import PlacedRow, PlainRow, RowReader, RowSource
from arealite.base import entries
from arealite.base.errors import UserError
from arealite.base.registry import unknown

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, Any]).decode
ROW_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Exceptions for a line that is not a JSON object, or is nested too deep."""
SMALLEST = -(2**63)
"""Smallest integer in msgpack."""
LARGEST = 2**64 - 1
"""Largest integer in msgpack."""
PLAIN = {str, bool, type(None)}
"""Types of which each value is plain."""
DEPTH = 100
"""Maximum nesting of a row: each process that decodes the row needs stack for every level."""
WIDE_START = re.compile(rb"\xff\xfe|\xfe\xff|[\t\n\r -~]\0|\0[\t\n\r -~]|\0\0\0[\t\n\r -~]")
"""The start of a file in UTF-16 or UTF-32: a byte order mark, or a letter with zeros."""
BOM = b"\xef\xbb\xbf"
"""Begins a text file that a program of Windows has saved as UTF-8."""
ROW = '{"prompt": …, "ground_truth": …}'
"""Example of a JSONL line, for errors."""
READERS = "row_reader"
"""Group of entries: functions that read files, by the suffix without its dot."""


def read_rows(
    path: str,
    split: str,
    columns: Sequence[str] = (),
) -> Iterator[PlacedRow]:
    """Yield the rows of a dataset.

    Args:
        path: A file with a suffix of the group `row_reader`, or what a hook `row_source` reads.
        split: train or eval, for errors and sources with several splits.
        columns: The columns that the caller needs. A reader may yield others, too.

    Yields:
        The place of the row, for errors, and its columns.

    Raises:
        UserError: the file is missing, of another type, or not readable.
    """
    if not path:
        raise UserError(f"no dataset for split '{split}'. Set dataset.{split}=FILE.")
    file = Path(path).expanduser()
    target = entries.find(READERS, file.suffix.removeprefix("."))
    if target is not None:
        if not os.path.isfile(file):
            raise UserError(
                f"dataset file {file} does not exist or is not a regular file. "
                f"Set dataset.{split}, or {split} of its part of collector.envs, to a file."
            )
        read: RowReader = entries.load(target)
        yield from read(file, columns)
        return
    sources: list[RowSource] = entries.hooks("row_source")
    rows = entries.first_result(sources, path, split)
    if rows is None:
        suffixes = [f".{name}" for name in (*entries.own(READERS), *entries.installed(READERS))]
        raise UserError(unknown("dataset suffix", file.suffix, suffixes) + f" File: {file}.")
    yield from rows


def jsonl_rows(file: Path, columns: Sequence[str] = ()) -> Iterator[PlacedRow]:
    """Yield the place and columns of each row; skip blank lines.

    Raises:
        UserError: a line is not a JSON object.
    """
    with file.open("rb") as lines:
        for number, marked_line in enumerate(lines, start=1):
            if number == 1:
                check_utf8(file, marked_line)
            line = marked_line.removeprefix(BOM)
            if line.strip():
                yield decode_row(line, f"{file}, line {number}")


def check_utf8(file: Path, begin: bytes) -> None:
    """Refuse a file in UTF-16 or UTF-32.

    Args:
        file: The file, for errors.
        begin: At least its first four bytes.
    """
    if WIDE_START.match(begin):
        raise UserError(
            f"{file} is in UTF-16 or UTF-32, and must be in UTF-8. "
            f"Convert it: iconv -f UTF-16 -t UTF-8 {file} > NEW{file.suffix}."
        )


def decode_row(encoded: bytes, place: str) -> PlacedRow:
    """Decode a row of JSON.

    Raises:
        UserError: it is not an object, has an integer above 64 bits, or is nested too deep.
    """
    try:
        row = _decode(encoded)
        try:
            _encode(row)  # other processes encode it later
        except OverflowError:
            return place, plain_row(row, place)  # refuses the integer by its column
        max_depth = encoded.count(b"[") + encoded.count(b"{")
        if max_depth > DEPTH and _depth(row) > DEPTH:
            raise RecursionError(f"nested deeper than {DEPTH} levels")
        return place, row
    except ROW_ERRORS as error:
        raise UserError(
            f"{place}: not a JSON object: {error}. "
            f"Write one object a line, of at most {DEPTH} levels: {ROW}."
        ) from error


def _depth(node: object) -> int:
    """Return the number of nested lists and objects of a JSON value."""
    if isinstance(node, dict):
        children: Iterable[object] = cast(dict[str, object], node).values()
    elif isinstance(node, list):
        children = cast(list[object], node)
    else:
        return 0
    return 1 + max(map(_depth, children), default=0)


def plain_row(row: Mapping[Any, Any], place: str) -> dict[str, Any]:
    """Return a row with plain values: those that JSON and msgpack keep.

    Extensions convert other values (hook `plain_row`).

    Args:
        row: Values by column.
        place: The row's place, for errors.

    Raises:
        UserError: A value has no plain form; the error names its column and type.
    """
    if _is_plain(row):
        return copy.deepcopy({**row})  # an environment may change its row later
    plain: dict[str, Any] = {**row}
    converters: list[PlainRow] = entries.hooks("plain_row")
    for convert in converters:
        plain = convert(plain, place)
    return plain


def _is_plain(node: object) -> bool:
    """Return whether a value is None, a bool, a str, an int of 64 bits, a finite float, or a list
    or dict of such values."""
    kind = type(node)
    if kind is dict:
        members = cast(dict[object, object], node)
        return all(type(key) is str for key in members) and all(map(_is_plain, members.values()))
    if kind is list:
        return all(map(_is_plain, cast(list[object], node)))
    if kind is float:
        return math.isfinite(cast(float, node))
    if kind is int:
        return SMALLEST <= cast(int, node) <= LARGEST
    return kind in PLAIN
