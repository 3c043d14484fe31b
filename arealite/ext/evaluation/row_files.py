"""Writes collected trajectories to a Parquet or JSONL file, which `dataset.train` of sft reads."""

import importlib
import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import msgspec

from arealite.base.files import replacing

FileRow = dict[str, object]
ROWS_AT_A_TIME = 1024
SUFFIXES = (".parquet", ".jsonl")


def write_rows(file: Path, rows: Iterable[FileRow]) -> int:
    """Write rows to a temporary file, then rename it; return the number of rows."""
    write = _parquet if file.suffix == ".parquet" else _jsonl
    with replacing(file) as temporary:
        count = write(temporary, iter(rows))
        with temporary.open("rb+") as written:
            os.fsync(written.fileno())
    return count


def _jsonl(file: Path, rows: Iterator[FileRow]) -> int:
    count = 0
    encode = msgspec.json.Encoder().encode
    with file.open("wb") as out:
        for count, row in enumerate(rows, start=1):  # noqa: B007
            out.write(encode(row) + b"\n")
    return count


def _parquet(file: Path, rows: Iterator[FileRow]) -> int:
    pa = importlib.import_module("pyarrow")
    parquet = importlib.import_module("pyarrow.parquet")
    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    column_types = {
        "task_id": pa.string(),
        "source": pa.string(),
        "seat": pa.string(),
        "sample": pa.int32(),
        "segment": pa.int32(),
        "turns": pa.int32(),
        "prompt": pa.string(),
        "messages": pa.list_(message),
        "ground_truth": pa.string(),
        "text": pa.string(),
        "next_state": pa.string(),
        "tokens": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.bool_()),
        "logprobs": pa.list_(pa.float32()),
        "versions": pa.list_(pa.int32()),
        "reward": pa.float64(),
        "reward_parts": pa.map_(pa.string(), pa.float64()),
        "truncated": pa.bool_(),
    }
    count = 0
    schema = pa.schema(list(column_types.items()))
    with parquet.ParquetWriter(file, schema) as out:
        while batch := list(islice(rows, ROWS_AT_A_TIME)):
            out.write_table(pa.Table.from_pylist(batch, schema=schema))
            count += len(batch)
    return count
