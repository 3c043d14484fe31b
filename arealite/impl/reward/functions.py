"""The reward `function`: the weighted sum of Python functions, which `paths` names.

A function gets the values that its parameters name:

* `reward(completion, ground_truth)` scores one completion, and returns a number. Other parameters
  are `prompt`, `extra_info`, and the row's columns and keys of `extra_info`.
* `reward(completions, prompts, …)` has TRL's form. Each argument is a list of one value, and the
  result is a list of one number. A completion is a text, or a list of one message if the prompt is
  a chat.

If a function returns None, it does not count for the row. A path may also name a `Reward` class,
which is used in the worker. Functions are called in processes of their own (`process_pool.py`).
"""

import asyncio
import inspect
from typing import Any

from arealite.api.reward import FunctionRewardConfig, Reward, Score
from arealite.api.task import Task
from arealite.base.errors import EpisodeError, UserError
from arealite.base.registry import import_function
from arealite.impl.reward.function_process import OPTION
from arealite.impl.reward.process_pool import ProcessPool

TAKEN = ("self", "value")
"""Names that a part of a reward cannot have: parameters of `Agent.reward`."""


class _RowReward(Reward):
    """A reward that reads the whole row."""

    async def score(self, completion: str, ground_truth: str) -> float | None:
        """Return the reward of a row without other columns."""
        return await self.score_task(completion, Task("", "", ground_truth, {}))


class FunctionReward(_RowReward):
    """Adds the weighted results of functions. Each result is a part with the function's name."""

    needs_truth = False

    def __init__(self, config: FunctionRewardConfig) -> None:
        """Import the functions.

        Raises:
            UserError: A path, a signature or the number of weights is invalid.
        """
        super().__init__(config)
        self.weights = config.weights or [1.0] * len(config.paths)
        if not config.paths or len(self.weights) != len(config.paths):
            what = f"{OPTION}={config.paths} with reward.function.weights={config.weights}"
            raise UserError(f"{what}: name functions, and one weight for each function or none.")
        self.parts = dict[str, Reward]()
        for path in config.paths:
            name = path.rpartition(":")[2]
            while name in (*TAKEN, *self.parts):
                name += "_"
            self.parts[name] = make_part(path)
        functions = [part for part in self.parts.values() if isinstance(part, _Function)]
        pool = ProcessPool({part.path: part.is_batched for part in functions}, config)
        self.pool = pool if functions else None
        for part in functions:
            part.pool = pool

    async def setup(self) -> None:
        """Start the processes of the functions, and set up the `Reward` classes."""
        if self.pool is not None:
            await self.pool.start()
        await asyncio.gather(*(part.setup() for part in self.parts.values()))

    async def score_task(self, completion: str, task: Task) -> float | None:
        """Return the weighted sum; its parts are the results without weights.

        Each part gets its own copy of the row.

        Returns:
            None if no function with a weight other than 0 has scored the completion.

        Raises:
            EpisodeError: A function failed.
        """
        parts_scores = [
            # Sending a row to a process copies it.
            part.score_task(completion, task if isinstance(part, _Function) else task.copy())
            for part in self.parts.values()
        ]
        values = await asyncio.gather(*parts_scores)
        weighted = list[float]()
        parts = dict[str, float]()
        for name, weight, value in zip(self.parts, self.weights, values, strict=True):
            if value is None:
                continue
            if weight:
                weighted.append(weight * value)
            parts |= getattr(value, "parts", {})
            parts[name] = float(value)
        return Score(sum(weighted), **parts) if weighted else None

    async def check_row(self, task: Task) -> None:
        """Check that each function gets its arguments from this row.

        Raises:
            EpisodeError: The row lacks an argument.
        """
        await asyncio.gather(*(part.check_row(task) for part in self.parts.values()))

    async def close(self) -> None:
        """Stop the `Reward` classes and the processes. Does not wait for running functions."""
        await asyncio.gather(*(part.close() for part in self.parts.values()))
        if self.pool is not None:
            await self.pool.close()


def make_part(path: str) -> Reward:
    """Import the function or `Reward` class that a path names.

    Raises:
        UserError: The path or the signature is invalid.
    """
    target = import_function(path, f"{OPTION}={path}")
    if isinstance(target, type) and issubclass(target, Reward):
        return target(None)
    return _Function(path, target)


class _Function(_RowReward):
    """One function, which `pool` calls."""

    pool: ProcessPool

    def __init__(self, path: str, target: Any) -> None:
        super().__init__(None)
        self.path = path
        try:
            self.signature = inspect.signature(target)
        except (TypeError, ValueError) as error:
            raise UserError(f"{OPTION}={path} has no signature. Write a def around it.") from error
        kinds = {each.name: each.kind for each in self.signature.parameters.values()}
        self.takes_all = inspect.Parameter.VAR_KEYWORD in kinds.values()
        self.is_batched = "completions" in kinds
        is_named = self.takes_all or {*kinds} & {"completion", "completions", "solution_str"}
        if not is_named or inspect.Parameter.POSITIONAL_ONLY in kinds.values():
            what = f"{OPTION}={path}: its parameters are ({', '.join(kinds)}), and none is named"
            fix = "Write def f(completion, ground_truth), or TRL's def f(completions, **columns)."
            raise UserError(f"{what} `completion`. {fix}")

    def arguments(self, completion: str, task: Task) -> dict[str, Any]:
        """Return the arguments of a call by name."""
        info = task.extra_info
        truth = task.ground_truth
        row = {**info, **task.columns, "prompt": task.prompt, "extra_info": info}
        row |= {} if truth is None else {"ground_truth": truth}
        if self.is_batched:
            is_text = isinstance(task.prompt, str)
            said = completion if is_text else [{"role": "assistant", "content": completion}]
            row |= {"prompts": task.prompt, "completions": said}
            row = {name: [value] for name, value in row.items()}
        else:
            row |= {"completion": completion, "solution_str": completion}
        known = row if self.takes_all else self.signature.parameters
        return {name: value for name, value in row.items() if name in known}

    async def check_row(self, task: Task) -> None:
        """Check that the row has all arguments without a default."""
        try:
            self.signature.bind(**self.arguments("", task))
        except TypeError as error:
            has = ["ground_truth"] * (task.ground_truth is not None)
            has = ", ".join([*has, *task.columns, *task.extra_info]) or "none"
            what = f"reward function {self.path}: {error}. The row has the columns {has}. Give the"
            fix = "parameter a default, or name its column: dataset.columns.PARAMETER=COLUMN"
            raise EpisodeError(f"{what} {fix}") from error

    async def score_task(self, completion: str, task: Task) -> float | None:
        """Return the number of the function in one of the processes; None if it returned None.

        Raises:
            EpisodeError: The function raised one, takes too long, or ended its process.
            FunctionFailed: The function raised another exception, or returned no number.
        """
        answer = await self.pool.call(self.path, self.arguments(completion, task))
        return None if answer.value is None else Score(answer.value, **answer.parts)
