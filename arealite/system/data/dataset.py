"""Reads the rows of a dataset (JSONL or Parquet) as tasks.

Rows are checked before a run starts, and an error names the file and line of the row.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import os
import random
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import msgspec

from arealite.api.config import ExperimentConfig
from arealite.api.task import Row, Task
from arealite.base.errors import UserError
from arealite.base.registry import unknown
from arealite.system.data.benchmarks import HUMANEVAL, humaneval

_encode = msgspec.msgpack.Encoder().encode
ROW_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError)
"""Exceptions for a line that is not a JSON object, is nested too deep, or has a number above 64
bits."""
DEPTH = 100
"""Maximum nesting of a row: each process that decodes the row needs stack for every level."""
ROW = '{"prompt": …, "ground_truth": …}'
"""Example of a JSONL line, for errors."""
COLUMNS = ("prompt", "ground_truth", "extra_info", *HUMANEVAL[1:])
"""Columns of a task, and of HumanEval. `prompt` is required; other columns are ignored."""


def load_tasks(path: str, split: str) -> list[Task]:
    """Read one task per row, in the order of the file; row n (from 0) has the id `<split>-<n>`.

    Raises:
        UserError: the file is missing, empty or of another type, or one of its rows is invalid.
    """
    rows = enumerate(read_rows(path, split, COLUMNS))
    tasks = [make_task(row, f"{split}-{index}", where) for index, (where, row) in rows]
    if not tasks:
        raise UserError(f"dataset file {path} has no rows. Write at least one with a `prompt`.")
    return tasks


def read_rows(
    path: str, split: str, columns: Sequence[str]
) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the rows of a JSONL or Parquet file.

    Args:
        path: The file.
        split: train or eval, for errors.
        columns: Columns to read from a Parquet file; all are read if it has none of them.

    Yields:
        The place of the row, for errors, and its columns.

    Raises:
        UserError: the file is missing, of another type, or not readable.
    """
    if not path:
        hint = f"Set dataset.{split}=<file.jsonl or .parquet>."
        raise UserError(f"no dataset for split '{split}'. {hint}")
    file = Path(path).expanduser()
    suffixes = (".jsonl", ".parquet")
    if file.suffix not in suffixes:
        raise UserError(unknown("dataset suffix", file.suffix, suffixes) + f" File: {file}.")
    if not os.path.isfile(file):
        hint = f"Set dataset.{split}, or {split} of its part of collector.envs, to a file."
        raise UserError(f"dataset file {file} does not exist or is not a regular file. {hint}")
    yield from jsonl_rows(file) if file.suffix == ".jsonl" else _parquet_rows(file, columns)


def identity(config: ExperimentConfig, rows: Sequence[object]) -> dict[str, str]:
    """Return the names and values that must not change within a trial.

    They determine the task of each group, or for an offline trainer the rows of each step.
    """
    digest, trainer = hashlib.blake2b(digest_size=4), config.trainer
    for row in rows:
        digest.update(_encode(row))
    kind, size = dict[str, str](), {"group_size": str(trainer.ppo.collector.group_size)}
    if trainer.is_offline:
        kind, size = {"trainer.type": trainer.type}, {"batch_size": str(trainer.offline.batch_size)}
    return {
        **kind,  # first, so that an error names it first
        "dataset_rows": str(len(rows)),
        "dataset_digest": digest.hexdigest(),
        "seed": str(config.seed),
        "shuffle": str(config.dataset.shuffle),
        **size,
    }


def jsonl_rows(file: Path) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the place and columns of each row; skip blank lines.

    Raises:
        UserError: a line is not a JSON object.
    """
    decode = msgspec.json.Decoder(dict[str, Any]).decode
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{file}, line {number}"
            try:
                _encode(row := decode(line))  # other processes encode it later
                if line.count(b"[") + line.count(b"{") > DEPTH and _depth(row) > DEPTH:
                    raise RecursionError(f"nested deeper than {DEPTH} levels")
            except ROW_ERRORS as error:
                hint = f"Write one object a line, of at most {DEPTH} levels"
                raise UserError(f"{where}: not a JSON object: {error}. {hint}: {ROW}.") from error
            yield where, row


def _depth(value: object) -> int:
    inner: Any = cast(dict[str, object], value).values() if isinstance(value, dict) else value
    return 1 + max(map(_depth, inner), default=0) if isinstance(value, dict | list) else 0


def _parquet_rows(file: Path, columns: Sequence[str]) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the place and columns of each row; rows are counted from 0."""
    # Imported only for Parquet files.
    pyarrow = importlib.import_module("pyarrow")
    parquet = importlib.import_module("pyarrow.parquet")
    try:
        names: list[str] = parquet.read_schema(file).names
        table = parquet.read_table(file, columns=[n for n in columns if n in names] or None)
    except (pyarrow.ArrowException, OSError) as error:
        line = " ".join(str(error).split())
        raise UserError(f"dataset file {file} is not readable Parquet: {line}") from error
    rows = cast(list[dict[str, object]], table.to_pylist())
    for number, row in enumerate(rows):
        yield f"{file}, row {number}", row


def _require_prompt(names: Sequence[str], where: str) -> None:
    if "prompt" in names:
        return
    near = difflib.get_close_matches("prompt", names, n=1)
    hint = f" Did you mean '{near[0]}'? Rename it to `prompt`." if near else " Add it."
    raise UserError(f"{where}: no column `prompt`, only {', '.join(names) or 'none'}.{hint}")


def make_task(row: Row, task_id: str, where: str) -> Task:
    """Build a task from a row.

    Args:
        row: Columns by name.
        task_id: The task's id.
        where: The row's place, for errors.

    Raises:
        UserError: a column is missing or of another type.
    """
    row = humaneval(row)
    _require_prompt(list(row), where)
    prompt = check_prompt(row["prompt"], where)
    truth, extra = row.get("ground_truth"), row.get("extra_info")
    if truth is not None and not isinstance(truth, str):
        what = f"`ground_truth` is {type(truth).__name__}, must be a string or null"
        raise UserError(f'{where}: {what}. Write it as "{truth}".')
    if extra is not None and not isinstance(extra, dict):
        what = f"`extra_info` is {type(extra).__name__}, must be an object of named values"
        raise UserError(f'{where}: {what}. Write it as {{"name": value}}, or leave it out.')
    return Task(task_id, prompt, truth, cast(dict[str, object], extra or {}))


def check_prompt(prompt: object, where: str, column: str = "prompt") -> str | list[dict[str, str]]:
    """Return the value of a column if it is a text or a list of messages.

    Raises:
        UserError: it is neither, or empty.
    """
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(map(_is_message, cast(list[object], prompt))):
        return cast(list[dict[str, str]], prompt)
    raise UserError(
        f"{where}: `{column}` must be a text that is not empty, or a list of messages. "
        'Write "…" or [{"role": "user", "content": "…"}].'
    )


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and all(
        isinstance(cast(dict[str, object], message).get(key), str) for key in ("role", "content")
    )


@lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, size: int) -> tuple[int, ...]:
    """Return the order of the dataset's rows in an epoch; equal arguments give the same order."""
    rows = list(range(size))
    random.Random(f"{seed}/{epoch}").shuffle(rows)
    return tuple(rows)
