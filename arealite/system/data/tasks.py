"""Builds the tasks of a run: rows of files, rows that an environment generates, or a mixture.

The list depends only on the config and the files, so every process builds the same list.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle, islice, product

from msgspec import structs

from arealite.api.collector_config import PartConfig
from arealite.api.env import EnvConfig, envs
from arealite.api.experiment_config import ExperimentConfig
from arealite.api.fields import EnvOptions
from arealite.api.reward import Reward, RewardConfig, make_reward, rewards
from arealite.api.task import Task
from arealite.base.errors import UserError
from arealite.system.data.dataset import PlacedTask, load_tasks, make_task, plain_row, read_tasks

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
    parts = file_parts(config)
    tasks: list[Task] = []
    for name, limit in _task_limits(config, parts, split).items():
        part_tasks = islice(_part_tasks(config, name, parts[name], split), limit)
        for task in part_tasks:
            tasks.append(structs.replace(task, task_id=f"{split}-{len(tasks)}"))
    return tasks


def _task_limits(
    config: ExperimentConfig,
    parts: Mapping[str, PartConfig],
    split: str,
) -> Mapping[str, int | None]:
    """Return the maximum number of tasks of each part, by its name; None: all rows of a file.

    A part without held-out tasks is left out.
    """
    dataset = config.dataset
    is_train = split == "train"
    num_rows = dataset.rows if is_train else dataset.eval_rows
    has_several_parts = "" not in parts
    if is_train and has_several_parts:
        return shares({name: part.weight for name, part in parts.items()}, num_rows)
    limits = dict[str, int | None]()
    for name, part in parts.items():
        path = getattr(part, split)
        if path or is_train:
            limits[name] = num_rows if path == GENERATED else None
    return limits


def file_parts(config: ExperimentConfig) -> dict[str, PartConfig]:
    """Return all environments with their files; the only one of a run has the name ""."""
    dataset = config.dataset
    parts = dict[str, PartConfig]()
    for name, part in config.trainer.ppo.collector.parts.items():
        if name:
            parts[name] = part
        else:
            parts[name] = replace(
                part,
                train=dataset.train,
                eval=dataset.eval,
                columns=dataset.columns,
            )
    return parts


def reward_of(config: EnvConfig) -> RewardConfig | None:
    """Return the option `reward` of an environment; None if it has none."""
    reward = getattr(envs.options(config), "reward", None)
    return reward if isinstance(reward, RewardConfig) else None


def reads_columns(config: EnvConfig) -> bool:
    """Return whether an environment or its reward reads `Task.columns`."""
    reward = reward_of(config)
    scores_task = False
    if reward is not None:
        scores_task = rewards.get(reward.type).score_task is not Reward.score_task
    options = envs.options(config)
    return scores_task or (isinstance(options, EnvOptions) and options.reads_columns)


def first_tasks(config: ExperimentConfig, part: PartConfig, split: str) -> Iterator[PlacedTask]:
    """Yield the place and the task of the first rows of a part: FIRST_ROWS of a file, or one
    generated row."""
    path = getattr(part, split)
    if path == GENERATED:
        for task in islice(generate(part.env, split, config.seed), 1):
            yield f"the first row that {part.env.type} generates", task
    elif path:
        tasks = read_tasks(path, split, part.columns, keep=reads_columns(part.env))
        yield from islice(tasks, FIRST_ROWS)


def check_first_rows(config: ExperimentConfig, splits: Sequence[str] = ("train", "eval")) -> None:
    """Check that each environment can read, and its reward can score, the first rows.

    Raises:
        UserError: a reward function or a row cannot be used; the error names the file and line.
    """
    for part, split in product(file_parts(config).values(), splits):
        asyncio.run(_check_tasks(part.env, first_tasks(config, part, split)))


async def _check_tasks(config: EnvConfig, rows: Iterator[PlacedTask]) -> None:
    reward = reward_of(config)
    kind = config.type
    scorer = make_reward(reward) if reward else None
    options = envs.options(config)
    try:
        for place, task in rows:
            env_class = envs.get(kind)
            env_class.check_row_options(options, task)
            try:
                env_class.check_row(task)
                if scorer and env_class.scores_with_reward(options):
                    await scorer.check_row(task)
            except Exception as error:  # an environment may raise anything
                raise UserError(
                    f"{place}: environment {kind} cannot read it: "
                    f"{type(error).__name__}: {error}. Correct or remove the row."
                ) from error
    finally:
        if scorer:
            await scorer.close()


def generate(config: EnvConfig, split: str, seed: int) -> Iterator[Task]:
    """Yield the tasks that an environment generates; the iterator may be infinite.

    Raises:
        UserError: the environment generates no tasks, or an invalid task.
    """
    rows = envs.get(config.type).rows(
        envs.options(config),
        split=split,
        seed=seed,
    )
    for index, row in enumerate(rows):
        place = f"row {index} made by environment {config.type}"
        yield make_task(plain_row(row, place), f"{split}-{index}", place)


def shares(weights: dict[str, float], count: int) -> dict[str, int]:
    """Divide `count` by weight into whole numbers with that sum, each off by less than one."""
    total_weight = sum(weights.values())
    counts = dict[str, int]()
    passed_weight = 0.0
    begin = 0
    for name, weight in weights.items():
        passed_weight += weight
        end = round(count * passed_weight / total_weight)
        counts[name] = end - begin
        begin = end
    return counts


def _part_tasks(
    config: ExperimentConfig,
    name: str,
    part: PartConfig,
    split: str,
) -> Iterator[Task]:
    """Yield the tasks of a part. Of several parts, tasks have the part's name, and files repeat.

    Args:
        config: The experiment.
        name: The part's name; "" for the only part.
        part: The part.
        split: train or eval.
    """
    path = getattr(part, split)
    if path == GENERATED:
        tasks = generate(part.env, split, config.seed)
    else:
        file_tasks = load_tasks(path or "", split, part.columns, keep=reads_columns(part.env))
        is_repeated = name != "" and split == "train"
        tasks = cycle(file_tasks) if is_repeated else iter(file_tasks)
    part_info = {"env": name} if name else {}
    for task in tasks:
        yield structs.replace(task, extra_info=task.extra_info | part_info)
