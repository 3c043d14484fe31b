"""Adapter of reasoning-gym's procedural datasets, scored by the datasets' own scorers.

A row holds the seed and the number of its entry, and the entry is generated again for scoring.
Scorers need Python objects that JSON would change: after a round trip through JSON, arc_agi and
rearc score their own answer 0.05.
"""

import math
import re
import time
from collections.abc import Iterator
from functools import lru_cache
from itertools import count
from random import Random
from typing import Any

import msgspec

from arealite.api.adapter_config import ReasoningGymConfig
from arealite.api.agent import Agent
from arealite.api.env import Env
from arealite.api.task import Row, Task
from arealite.base.data import read_toml
from arealite.base.errors import EpisodeError, UserError
from arealite.base.extras import extra_requirement, import_optional
from arealite.impl.env.adapters.blocking import Threads
from arealite.impl.env.adapters.foreign import constructing

FLAWED: dict[str, str] = read_toml(__file__, "reasoning_gym.toml")
"""Datasets with a fault of their own or of their scorer (reasoning-gym 0.1.25)."""
ARITHMETIC = ("coin_flip", "countdown", "puzzle24")
"""Datasets whose scorer evaluates answers as Python. Only answers that match PLAIN are scored."""
PLAIN = re.compile(r"(?!.*\*\s*\*)[\d+\-*/(). ]{1,200}")
BOMB = re.compile(r"\s*[-+]?[\d.]+[eE][-+]?\d{4,}\s*")
"""A number with an exponent so large that its digits would fill the memory."""
PER_SEED = 500
"""Number of rows with the same seed; the following rows have another seed."""


class ScorerFailed(EpisodeError, failure_class="scorer_failed"):
    """The scorer raised an exception or gave an invalid score, or the row's question differs."""


class ReasoningGymEnv(Env):
    """One question and one answer, scored from 0 to 1."""

    @classmethod
    def rows(cls, config: ReasoningGymConfig, *, split: str, seed: int) -> Iterator[Row]:
        """Yield questions of the dataset, without end."""
        options = check(config)
        tag = config.answer_tag
        ask = f"\nGive the final answer as <{tag}>…</{tag}>." if tag else ""
        for block in count():
            # Entry i of seed s is entry i - 1 of seed s + 1, so close seeds share entries.
            own = Random(f"{split}/{seed}/{block}").getrandbits(32)
            for number in range(PER_SEED):
                entry = entry_of(config.dataset, options, own, number)
                extra_info = {"data_source": config.dataset, "seed": own, "number": number}
                prompt = entry["question"] + ask
                yield {"prompt": prompt, "ground_truth": entry["answer"], "extra_info": extra_info}

    async def setup(self) -> None:
        """Import the package, which takes a second, and check the dataset."""
        self._threads = Threads(1)  # datasets are not thread-safe: they hold their random state
        self._options = await self._threads.call(check, self.config)

    async def run(self, task: Task, **agents: Agent) -> None:
        """Run the agent for one answer, and set the score as its reward.

        Raises:
            ScorerFailed: The answer could not be scored.
        """
        agent = agents["agent"]
        action = await agent.act(task.prompt)
        begin = time.perf_counter()
        score = await self._threads.call(self.score, task, self.answer(action.text))
        agent.record.seconds_scoring += time.perf_counter() - begin
        agent.reward(score)

    def answer(self, text: str) -> str | None:
        """Return the answer to score, from the agent's text; None if there is none."""
        tag = re.escape(self.config.answer_tag)
        name = self.config.dataset
        if tag:
            found = re.findall(rf"<{tag}>((?:(?!<{tag}>).)*?)</{tag}>", text, re.DOTALL)
            text = found[-1].strip() if found else ""
        allowed = name not in ARITHMETIC or PLAIN.fullmatch(text)
        return text if text and allowed and not BOMB.fullmatch(text) else None

    def score(self, task: Task, answer: str | None) -> float:
        """Score an answer, from 0 to 1. This call blocks.

        Raises:
            UserError: The row is not one of this dataset.
            ScorerFailed: The answer could not be scored.
        """
        seed = task.extra_info.get("seed")
        number = task.extra_info.get("number")
        if not isinstance(seed, int) or not isinstance(number, int):
            what = f"{task.task_id}: env.type=reasoning_gym needs rows with extra_info.seed and"
            raise UserError(f"{what} .number. Set dataset.train=generated.")
        name = self.config.dataset
        try:
            entry = entry_of(name, self._options, seed, number)
            value = float(dataset(name, self._options, seed).score_answer(answer, entry))
        except Exception as error:
            raise ScorerFailed(f"the scorer of {name} raised {error!r} on {answer!r}") from error
        if not task.text.startswith(entry["question"]):
            raise ScorerFailed(f"{task.task_id}: the row's seed gives another question here")
        if not math.isfinite(value) or not 0.0 <= value <= 1.0:
            raise ScorerFailed(f"the scorer of {name} gave {value} to {answer!r}")
        return value


def check(config: ReasoningGymConfig) -> str:
    """Check the dataset; return its options as JSON.

    Raises:
        UserError: The dataset is unknown, its options are invalid, or it has a known fault.
    """
    name = config.dataset
    options = msgspec.json.encode(config.options).decode()
    if name in FLAWED and not config.any_scorer:
        what = f"reasoning_gym.dataset={name} {FLAWED[name]}. Choose another dataset"
        fix = "set any_scorer=true, if wrong rewards and running the model's programs do no harm"
        raise UserError(f"{what}. Or {fix}.")
    import_optional("reasoning_gym", extra_requirement("envs"))
    with constructing(f"reasoning_gym.dataset={name} with {options}", "dataset or options"):
        entry_of(name, options, 0, 0)
    return options


@lru_cache(maxsize=64)
def dataset(name: str, options: str, seed: int) -> Any:
    """Create a dataset."""
    own = {"size": PER_SEED, **msgspec.json.decode(options), "seed": seed}
    return import_optional("reasoning_gym", extra_requirement("envs")).create_dataset(name, **own)


@lru_cache(maxsize=4096)
def entry_of(name: str, options: str, seed: int, number: int) -> dict[str, Any]:
    """Return one entry: a dict with question, answer and metadata."""
    return dataset(name, options, seed)[number]
