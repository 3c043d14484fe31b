"""Builds the tasks of a run: rows of files, rows that an environment generates, or a mixture.

The list depends only on the config and the files, so every process builds the same list.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, islice, product

from msgspec import structs

from arealite.api.collector import PartConfig
from arealite.api.config import ExperimentConfig
from arealite.api.env import envs
from arealite.api.env_config import EnvConfig
from arealite.api.task import Task
from arealite.base.errors import UserError
from arealite.system.data.dataset import COLUMNS, load_tasks, make_task, read_rows

FIRST_ROWS = 1000
"""Number of rows at the beginning of a file that are checked before a run starts."""
GENERATED = "generated"
"""Value of `dataset.train` or `dataset.eval`: the environment generates the rows."""


def load_split(config: ExperimentConfig, split: str) -> list[Task]:
    """Return the tasks of `train` or `eval`; [] if a run has no held-out tasks.

    With several environments (`collector.envs`), `extra_info.env` of each task is the name of its
    environment. There are then `dataset.rows` training tasks in total, divided by weight. A file
    with fewer rows is repeated, and further rows of a longer file are left out.

    Raises:
        UserError: as `load_tasks`; or an environment generates no tasks.
    """
    data, envs = config.dataset, config.trainer.ppo.collector.envs
    is_train = split == "train"
    path, count = (data.train, data.rows) if is_train else (data.eval, data.eval_rows)
    if envs:
        return _mixed(config, split, count)
    if path == GENERATED:
        return [*islice(generate(config.trainer.ppo.collector.env, split, config.seed), count)]
    return load_tasks(path or "", split) if is_train or path else []


def check_first_rows(config: ExperimentConfig) -> None:
    """Check that each environment can read the first FIRST_ROWS rows of its files.

    Raises:
        UserError: a row cannot be read; the error names its file and line.
    """
    collector = config.trainer.ppo.collector
    for part, split in product(collector.parts.values(), ("train", "eval")):
        path = getattr(part if collector.envs else config.dataset, split)
        if path and path != GENERATED:
            rows = islice(read_rows(path, split, COLUMNS), FIRST_ROWS)
            for index, (where, row) in enumerate(rows):
                task, kind = make_task(row, f"{split}-{index}", where), part.env.type
                try:
                    envs.get(kind).check_row(task)
                except Exception as error:  # an environment may raise anything
                    why = f"environment {kind} cannot read it: {type(error).__name__}: {error}"
                    raise UserError(f"{where}: {why}. Correct or remove the row.") from error


def generate(config: EnvConfig, split: str, seed: int) -> Iterator[Task]:
    """Yield the tasks that an environment generates; the iterator may be infinite.

    Raises:
        UserError: the environment generates no tasks, or an invalid task.
    """
    rows = envs.get(config.type).rows(envs.options(config), split=split, seed=seed)
    for index, row in enumerate(rows):
        yield make_task(row, f"{split}-{index}", f"row {index} made by environment {config.type}")


def shares(weights: dict[str, float], count: int) -> dict[str, int]:
    """Divide `count` by weight into whole numbers with that sum, each off by less than one."""
    total, ends, passed = sum(weights.values()), dict[str, int](), 0.0
    for name, weight in weights.items():
        passed += weight
        ends[name] = round(count * passed / total)
    begins = [0, *ends.values()]
    return {name: end - begin for (name, end), begin in zip(ends.items(), begins, strict=False)}


def _mixed(config: ExperimentConfig, split: str, count: int) -> list[Task]:
    parts = config.trainer.ppo.collector.envs
    if split == "train":
        counts = shares({name: part.weight for name, part in parts.items()}, count)
        drawn = {n: islice(_own(config, p, split), counts[n]) for n, p in parts.items()}
    else:
        held_out = {name: part for name, part in parts.items() if part.eval}
        drawn = {
            name: islice(_own(config, part, split), count)
            if part.eval == GENERATED
            else load_tasks(part.eval or "", split)
            for name, part in held_out.items()
        }
    named = [_named(task, name) for name, tasks in drawn.items() for task in tasks]
    return [structs.replace(task, task_id=f"{split}-{n}") for n, task in enumerate(named)]


def _own(config: ExperimentConfig, part: PartConfig, split: str) -> Iterator[Task]:
    path = part.train if split == "train" else part.eval
    if path == GENERATED:
        return generate(part.env, split, config.seed)
    return cycle(load_tasks(path or "", split))


def _named(task: Task, name: str) -> Task:
    extra: dict[str, object] = {**task.extra_info, "env": name}
    return structs.replace(task, extra_info=extra)
