"""Read the rows of a dataset, JSONL or Parquet, as tasks.

Every row is checked before a run starts, so that a bad one is a line with its number and not a
failure in hour three.
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
from arealite.api.task import Task
from arealite.base.errors import UserError
from arealite.base.registry import unknown

_encode = msgspec.msgpack.Encoder().encode
ROW_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError)
"""Exceptions of decoding and encoding: for a line that is no JSON object, is nested too deep or has
a number above 64 bits."""
DEPTH = 100
"""Most levels of nesting in a row: every process that reads the row needs stack for all of them."""
ROW = '{"prompt": …, "ground_truth": …}'
"""Example of a JSONL line, for errors."""
COLUMNS = ("prompt", "ground_truth", "extra_info")
"""Of a task; `prompt` is required, others in the file are ignored."""


def load_tasks(path: str, split: str) -> list[Task]:
    """Return one task a row, in the file's order; row n (from 0) gets the id `<split>-<n>`.

    Raises:
        UserError: the file is missing, empty or of another kind, or a row of it cannot be used.
    """
    rows = enumerate(read_rows(path, split, COLUMNS))
    tasks = [make_task(row, f"{split}-{index}", where) for index, (where, row) in rows]
    if not tasks:
        raise UserError(f"dataset file {path} has no rows. Write at least one with a `prompt`.")
    return tasks


def read_rows(
    path: str, split: str, columns: Sequence[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (where, row) of a JSONL or Parquet file; a Parquet file with some of `columns` gives
    only these.

    Raises:
        UserError: the file is missing or of another kind, or not readable.
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


def identity(config: ExperimentConfig, rows: Sequence[Any]) -> dict[str, str]:
    """Return what must not change within a trial, by name: it decides which group is which, and of
    an offline trainer, which step sees which row."""
    digest, trainer = hashlib.blake2b(digest_size=4), config.trainer
    for row in rows:
        digest.update(_encode(row))
    kind, size = dict[str, str](), {"group_size": str(trainer.ppo.collector.group_size)}
    if trainer.is_offline:
        kind, size = {"trainer.type": trainer.type}, {"batch_size": str(trainer.offline.batch_size)}
    return {
        **kind,  # first: it is what a trial of another kind is told
        "dataset_rows": str(len(rows)),
        "dataset_digest": digest.hexdigest(),
        "seed": str(config.seed),
        "shuffle": str(config.dataset.shuffle),
        **size,
    }


def jsonl_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (where, row); blank lines are skipped.

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
                _encode(row := decode(line))  # as every process will
                if line.count(b"[") + line.count(b"{") > DEPTH and _depth(row) > DEPTH:
                    raise RecursionError(f"nested deeper than {DEPTH} levels")
            except ROW_ERRORS as error:
                hint = f"Write one object a line, of at most {DEPTH} levels"
                raise UserError(f"{where}: not a JSON object: {error}. {hint}: {ROW}.") from error
            yield where, row


def _depth(value: Any) -> int:
    inner: Any = cast(dict[str, Any], value).values() if isinstance(value, dict) else value
    return 1 + max(map(_depth, inner), default=0) if isinstance(value, dict | list) else 0


def _parquet_rows(file: Path, columns: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (where, row), rows counted from 0."""
    # Untyped on purpose: pyarrow ships no types, and it is loaded only for Parquet.
    pyarrow: Any = importlib.import_module("pyarrow")
    parquet: Any = importlib.import_module("pyarrow.parquet")
    try:
        names: list[str] = parquet.read_schema(file).names
        table = parquet.read_table(file, columns=[n for n in columns if n in names] or None)
    except (pyarrow.ArrowException, OSError) as error:
        line = " ".join(str(error).split())
        raise UserError(f"dataset file {file} is not readable Parquet: {line}") from error
    rows = cast(list[dict[str, Any]], table.to_pylist())
    for number, row in enumerate(rows):
        yield f"{file}, row {number}", row


def _require_prompt(names: Sequence[str], where: str) -> None:
    if "prompt" in names:
        return
    near = difflib.get_close_matches("prompt", names, n=1)
    hint = f" Did you mean '{near[0]}'? Rename it to `prompt`." if near else " Add it."
    raise UserError(f"{where}: no column `prompt`, only {', '.join(names) or 'none'}.{hint}")


def make_task(row: dict[str, Any], task_id: str, where: str) -> Task:
    """Return a row as a task.

    Raises:
        UserError: a column is missing or of another type.
    """
    _require_prompt(list(row), where)
    prompt = check_prompt(row["prompt"], where)
    truth, extra = row.get("ground_truth"), row.get("extra_info")
    if truth is not None and not isinstance(truth, str):
        what = f"`ground_truth` is {type(truth).__name__}, must be a string or null"
        raise UserError(f'{where}: {what}. Write it as "{truth}".')
    if extra is not None and not isinstance(extra, dict):
        what = f"`extra_info` is {type(extra).__name__}, must be an object of named values"
        raise UserError(f'{where}: {what}. Write it as {{"name": value}}, or leave it out.')
    return Task(task_id, prompt, truth, cast(dict[str, Any], extra or {}))


def check_prompt(prompt: Any, where: str, column: str = "prompt") -> str | list[dict[str, str]]:
    """Return what a column holds, if it is a text or a list of messages, and refuse it else."""
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(map(_is_message, cast(list[Any], prompt))):
        return cast(list[dict[str, str]], prompt)
    raise UserError(
        f"{where}: `{column}` must be a text that is not empty, or a list of messages. "
        'Write "…" or [{"role": "user", "content": "…"}].'
    )


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(
        isinstance(cast(dict[str, Any], message).get(key), str) for key in ("role", "content")
    )


@lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, size: int) -> tuple[int, ...]:
    """Return the order of the dataset's rows in an epoch: a pure function of its arguments."""
    rows = list(range(size))
    random.Random(f"{seed}/{epoch}").shuffle(rows)
    return tuple(rows)
