"""Builds tasks from the rows of a dataset.

Rows are checked before a run starts, and an error names the file and line of the row.
"""

import hashlib
import random
from collections.abc import Iterator, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import cast

import msgspec
from msgspec import structs

from arealite.api.experiment_config import ExperimentConfig
from arealite.api.hooks import TaskForm
from arealite.api.task import Row, Task
from arealite.base import entries
from arealite.base.errors import UserError
from arealite.system.data.forms import TASK, Columns, check_prompt, no_prompt, renamed
from arealite.system.data.sources import read_rows

_encode = msgspec.msgpack.Encoder().encode
EMPTY: Columns = MappingProxyType({})
"""No `dataset.columns`."""
PlacedTask = tuple[str, Task]
"""A row's place, for errors, and its task."""


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
