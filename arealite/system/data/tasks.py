"""Builds the tasks of a run: rows of files, rows that an environment generates, or a mixture.

The list depends only on the config and the files, so every process builds the same list.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, cycle, islice, product

from msgspec import structs

from arealite.api.collector import PartConfig
from arealite.api.config import ExperimentConfig
from arealite.api.env import envs
from arealite.api.env_config import EnvConfig
from arealite.api.reward import Reward, RewardConfig, make_reward, rewards
from arealite.api.task import Task
from arealite.base.errors import UserError
from arealite.system.data.chats import read_dataset
from arealite.system.data.dataset import PlacedTask, load_tasks, make_task, read_tasks
from arealite.system.data.forms import chat_form, task_form
from arealite.system.data.sources import read_rows
from arealite.system.data.values import plain_row

SHOWN = 60
"""Characters of a prompt or ground truth that `arealite check` shows."""
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
    data = config.dataset
    is_train = split == "train"
    paths = {name: getattr(part, split) for name, part in parts.items()}
    count = data.rows if is_train else data.eval_rows
    most = {n: count if p == GENERATED else None for n, p in paths.items() if p or is_train}
    if is_train and "" not in parts:
        most = shares({name: part.weight for name, part in parts.items()}, count)
    drawn = [islice(_own(config, name, parts[name], split), most[name]) for name in most]
    tasks = enumerate(chain.from_iterable(drawn))
    return [structs.replace(task, task_id=f"{split}-{n}") for n, task in tasks]


def file_parts(config: ExperimentConfig) -> dict[str, PartConfig]:
    """Return all environments with their files; the only one of a run has the name ""."""
    data = config.dataset
    parts = config.trainer.ppo.collector.parts
    files = {"train": data.train, "eval": data.eval, "columns": data.columns}
    return {name: part if name else replace(part, **files) for name, part in parts.items()}


def reward_of(config: EnvConfig) -> RewardConfig | None:
    """Return the option `reward` of an environment; None if it has none."""
    found = getattr(envs.options(config), "reward", None)
    return found if isinstance(found, RewardConfig) else None


def reads_columns(config: EnvConfig) -> bool:
    """Return whether an environment or its reward reads `Task.columns`."""
    scored = (reward := reward_of(config)) and rewards.get(reward.type).score_task
    is_needed = getattr(envs.options(config), "reads_columns", False)
    return is_needed or scored not in (None, Reward.score_task)


def first_tasks(config: ExperimentConfig, part: PartConfig, split: str) -> Iterator[PlacedTask]:
    """Yield the place and the task of the first rows of a part: FIRST_ROWS of a file, or one
    generated row."""
    path = getattr(part, split)
    if path == GENERATED:
        made = islice(generate(part.env, split, config.seed), 1)
        yield from ((f"the first row that {part.env.type} generates", task) for task in made)
    elif path:
        found = read_tasks(path, split, part.columns, keep=reads_columns(part.env))
        yield from islice(found, FIRST_ROWS)


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
    is_scored = getattr(options, "reward_from", "function") == "function"
    check_options = getattr(options, "check_task", bool)
    try:
        for where, task in rows:
            check_options(task)
            try:
                envs.get(kind).check_row(task)
                if scorer and is_scored:
                    await scorer.check_row(task)
            except Exception as error:  # an environment may raise anything
                why = f"environment {kind} cannot read it: {type(error).__name__}: {error}"
                raise UserError(f"{where}: {why}. Correct or remove the row.") from error
    finally:
        if scorer:
            await scorer.close()


def describe(config: ExperimentConfig) -> Iterator[tuple[str, str]]:
    """Yield (heading, text) about the training rows: their form, and the first row as read."""
    for name, part in file_parts(config).items():
        if part.train != GENERATED:
            form = task_form(next(iter(read_rows(part.train, "train")))[1])[0]
            mapped = ", ".join(f"{own}={column}" for own, column in part.columns.items())
            texts = form, mapped and f"dataset.columns: {mapped}"
            yield from (("data", f"{text} {name}".strip()) for text in texts if text)
        for _, task in islice(first_tasks(config, part, "train"), 1):
            truth = task.ground_truth and task.ground_truth[:SHOWN]
            others = f", columns {', '.join(task.columns)}" if task.columns else ""
            yield "example", f"prompt {task.text[:SHOWN]!r}, ground_truth {truth!r}{others}"


def describe_rows(config: ExperimentConfig) -> Iterator[tuple[str, str]]:
    """Yield (heading, text) about the rows of an offline trainer: numbers, and the first's form."""
    train, held_out = read_dataset(config)
    yield "data", f"{len(train)} rows to train, {len(held_out)} held out; {chat_form(train[0][1])}"


def generate(config: EnvConfig, split: str, seed: int) -> Iterator[Task]:
    """Yield the tasks that an environment generates; the iterator may be infinite.

    Raises:
        UserError: the environment generates no tasks, or an invalid task.
    """
    rows = envs.get(config.type).rows(envs.options(config), split=split, seed=seed)
    for index, row in enumerate(rows):
        where = f"row {index} made by environment {config.type}"
        yield make_task(plain_row(row, where), f"{split}-{index}", where)


def shares(weights: dict[str, float], count: int) -> dict[str, int]:
    """Divide `count` by weight into whole numbers with that sum, each off by less than one."""
    total = sum(weights.values())
    ends = dict[str, int]()
    passed = 0.0
    for name, weight in weights.items():
        passed += weight
        ends[name] = round(count * passed / total)
    begins = [0, *ends.values()]
    return {name: end - begin for (name, end), begin in zip(ends.items(), begins, strict=False)}


def _own(config: ExperimentConfig, name: str, part: PartConfig, split: str) -> Iterator[Task]:
    """Yield the tasks of a part. Of several parts, tasks have the part's name, and files repeat."""
    path = getattr(part, split)
    if path == GENERATED:
        tasks = generate(part.env, split, config.seed)
    else:
        found = load_tasks(path or "", split, part.columns, keep=reads_columns(part.env))
        tasks = cycle(found) if name and split == "train" else iter(found)
    for task in tasks:
        yield structs.replace(task, extra_info=task.extra_info | ({"env": name} if name else {}))
