"""Reads the rows of a dataset: JSONL, JSON, CSV, Parquet, a `datasets` folder, or a hub id.

Each row comes with its place, such as "data.jsonl, line 3", for errors.
"""

import csv
import importlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, cast

import msgspec

from arealite.base.errors import UserError, one_line
from arealite.base.extras import import_optional
from arealite.base.registry import unknown
from arealite.system.data.plain_values import arrow_rows, plain_row, rows_of

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, Any]).decode
ROW_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Exceptions for a line that is not a JSON object, or is nested too deep."""
DEPTH = 100
"""Maximum nesting of a row: each process that decodes the row needs stack for every level."""
WIDE_START = re.compile(rb"\xff\xfe|\xfe\xff|[\t\n\r -~]\0|\0[\t\n\r -~]|\0\0\0[\t\n\r -~]")
"""The start of a file in UTF-16 or UTF-32: a byte order mark, or a letter with zeros."""
BOM = b"\xef\xbb\xbf"
"""Begins a text file that a program of Windows has saved as UTF-8."""
ROW = '{"prompt": …, "ground_truth": …}'
"""Example of a JSONL line, for errors."""
FOREIGN = {"reward_model", "conversations", "entry_point"}
"""Columns of other libraries' formats: all columns of a Parquet file with one of them are read."""
HUB_ID = re.compile(r"[\w-]+/[\w-]+(?:\.\d[\w-]*)*(?::[\w.-]*){0,2}")
"""Matches owner/name, owner/name:config and owner/name:config:split."""
SPLITS = {"eval": ("eval", "validation", "test")}
"""Names of the held-out split, in order of preference. Other splits are read from "train"."""
PlacedRow = tuple[str, dict[str, Any]]
"""The place of a row, such as "data.jsonl, line 3", and its columns."""


def read_rows(
    path: str,
    split: str,
    columns: Sequence[str] = (),
) -> Iterator[PlacedRow]:
    """Yield the rows of a dataset.

    Args:
        path: A file, a folder saved with `save_to_disk`, or a hub id.
        split: train or eval, for errors and folders with several splits.
        columns: Columns to read from a Parquet file; all are read if `columns` is empty, or if the
            file has none of them or has another library's format.

    Yields:
        The place of the row, for errors, and its columns.

    Raises:
        UserError: the file is missing, of another type, or not readable.
    """
    if not path:
        raise UserError(f"no dataset for split '{split}'. Set dataset.{split}=FILE.")
    file = Path(path).expanduser()
    readers = {
        ".jsonl": jsonl_rows,
        ".json": _json_rows,
        ".csv": _csv_rows,
        ".parquet": partial(_parquet, columns=columns),
    }
    if file.suffix in readers:
        if not os.path.isfile(file):
            raise UserError(
                f"dataset file {file} does not exist or is not a regular file. "
                f"Set dataset.{split}, or {split} of its part of collector.envs, to a file."
            )
        yield from readers[file.suffix](file)
    elif os.path.isdir(file):
        yield from _folder_rows(file, split)
    elif HUB_ID.fullmatch(path) and not os.path.exists(file):
        yield from _hub_rows(path, split)
    else:
        raise UserError(unknown("dataset suffix", file.suffix, [*readers]) + f" File: {file}.")


def jsonl_rows(file: Path) -> Iterator[PlacedRow]:
    """Yield the place and columns of each row; skip blank lines.

    Raises:
        UserError: a line is not a JSON object.
    """
    with file.open("rb") as lines:
        for number, marked_line in enumerate(lines, start=1):
            if number == 1:
                _check_utf8(file, marked_line)
            line = marked_line.removeprefix(BOM)
            if line.strip():
                yield _row(line, f"{file}, line {number}")


def _check_utf8(file: Path, begin: bytes) -> None:
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


def _json_rows(file: Path) -> Iterator[PlacedRow]:
    """Yield the rows of an array, counted from 0, or of a file with one object a line."""
    encoded = file.read_bytes().removeprefix(BOM)
    _check_utf8(file, encoded)
    if not encoded.lstrip().startswith(b"["):
        yield from jsonl_rows(file)
        return
    try:
        encoded_rows = msgspec.json.decode(encoded, type=list[msgspec.Raw])
    except ROW_ERRORS as error:
        raise UserError(f"{file}: not a JSON array: {error}. Write [{ROW}, …].") from error
    for number, encoded_row in enumerate(encoded_rows):
        yield _row(bytes(encoded_row), f"{file}, row {number}")


def _row(encoded: bytes, place: str) -> PlacedRow:
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


