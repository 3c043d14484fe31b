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
from collections.abc import Coroutine
from typing import Any

from arealite.api.reward import Reward, Score
from arealite.api.task import Task
from arealite.base.errors import EpisodeError, UserError
from arealite.ext.rewards.config import FunctionRewardConfig
from arealite.ext.rewards.function_process import OPTION
from arealite.ext.rewards.process_pool import ProcessPool
from arealite.ext.rewards.user_functions import import_function

RESERVED_NAMES = ("self", "value")
"""Names that a part of a reward cannot have: parameters of `Agent.reward`."""
COMPLETION_NAMES = {"completion", "completions", "solution_str"}
"""Parameters that get the completion; a function needs one of them, or `**columns`."""


class _RowReward(Reward):
    """A reward that reads the whole row."""

    async def score(self, completion: str, ground_truth: str) -> float | None:
        """Return the reward of a row without other columns."""
        return await self.score_task(
            completion, Task(task_id="", prompt="", ground_truth=ground_truth, extra_info={})
        )


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
            raise UserError(
                f"{OPTION}={config.paths} with reward.function.weights={config.weights}: "
                "name functions, and one weight for each function or none."
            )
        self.parts = dict[str, Reward]()
        for path in config.paths:
            _, _, name = path.rpartition(":")
            while name in (*RESERVED_NAMES, *self.parts):
                name += "_"
            self.parts[name] = make_part(path)
        self.pool: ProcessPool | None = None
        functions = [part for part in self.parts.values() if isinstance(part, _Function)]
        if functions:
            is_batched_by_path = {function.path: function.is_batched for function in functions}
            self.pool = ProcessPool(is_batched_by_path, config)
            for function in functions:
                function.pool = self.pool

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
        calls = list[Coroutine[Any, Any, float | None]]()
        for part in self.parts.values():
            # Sending a row to a process copies it.
            task_of_part = task if isinstance(part, _Function) else task.copy()
            calls.append(part.score_task(completion, task_of_part))
        scores = await asyncio.gather(*calls)
        weighted_scores = list[float]()
        parts = dict[str, float]()
        for name, weight, score in zip(self.parts, self.weights, scores, strict=True):
            if score is None:
                continue
            if weight:
                weighted_scores.append(weight * score)
            parts |= getattr(score, "parts", {})
            parts[name] = float(score)
        return Score(sum(weighted_scores), **parts) if weighted_scores else None

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
        parameters = self.signature.parameters
        kinds = [parameter.kind for parameter in parameters.values()]
        self.takes_all = inspect.Parameter.VAR_KEYWORD in kinds
        self.is_batched = "completions" in parameters
        gets_completion = self.takes_all or not COMPLETION_NAMES.isdisjoint(parameters)
        if not gets_completion or inspect.Parameter.POSITIONAL_ONLY in kinds:
            raise UserError(
                f"{OPTION}={path}: its parameters are ({', '.join(parameters)}), "
                "and none is named `completion`. "
                "Write def f(completion, ground_truth), or TRL's def f(completions, **columns)."
            )

    def arguments(self, completion: str, task: Task) -> dict[str, Any]:
        """Return the arguments of a call by name."""
        row = {
            **task.extra_info,
            **task.columns,
            "prompt": task.prompt,
            "extra_info": task.extra_info,
        }
        if task.ground_truth is not None:
            row["ground_truth"] = task.ground_truth
        if self.is_batched:
            row["prompts"] = task.prompt
            if isinstance(task.prompt, str):
                row["completions"] = completion
            else:
                row["completions"] = [{"role": "assistant", "content": completion}]
            row = {name: [argument] for name, argument in row.items()}
        else:
            row["completion"] = completion
            row["solution_str"] = completion
        if self.takes_all:
            return row
        return {name: row[name] for name in row if name in self.signature.parameters}

    async def check_row(self, task: Task) -> None:
        """Check that the row has all arguments without a default."""
        try:
            self.signature.bind(**self.arguments("", task))
        except TypeError as error:
            columns = [*task.columns, *task.extra_info]
            if task.ground_truth is not None:
                columns.insert(0, "ground_truth")
            raise EpisodeError(
                f"reward function {self.path}: {error}. "
                f"The row has the columns {', '.join(columns) or 'none'}. "
                "Give the parameter a default, "
                "or name its column: dataset.columns.PARAMETER=COLUMN"
            ) from error

    async def score_task(self, completion: str, task: Task) -> float | None:
        """Return the number of the function in one of the processes; None if it returned None.

        Raises:
            EpisodeError: The function raised one, takes too long, or ended its process.
            FunctionFailed: The function raised another exception, or returned no number.
        """
        answer = await self.pool.call(self.path, self.arguments(completion, task))
        return None if answer.value is None else Score(answer.value, **answer.parts)
