"""Environment: the procedural datasets of reasoning-gym, by name, scored by their own scorers.

A row names its entry (seed and number), which is made again to be scored: scorers need Python
objects that JSON would change (arc_agi and rearc give their own answer 0.05 after a round trip).
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator
from functools import lru_cache
from itertools import count
from random import Random
from typing import Any

import msgspec

from arealite.api.agent import Agent
from arealite.api.env import Env
from arealite.api.task import Task
from arealite.base.errors import EpisodeError, UserError
from arealite.base.extras import extra_requirement, import_optional
from arealite.impl.env.adapters.blocking import Threads

FLAWED = {
    "game_of_life_halting": "gives any answer 1.0",
    "list_functions": "is not the same for the same seed",
    "prime_factorization": "raises on what is no number",
    "composite": "hides which datasets it has; use collector.envs",
    **dict.fromkeys(
        (
            *("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"),
            *("intermediate_integration", "polynomial_multiplication", "simple_integration"),
        ),
        "runs answers as Python programs",
    ),
}
"""What is wrong with a dataset or its scorer (reasoning-gym 0.1.25)."""
ARITHMETIC = ("coin_flip", "countdown", "puzzle24")
"""Scorers that run an answer as Python, or expand it, and need no more than these characters."""
PLAIN = re.compile(r"(?!.*\*\s*\*)[\d+\-*/(). ]{1,200}")
BOMB = re.compile(r"\s*[-+]?[\d.]+[eE][-+]?\d{4,}\s*")
"""A number with more digits than memory has bytes."""
PER_SEED = 500
"""Entries of one dataset; the next rows are of the next seed."""


class ScorerFailed(EpisodeError):
    """The dataset's own scorer raised, gave no score, or was asked about another question."""

    failure_class = "scorer_failed"


class ReasoningGymEnv(Env):
    """One question, one answer, scored between 0 and 1."""

    @classmethod
    def rows(cls, config: Any, *, split: str, seed: int) -> Iterator[dict[str, Any]]:
        """Yield the dataset's questions."""
        options = check(config)
        tag = config.answer_tag
        ask = f"\nGive the final answer as <{tag}>…</{tag}>." if tag else ""
        for block in count():
            # Entry i of seed s is entry i - 1 of seed s + 1: splits need seeds far from each other.
            own = Random(f"{split}/{seed}/{block}").getrandbits(32)
            for number in range(PER_SEED):
                entry = entry_of(config.dataset, options, own, number)
                about = {"data_source": config.dataset, "seed": own, "number": number}
                prompt = entry["question"] + ask
                yield {"prompt": prompt, "ground_truth": entry["answer"], "extra_info": about}

    async def setup(self) -> None:
        """Import the package, which takes a second, and check the dataset."""
        self._threads = Threads(1)  # datasets keep what they draw from in themselves
        self._options = await self._threads.call(check, self.config)

    async def run(self, task: Task, **agents: Agent) -> None:
        """Let the agent answer, and reward it.

        Raises:
            ScorerFailed: see there.
        """
        agent = agents["agent"]
        action = await agent.act(task.prompt)
        begin = time.perf_counter()
        score = await self._threads.call(self.score, task, self.answer(action.text))
        agent.record.seconds_scoring += time.perf_counter() - begin
        agent.reward(score)

    def answer(self, text: str) -> str | None:
        """Return what is to be scored; None: no answer."""
        tag, name = re.escape(self.config.answer_tag), self.config.dataset
        if tag:
            found = re.findall(rf"<{tag}>((?:(?!<{tag}>).)*?)</{tag}>", text, re.DOTALL)
            text = found[-1].strip() if found else ""
        allowed = name not in ARITHMETIC or PLAIN.fullmatch(text)
        return text if text and allowed and not BOMB.fullmatch(text) else None

    def score(self, task: Task, answer: str | None) -> float:
        """Return the score of an answer to a row of this dataset. Blocks."""
        seed, number = task.extra_info.get("seed"), task.extra_info.get("number")
        if not isinstance(seed, int) or not isinstance(number, int):
            raise UserError(f"{task.task_id}: reasoning_gym needs rows of its own: `generated`.")
        try:
            entry = entry_of(self.config.dataset, self._options, seed, number)
            if not task.text.startswith(entry["question"]):
                raise ScorerFailed(f"{task.task_id}: its seed gives another question here")
            score = dataset(self.config.dataset, self._options, seed).score_answer(answer, entry)
            value = float(score)
        except ScorerFailed:
            raise
        except Exception as error:
            name = self.config.dataset
            raise ScorerFailed(f"the scorer of {name} raised {error!r} on {answer!r}") from error
        if not math.isfinite(value) or not 0.0 <= value <= 1.0:
            raise ScorerFailed(f"the scorer of {self.config.dataset} gave {value} to {answer!r}")
        return value


def check(config: Any) -> str:
    """Return the dataset's options as JSON.

    Raises:
        UserError: there is no such dataset, its options are wrong, or its scorer is flawed.
    """
    name, options = config.dataset, msgspec.json.encode(config.options).decode()
    if name in FLAWED and not config.any_scorer:
        raise UserError(
            f"reasoning_gym.dataset={name} {FLAWED[name]}. Choose another, or set any_scorer=true "
            "where a wrong reward, or programs that the model writes, do no harm."
        )
    import_optional("reasoning_gym", extra_requirement("envs"))
    try:
        entry_of(name, options, 0, 0)
    except Exception as error:
        raise UserError(f"reasoning_gym.dataset={name} with {options}: {error}") from error
    return options


@lru_cache(maxsize=64)
def dataset(name: str, options: str, seed: int) -> Any:
    """Make a dataset."""
    own = {"size": PER_SEED, **msgspec.json.decode(options), "seed": seed}
    return import_optional("reasoning_gym", extra_requirement("envs")).create_dataset(name, **own)


@lru_cache(maxsize=4096)
def entry_of(name: str, options: str, seed: int, number: int) -> dict[str, Any]:
    """Make one entry: question, answer, metadata."""
    return dataset(name, options, seed)[number]
