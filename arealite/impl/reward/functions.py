"""The reward `function`: the weighted sum of Python functions, which `paths` names.

A function gets the values that its parameters name:

* `reward(completion, ground_truth)` scores one completion, and returns a number. Other parameters
  are `prompt`, `extra_info`, and the row's columns and keys of `extra_info`.
* `reward(completions, prompts, …)` has TRL's form. Each argument is a list of one value, and the
  result is a list of one number. A completion is a text, or a list of one message if the prompt is
  a chat.

A path may also name a `Reward` class. If a function returns None, it does not count for the row.
"""

import asyncio
import inspect
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from traceback import extract_tb
from typing import Any, SupportsFloat

from arealite.api.reward import FunctionRewardConfig, Reward, Score
from arealite.api.task import Task
from arealite.base.errors import EpisodeError, UserError
from arealite.base.registry import import_function
from arealite.impl.env.adapters.blocking import outcome

THREADS = 16
"""Concurrent calls of functions that are not async, in one worker."""
OPTION = "reward.function.paths"
TAKEN = ("self", "value")
"""Names that a part of a reward cannot have: parameters of `Agent.reward`."""


class FunctionFailed(EpisodeError, failure_class="reward_function"):
    """A reward function raised an exception or returned no number. There is no reward."""


class _RowReward(Reward):
    """A reward that reads the whole row."""

    async def score(self, completion: str, ground_truth: str) -> float:
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
        self.threads = ThreadPoolExecutor(THREADS, thread_name_prefix="reward")
        self.parts = dict[str, Reward]()
        for path in config.paths:
            name = path.rpartition(":")[2]
            while name in (*TAKEN, *self.parts):
                name += "_"
            self.parts[name] = make_part(path, self.threads)

    async def setup(self) -> None:
        """Set up the `Reward` classes."""
        await asyncio.gather(*(part.setup() for part in self.parts.values()))

    async def score_task(self, completion: str, task: Task) -> float:
        """Return the weighted sum; its parts are the results without weights.

        Raises:
            FunctionFailed: A function failed.
        """
        every = [part.score_task(completion, task) for part in self.parts.values()]
        values = await asyncio.gather(*every)
        score = Score(sum(w * v for w, v in zip(self.weights, values, strict=True)))
        for name, value in zip(self.parts, values, strict=True):
            own = {} if value is NO_OPINION else {name: float(value)}
            score.parts |= getattr(value, "parts", {}) | own
        return score

    async def check_row(self, task: Task) -> None:
        """Check that each function gets its arguments from this row.

        Raises:
            EpisodeError: The row lacks an argument.
        """
        await asyncio.gather(*(part.check_row(task) for part in self.parts.values()))

    async def close(self) -> None:
        """Stop the `Reward` classes. Does not wait for running functions."""
        await asyncio.gather(*(part.close() for part in self.parts.values()))
        self.threads.shutdown(wait=False, cancel_futures=True)


NO_OPINION = Score(0.0)
"""The result of a function that returned None."""


def make_part(path: str, threads: ThreadPoolExecutor) -> Reward:
    """Import the function or `Reward` class that a path names.

    Raises:
        UserError: The path or the signature is invalid.
    """
    target = import_function(path, f"{OPTION}={path}")
    if isinstance(target, type) and issubclass(target, Reward):
        return target(None)
    return _Function(path, target, threads)


class _Function(_RowReward):
    """One function."""

    def __init__(self, path: str, target: Any, threads: ThreadPoolExecutor) -> None:
        super().__init__(None)
        self.path, self.target, self.threads = path, target, threads
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
        info, truth = task.extra_info, task.ground_truth
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

    async def score_task(self, completion: str, task: Task) -> float:
        """Call the function in a thread, and return its number.

        Raises:
            FunctionFailed: The function raised an exception, or returned no number.
        """
        call = partial(self.target, **self.arguments(completion, task))
        loop = asyncio.get_running_loop()
        value, error = await loop.run_in_executor(self.threads, outcome, call)
        try:
            if error is not None:
                raise error
            value = await value if inspect.isawaitable(value) else value
        except EpisodeError:
            raise
        except (Exception, SystemExit) as error:
            frame = extract_tb(error.__traceback__)[-1]
            what = f"raised {type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
            raise FunctionFailed(f"reward function {self.path} {what}") from error
        value = value.tolist() if hasattr(value, "tolist") else value  # numpy and torch
        match value if self.is_batched else [value]:
            case [None]:
                return NO_OPINION
            case [SupportsFloat() as number]:
                return number if isinstance(number, float) else float(number)
        wanted = "a list with one number per completion" if self.is_batched else "a number or None"
        what = f"returned {value!r:.60}, and must return {wanted}"
        raise FunctionFailed(f"reward function {self.path} {what}")
