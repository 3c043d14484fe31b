"""Describes the training rows of a run, for `arealite check`."""

from collections.abc import Iterator
from itertools import islice

from arealite.api.experiment_config import ExperimentConfig
from arealite.api.task import Task
from arealite.ext.datasets.task_forms import task_form
from arealite.system.data.dataset import read_rows
from arealite.system.data.tasks import GENERATED, file_parts, first_tasks

SHOWN = 60
"""Characters of a prompt or ground truth that `arealite check` shows."""


def describe_tasks(config: ExperimentConfig) -> Iterator[tuple[str, str]]:
    """Yield (heading, text) about the training rows: their form, and the first row as read."""
    for name, part in file_parts(config).items():
        if part.train != GENERATED:
            _, first_row = next(iter(read_rows(part.train, "train")))
            recognised = task_form(first_row)
            if recognised is not None:
                form, _ = recognised
                yield "data", f"{form} {name}".strip()
            if part.columns:
                mapping = ", ".join(f"{column}={path}" for column, path in part.columns.items())
                yield "data", f"dataset.columns: {mapping} {name}".strip()
        for _, task in islice(first_tasks(config, part, "train"), 1):
            yield "example", _describe_task(task)


def _describe_task(task: Task) -> str:
    """Return the beginnings of a task's prompt and ground truth, and its columns."""
    prompt = task.text[:SHOWN]
    truth = task.ground_truth and task.ground_truth[:SHOWN]
    description = f"prompt {prompt!r}, ground_truth {truth!r}"
    if task.columns:
        description += f", columns {', '.join(task.columns)}"
    return description
