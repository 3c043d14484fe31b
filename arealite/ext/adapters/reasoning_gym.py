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

from arealite.api.agent import Agent
from arealite.api.env import Env
from arealite.api.task import Row, Task
from arealite.base.errors import EpisodeError, UserError
from arealite.base.extras import extra_requirement, import_optional
from arealite.base.files import read_toml
from arealite.ext.adapters.blocking import Threads
from arealite.ext.adapters.config import ReasoningGymConfig
from arealite.ext.adapters.foreign import constructing

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

    prompt_use = "only"

    @classmethod
    def rows(cls, config: ReasoningGymConfig, *, split: str, seed: int) -> Iterator[Row]:
        """Yield questions of the dataset, without end."""
        options = check(config)
        tag = config.answer_tag
        ask = f"\nGive the final answer as <{tag}>…</{tag}>." if tag else ""
        for block in count():
            # Entry i of seed s is entry i - 1 of seed s + 1, so close seeds share entries.
            rng = Random(f"{split}/{seed}/{block}")
            block_seed = rng.getrandbits(32)
            for number in range(PER_SEED):
                entry = entry_of(config.dataset, options, block_seed, number)
                extra_info = {
                    "data_source": config.dataset,
                    "seed": block_seed,
                    "number": number,
                }
                yield {
                    "prompt": entry["question"] + ask,
                    "ground_truth": entry["answer"],
                    "extra_info": extra_info,
                }

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
        answer = self.answer(action.text)
        score = await self._threads.call(self.score, task, answer)
        agent.record.seconds_scoring += time.perf_counter() - begin
        agent.reward(score)

    def answer(self, completion: str) -> str | None:
        """Return the answer to score, from the agent's text; None if there is none."""
        answer = completion
        tag = re.escape(self.config.answer_tag)
        if tag:
            pattern = rf"<{tag}>((?:(?!<{tag}>).)*?)</{tag}>"
            tagged = re.findall(pattern, completion, re.DOTALL)
            answer = tagged[-1].strip() if tagged else ""
        if not answer or BOMB.fullmatch(answer):
            return None
        is_evaluated = self.config.dataset in ARITHMETIC
        if is_evaluated and not PLAIN.fullmatch(answer):
            return None
        return answer

    def score(self, task: Task, answer: str | None) -> float:
        """Score an answer, from 0 to 1. This call blocks.

        Raises:
            UserError: The row is not one of this dataset.
            ScorerFailed: The answer could not be scored.
        """
        seed = task.extra_info.get("seed")
        number = task.extra_info.get("number")
        if not isinstance(seed, int) or not isinstance(number, int):
            raise UserError(
                f"{task.task_id}: env.type=reasoning_gym needs rows "
                "with extra_info.seed and .number. "
                "Set dataset.train=generated."
            )
        name = self.config.dataset
        try:
            entry = entry_of(name, self._options, seed, number)
            scorer = dataset(name, self._options, seed)
            score = float(scorer.score_answer(answer, entry))
        except Exception as error:
            raise ScorerFailed(f"the scorer of {name} raised {error!r} on {answer!r}") from error
        if not task.text.startswith(entry["question"]):
            raise ScorerFailed(f"{task.task_id}: the row's seed gives another question here")
        if not math.isfinite(score) or not 0.0 <= score <= 1.0:
            raise ScorerFailed(f"the scorer of {name} gave {score} to {answer!r}")
        return score


def check(config: ReasoningGymConfig) -> str:
    """Check the dataset; return its options as JSON.

    Raises:
        UserError: The dataset is unknown, its options are invalid, or it has a known fault.
    """
    name = config.dataset
    options = msgspec.json.encode(config.options).decode()
    if name in FLAWED and not config.any_scorer:
        raise UserError(
            f"reasoning_gym.dataset={name} {FLAWED[name]}. Choose another dataset. "
            "Or set any_scorer=true, "
            "if wrong rewards and running the model's programs do no harm."
        )
    import_optional("reasoning_gym", extra_requirement("envs"))
    subject = f"reasoning_gym.dataset={name} with {options}"
    with constructing(subject, "dataset or options"):
        entry_of(name, options, 0, 0)
    return options


@lru_cache(maxsize=64)
def dataset(name: str, options: str, seed: int) -> Any:
    """Create a dataset."""
    package = import_optional("reasoning_gym", extra_requirement("envs"))
    arguments = {"size": PER_SEED, **msgspec.json.decode(options), "seed": seed}
    return package.create_dataset(name, **arguments)


@lru_cache(maxsize=4096)
def entry_of(name: str, options: str, seed: int, number: int) -> dict[str, Any]:
    """Return one entry: a dict with question, answer and metadata."""
    return dataset(name, options, seed)[number]
