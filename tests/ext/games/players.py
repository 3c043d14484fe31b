"""Agents with scripted answers, for tests of environments without a collector."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from arealite.api.agent import Agent
from arealite.api.env import Env, EnvConfig, make_env
from arealite.api.episode import Action, Seat
from arealite.api.observation import Observation, observe
from arealite.api.task import Task
from arealite.api.trial import TrialConfig
from arealite.api.turns import Turn
from tests.fakes.client import response


class Player(Agent):
    """Gives the listed answers in order; an answer may be a function of the observation."""

    def __init__(self, answers: Iterable[str] | Callable[[Observation], str]) -> None:
        super().__init__(None, client=None, tokenizer=None, seat=Seat())  # pyright: ignore
        self._answers = None if callable(answers) else iter(answers)
        self._solve = answers
        self.seen: list[Observation] = []

    async def act(self, observation: Any) -> Action:
        """Answer, and record a turn of one token."""
        self.seen.append(observe(observation))
        self.record.turns.append(Turn(response=response([2]), temperature=1.0))
        text = self._solve(self.seen[-1]) if self._answers is None else next(self._answers)
        return Action(text)

    @property
    def rewards(self) -> list[float]:
        """The reward of each turn."""
        return [turn.reward for turn in self.record.turns]

    @property
    def parts(self) -> dict[str, float]:
        """The parts of the reward by name."""
        return self.record.reward_parts


def make(kind: str, **options: Any) -> Env:
    """Return an environment with these options."""
    config = EnvConfig(type=kind)
    own = type(getattr(config, kind))(**options)
    return make_env(TrialConfig(), EnvConfig(type=kind, **{kind: own}))


def first_rows(env: Env, count: int, *, split: str = "train", seed: int = 1) -> list[Any]:
    """Return the first generated rows of an environment."""
    rows = env.rows(env.config, split=split, seed=seed)
    return [next(rows) for _ in range(count)]


def task(prompt: Any = "play", **extra: Any) -> Task:
    """Return a task with this `extra_info`."""
    return Task(task_id="train-0", prompt=prompt, ground_truth=None, extra_info=extra)
