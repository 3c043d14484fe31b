"""Reads the rows of files in JSON, CSV and Parquet.

Each row comes with its place, such as "data.csv, line 3", for errors.
"""

import csv
import importlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from arealite.api.hooks import PlacedRow
from arealite.base.errors import UserError, one_line
from arealite.ext.datasets.plain_values import arrow_rows, plain_row
from arealite.system.data.dataset import BOM, ROW, ROW_ERRORS, check_utf8, decode_row, jsonl_rows

FOREIGN = {"reward_model", "conversations", "entry_point"}
"""Columns of other libraries' formats: all columns of a Parquet file with one of them are read."""


def json_rows(file: Path, columns: Sequence[str] = ()) -> Iterator[PlacedRow]:
    """Yield the rows of an array, counted from 0, or of a file with one object a line."""
    encoded = file.read_bytes().removeprefix(BOM)
    check_utf8(file, encoded)
    if not encoded.lstrip().startswith(b"["):
        yield from jsonl_rows(file)
        return
    try:
        encoded_rows = msgspec.json.decode(encoded, type=list[msgspec.Raw])
    except ROW_ERRORS as error:
        raise UserError(f"{file}: not a JSON array: {error}. Write [{ROW}, …].") from error
    for number, encoded_row in enumerate(encoded_rows):
        yield decode_row(bytes(encoded_row), f"{file}, row {number}")


def csv_rows(file: Path, columns: Sequence[str] = ()) -> Iterator[PlacedRow]:
    """Yield the rows of a CSV file with a header. All values are texts."""
    place = f"{file}, line 1"
    csv.field_size_limit(1 << 30)
    with file.open("rb") as binary:
        check_utf8(file, binary.read(4))
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


def parquet_rows(file: Path, columns: Sequence[str]) -> Iterator[PlacedRow]:
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
    yield from numbered(file, arrow_rows(table, file))


def parquet_columns(path: str) -> list[str]:
    """Return the names of the columns of a Parquet file; [] for a dataset of another kind."""
    file = Path(path).expanduser()
    if file.suffix != ".parquet":
        return []
    return list(importlib.import_module("pyarrow.parquet").read_schema(file).names)


def numbered(dataset: object, rows: Iterable[dict[str, Any]]) -> Iterator[PlacedRow]:
    """Yield the place and the plain columns of each row; rows are counted from 0."""
    for number, row in enumerate(rows):
        place = f"{dataset}, row {number}"
        yield place, plain_row(row, place)