def _csv_rows(file: Path) -> Iterator[PlacedRow]:
    """Yield the rows of a CSV file with a header. All values are texts."""
    place = f"{file}, line 1"
    csv.field_size_limit(1 << 30)
    with file.open("rb") as binary:
        _check_utf8(file, binary.read(4))
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            reader = csv.DictReader(lines, strict=True)
            for row in reader:
                place = f"{file}, line {reader.line_num}"
                has_more_cells = cast(Any, None) in row
                has_fewer_cells = None in row.values()
                if has_more_cells or has_fewer_cells:
                    raise UserError(
                        f"{place}: not as many cells as the header has columns. "
                        "Quote cells with commas or line breaks."
                    )
                yield place, row
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"{place}: not readable CSV: {error}. Save it as UTF-8.") from error


def _parquet(file: Path, columns: Sequence[str]) -> Iterator[PlacedRow]:
    """Yield the place and columns of each row; rows are counted from 0."""
    # Imported only for Parquet files.
    pyarrow = importlib.import_module("pyarrow")
    parquet = importlib.import_module("pyarrow.parquet")
    try:
        names: list[str] = parquet.read_schema(file).names
        present = [name for name in columns if name in names]
        has_main_column = bool({*present} - {"ground_truth", "extra_info"})
        is_foreign = bool(FOREIGN & {*names})
        reads_all = is_foreign or not has_main_column
        table = parquet.read_table(file, columns=None if reads_all else present)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(
            f"dataset file {file} is not readable Parquet: {one_line(error):.300}"
        ) from error
    yield from _numbered(file, arrow_rows(table, file))


def parquet_columns(path: str) -> list[str]:
    """Return the names of the columns of a Parquet file; [] for a dataset of another kind."""
    file = Path(path).expanduser()
    if file.suffix != ".parquet":
        return []
    return list(importlib.import_module("pyarrow.parquet").read_schema(file).names)


def is_saved(folder: Path) -> bool:
    """Return whether `save_to_disk` of the `datasets` library has written a folder."""
    return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _folder_rows(folder: Path, split: str) -> Iterator[PlacedRow]:
    """Yield the rows of a folder that `save_to_disk` of the `datasets` library has written."""
    listing = folder / "dataset_dict.json"
    if listing.is_file():
        splits = json.loads(listing.read_text())["splits"]
        folder /= _pick_split(splits, split, str(folder), "/")
    state = folder / "state.json"
    if not state.is_file():
        raise UserError(
            f"dataset.{split}={folder} is a folder without a dataset of save_to_disk. "
            "Name a file, or a folder that save_to_disk has written."
        )
    ipc = importlib.import_module("pyarrow.ipc")
    try:
        entries = json.loads(state.read_text())["_data_files"]
        files = [folder / entry["filename"] for entry in entries]
        tables = [ipc.open_stream(file.read_bytes()).read_all() for file in files]
    except (OSError, ValueError, KeyError) as error:  # errors of Arrow are ValueErrors
        raise UserError(
            f"{folder} is not a readable dataset: {one_line(error):.300}. Save it again."
        ) from error
    rows = chain.from_iterable(arrow_rows(table, folder) for table in tables)
    yield from _numbered(folder, rows)


def _hub_rows(name: str, split: str) -> Iterator[PlacedRow]:
    """Yield the rows of a dataset of the Hugging Face hub: owner/name:config:split."""
    dataset_id, config, hub_split, *_ = [*name.split(":"), "", ""]
    try:
        datasets = import_optional("datasets", "datasets")
        splits = datasets.load_dataset(dataset_id, config or None)
        if not hub_split:
            hub_split = _pick_split([*splits], split, f"{dataset_id}:{config}", ":")
        rows = rows_of(splits[hub_split], name)
    except Exception as error:  # the library and the network may raise anything
        raise UserError(
            f"dataset.{split}={name}: there is no file of this name, and as a hub id it failed: "
            f"{one_line(error):.300}. "
            "Correct it, or download the dataset and name a file or a folder."
        ) from error
    yield from _numbered(name, rows)


def _pick_split(
    names: Sequence[str],
    split: str,
    dataset: str,
    separator: str,
) -> str:
    """Return the name of the split to read.

    Args:
        names: Splits of the dataset.
        split: train or eval.
        dataset: The dataset's name, for errors.
        separator: Text between the names of dataset and split, for errors.

    Raises:
        UserError: the dataset has no split of a usual name.
    """
    for name in SPLITS.get(split, ("train",)):
        if name in names:
            return name
    raise UserError(
        f"{dataset} has the splits {', '.join(names)}. "
        f"Set dataset.{split}={dataset}{separator}NAME."
    )


def _numbered(dataset: object, rows: Iterable[dict[str, Any]]) -> Iterator[PlacedRow]:
    """Yield the place and the plain columns of each row; rows are counted from 0."""
    for number, row in enumerate(rows):
        place = f"{dataset}, row {number}"
        yield place, plain_row(row, place)
