"""Reads the rows of a dataset: JSONL, JSON, CSV, Parquet, a `datasets` folder, or a hub id.

Each row comes with its place, such as "data.jsonl, line 3", for errors.
"""

import csv
import importlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, cast

import msgspec

from arealite.base.errors import UserError, one_line
from arealite.base.extras import import_optional
from arealite.base.registry import unknown
from arealite.system.data.values import arrow_rows, plain_row, rows_of

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
Place = tuple[str, dict[str, Any]]
"""The place of a row and its columns."""


def read_rows(path: str, split: str, columns: Sequence[str] = ()) -> Iterator[Place]:
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
    readers = {".jsonl": jsonl_rows, ".json": _json_rows, ".csv": _csv_rows}
    if file.suffix in (suffixes := (*readers, ".parquet")):
        if not os.path.isfile(file):
            hint = f"Set dataset.{split}, or {split} of its part of collector.envs, to a file."
            raise UserError(f"dataset file {file} does not exist or is not a regular file. {hint}")
        yield from readers[file.suffix](file) if file.suffix in readers else _parquet(file, columns)
    elif os.path.isdir(file):
        yield from _folder_rows(file, split)
    elif HUB_ID.fullmatch(path) and not os.path.exists(file):
        yield from _hub_rows(path, split)
    else:
        raise UserError(unknown("dataset suffix", file.suffix, suffixes) + f" File: {file}.")


def jsonl_rows(file: Path) -> Iterator[Place]:
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
        fix = f"Convert it: iconv -f UTF-16 -t UTF-8 {file} > NEW{file.suffix}"
        raise UserError(f"{file} is in UTF-16 or UTF-32, and must be in UTF-8. {fix}.")


def _json_rows(file: Path) -> Iterator[Place]:
    """Yield the rows of an array, counted from 0, or of a file with one object a line."""
    text = file.read_bytes().removeprefix(BOM)
    _check_utf8(file, text)
    if not text.lstrip().startswith(b"["):
        yield from jsonl_rows(file)
        return
    try:
        found = msgspec.json.decode(text, type=list[msgspec.Raw])
    except ROW_ERRORS as error:
        raise UserError(f"{file}: not a JSON array: {error}. Write [{ROW}, …].") from error
    for number, raw in enumerate(found):
        yield _row(bytes(raw), f"{file}, row {number}")


def _row(line: bytes, where: str) -> Place:
    try:
        row = _decode(line)
        try:
            _encode(row)  # other processes encode it later
        except OverflowError:
            return where, plain_row(row, where)  # refuses the integer by its column
        if line.count(b"[") + line.count(b"{") > DEPTH and _depth(row) > DEPTH:
            raise RecursionError(f"nested deeper than {DEPTH} levels")
        return where, row
    except ROW_ERRORS as error:
        hint = f"Write one object a line, of at most {DEPTH} levels"
        raise UserError(f"{where}: not a JSON object: {error}. {hint}: {ROW}.") from error


def _depth(value: object) -> int:
    inner: Any = cast(dict[str, object], value).values() if isinstance(value, dict) else value
    return 1 + max(map(_depth, inner), default=0) if isinstance(value, dict | list) else 0


def _csv_rows(file: Path) -> Iterator[Place]:
    """Yield the rows of a CSV file with a header. All values are texts."""
    where = f"{file}, line 1"
    csv.field_size_limit(1 << 30)
    with file.open("rb") as binary:
        _check_utf8(file, binary.read(4))
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            for row in (reader := csv.DictReader(lines, strict=True)):
                where = f"{file}, line {reader.line_num}"
                if cast(Any, None) in row or None in row.values():
                    what = f"{where}: not as many cells as the header has columns"
                    raise UserError(f"{what}. Quote cells with commas or line breaks.")
                yield where, row
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"{where}: not readable CSV: {error}. Save it as UTF-8.") from error


def _parquet(file: Path, columns: Sequence[str]) -> Iterator[Place]:
    """Yield the place and columns of each row; rows are counted from 0."""
    # Imported only for Parquet files.
    pyarrow = importlib.import_module("pyarrow")
    parquet = importlib.import_module("pyarrow.parquet")
    try:
        names: list[str] = parquet.read_schema(file).names
        wanted = [name for name in columns if name in names]
        is_own = {*wanted} - {"ground_truth", "extra_info"} and not FOREIGN & {*names}
        table = parquet.read_table(file, columns=wanted if is_own else None)
    except (pyarrow.ArrowException, OSError) as error:
        what = f"dataset file {file} is not readable Parquet"
        raise UserError(f"{what}: {one_line(error):.300}") from error
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


def _folder_rows(folder: Path, split: str) -> Iterator[Place]:
    """Yield the rows of a folder that `save_to_disk` of the `datasets` library has written."""
    if (listing := folder / "dataset_dict.json").is_file():
        folder /= _pick_split(json.loads(listing.read_text())["splits"], split, str(folder), "/")
    if not (state := folder / "state.json").is_file():
        what = f"dataset.{split}={folder} is a folder without a dataset of save_to_disk"
        raise UserError(f"{what}. Name a file, or a folder that save_to_disk has written.")
    ipc = importlib.import_module("pyarrow.ipc")
    try:
        files = [folder / f["filename"] for f in json.loads(state.read_text())["_data_files"]]
        tables = [ipc.open_stream(file.read_bytes()).read_all() for file in files]
    except (OSError, ValueError, KeyError) as error:  # errors of Arrow are ValueErrors
        what = f"{folder} is not a readable dataset: {one_line(error):.300}"
        raise UserError(f"{what}. Save it again.") from error
    rows = chain.from_iterable(arrow_rows(table, folder) for table in tables)
    yield from _numbered(folder, rows)


def _hub_rows(name: str, split: str) -> Iterator[Place]:
    """Yield the rows of a dataset of the Hugging Face hub: owner/name:config:split."""
    what = f"dataset.{split}={name}: there is no file of this name, and as a hub id it failed"
    owner, config, chosen, *_ = [*name.split(":"), "", ""]
    try:
        found = import_optional("datasets", "datasets").load_dataset(owner, config or None)
        rows = rows_of(
            found[chosen or _pick_split([*found], split, f"{owner}:{config}", ":")], name
        )
    except Exception as error:  # the library and the network may raise anything
        fix = "Correct it, or download the dataset and name a file or a folder"
        raise UserError(f"{what}: {one_line(error):.300}. {fix}.") from error
    yield from _numbered(name, rows)


def _pick_split(names: Sequence[str], split: str, where: str, mark: str) -> str:
    if found := [name for name in SPLITS.get(split, ("train",)) if name in names]:
        return found[0]
    every = ", ".join(names)
    raise UserError(f"{where} has the splits {every}. Set dataset.{split}={where}{mark}NAME.")


def _numbered(place: object, rows: Iterable[dict[str, Any]]) -> Iterator[Place]:
    for number, row in enumerate(rows):
        where = f"{place}, row {number}"
        yield where, plain_row(row, where)
