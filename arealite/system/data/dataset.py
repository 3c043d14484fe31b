"""The dataset: reads rows from files, builds their tasks, and orders them.

JSONL files are read here, others by extensions. Each row comes with its place, such as
"data.jsonl, line 3". Rows are checked before a run starts, and an error names the place of the row.
The order is a permutation in each epoch, or the order of an installed sampler.
"""

import copy
import hashlib
import math
import os
import random
import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import msgspec
from msgspec import structs

from arealite.api.experiment_config import ExperimentConfig
from arealite.api.hooks import PlacedRow, PlainRow, RowReader, RowSource, TaskForm, TaskSamplerMaker
from arealite.api.task import Row, Task, TaskSampler
from arealite.base import entries
from arealite.base.errors import UserError
from arealite.base.registry import unknown
from arealite.system.data.forms import TASK, Columns, check_prompt, no_prompt, renamed

EMPTY: Columns = MappingProxyType({})
"""No `dataset.columns`."""
PlacedTask = tuple[str, Task]
"""A row's place, for errors, and its task."""

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


def load_tasks(
    path: str,
    split: str,
    columns: Columns = EMPTY,
    *,
    keep: bool = False,
) -> list[Task]:
    """Read one task per row, in the order of the file; row n (from 0) has the id `<split>-<n>`.

    Args:
        path: The dataset, as for `read_rows`.
        split: train or eval.
        columns: The option `dataset.columns`.
        keep: Fill `Task.columns` with the other columns.

    Raises:
        UserError: the file is missing, empty or of another type, or one of its rows is invalid.
    """
    tasks = [task for _, task in read_tasks(path, split, columns, keep=keep)]
    if not tasks:
        raise UserError(f"dataset file {path} has no rows. Write at least one with a `prompt`.")
    return tasks


def read_tasks(
    path: str,
    split: str,
    columns: Columns,
    *,
    keep: bool,
) -> Iterator[PlacedTask]:
    """Yield the place and the task of each row; see load_tasks."""
    forms: list[TaskForm] = entries.hooks("task_form")
    rows = read_rows(path, split, () if keep or columns else TASK)
    for index, (place, row) in enumerate(rows):
        _, recognised = entries.first_result(forms, row) or ("", row)
        task_row = renamed(row, recognised, columns, place)
        task = make_task(task_row, f"{split}-{index}", place)
        if keep:
            other_columns = {name: cell for name, cell in row.items() if name not in TASK}
            task = structs.replace(task, columns=other_columns)
        yield place, task


def identity(config: ExperimentConfig, rows: Sequence[object]) -> dict[str, str]:
    """Return the names and values that must not change within a trial.

    They determine the task of each group, or for an offline trainer the rows of each step.
    """
    digest = hashlib.blake2b(digest_size=4)
    for row in rows:
        digest.update(_encode(row))
    trainer = config.trainer
    names = dict[str, str]()
    if trainer.is_offline:
        names["trainer.type"] = trainer.type  # first, so that an error names it first
    names["dataset_rows"] = str(len(rows))
    names["dataset_digest"] = digest.hexdigest()
    names["seed"] = str(config.seed)
    names["shuffle"] = str(config.dataset.shuffle)
    if trainer.is_offline:
        names["batch_size"] = str(trainer.selected_options.batch_size)
    else:
        names["group_size"] = str(trainer.ppo.collector.group_size)
    return names


def make_task(row: Row, task_id: str, place: str) -> Task:
    """Build a task from a row.

    Args:
        row: Columns by name.
        task_id: The task's id.
        place: The row's place, for errors.

    Raises:
        UserError: a column is missing or of another type.
    """
    if "prompt" not in row:
        raise no_prompt([*row], place)
    prompt = check_prompt(row["prompt"], place)
    truth = row.get("ground_truth")
    extra_info = row.get("extra_info")
    if truth is not None and not isinstance(truth, str):
        raise UserError(
            f"{place}: `ground_truth` is {type(truth).__name__}, must be a string or null. "
            f'Write it as "{truth}".'
        )
    if extra_info is not None and not isinstance(extra_info, dict):
        raise UserError(
            f"{place}: `extra_info` is {type(extra_info).__name__}, "
            "must be an object of named values. "
            'Write it as {"name": value}, or leave it out.'
        )
    return Task(
        task_id=task_id,
        prompt=prompt,
        ground_truth=truth,
        extra_info=cast(dict[str, object], extra_info or {}),
    )


@lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, size: int) -> tuple[int, ...]:
    """Return the order of the dataset's rows in an epoch; equal arguments give the same order."""
    rows = list(range(size))
    random.Random(f"{seed}/{epoch}").shuffle(rows)
    return tuple(rows)


class Permutation:
    """Draws each row once in an epoch; each epoch has its own order."""

    def __init__(self, num_rows: int, *, seed: int, shuffle: bool) -> None:
        self.num_rows = num_rows
        self.seed = seed
        self.shuffle = shuffle
        self._epoch = -1
        """The epoch of `_order`."""
        self._order: Sequence[int] = range(num_rows)

    def load(self, db: sqlite3.Connection) -> None:
        """Ignore the ledger: a draw depends on its number only."""

    def draw(self, seq: int) -> tuple[int, int]:
        """Return the epoch and the row of draw number `seq`."""
        epoch, place = divmod(seq, self.num_rows)
        if self.shuffle and epoch != self._epoch:
            self._order = permutation(self.seed, epoch, self.num_rows)
            self._epoch = epoch
        return epoch, self._order[place]

    def record(self, seq: int, row: int, rewards: Sequence[float | None]) -> None:
        """Ignore the rewards: the order depends on none."""

    def metrics(self) -> dict[str, float]:
        """Return no metrics."""
        return {}


def make_sampler(config: ExperimentConfig, train: Sequence[Task]) -> TaskSampler:
    """Return the sampler of a run: the first of the installed ones that takes it, or Permutation.

    Raises:
        UserError: A sampler cannot order these tasks.
    """
    makers: list[TaskSamplerMaker] = entries.hooks("task_sampler")
    sampler = entries.first_result(makers, config, train)
    if sampler is not None:
        return sampler
    return Permutation(len(train), seed=config.seed, shuffle=config.dataset.shuffle)
