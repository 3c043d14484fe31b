"""The default environment: one question, one answer, one reward.

It is the shortest environment. Copy it to write a new one.
"""

import random
import time
import zlib
from collections.abc import Iterator, Sequence

from arealite.api.agent import Agent
from arealite.api.env import Env
from arealite.api.reward import make_reward
from arealite.api.task import Row, Task
from arealite.api.trial import TrialConfig
from arealite.base.errors import UserError
from arealite.base.registry import unknown
from arealite.ext.math.config import MathEnvConfig
from arealite.ext.math.math_tasks import KINDS, TOP

HELD_OUT = 8
"""One in HELD_OUT questions is left out of the split train and used by all other splits."""


class MathEnv(Env):
    """Scores an agent's answer against the task's ground truth."""

    resumable = True
    prompt_use = "only"

    def __init__(self, args: TrialConfig, config: MathEnvConfig) -> None:
        super().__init__(args, config)
        self.scorer = make_reward(config.reward)

    @classmethod
    def rows(cls, config: MathEnvConfig, *, split: str, seed: int) -> Iterator[Row]:
        """Yield questions of the configured `kinds` and `levels`; `extra_info` holds both.

        Raises:
            UserError: A kind or level is unknown.
        """
        check_choices(
            option="kind of questions",
            configured=config.kinds,
            choices=[*KINDS],
        )
        check_choices(
            option="level of questions",
            configured=config.levels,
            choices=[*TOP],
        )
        is_train = split == "train"
        rng = random.Random(f"math/{split}/{seed}")
        while True:
            kind = rng.choice(config.kinds)
            level = rng.choice(config.levels)
            question, answer = KINDS[kind](rng, level)
            is_held_out = zlib.crc32(question.encode()) % HELD_OUT == 0
            if is_held_out == is_train:
                continue
            yield {
                "prompt": f"{question} {config.instruction}".strip(),
                "ground_truth": str(answer),
                "extra_info": {"data_source": kind, "level": level},
            }

    async def setup(self) -> None:
        """Start the reward function."""
        self.cleanup.push_async_callback(self.scorer.close)
        await self.scorer.begin_setup()

    async def run(self, task: Task, **agents: Agent) -> None:
        """Run the agent for one answer, and set its reward. A truncated answer is scored too.

        Raises:
            EpisodeError: The task has no ground truth, or the answer cannot be scored.
        """
        agent = agents["agent"]
        if self.scorer.needs_truth:
            _ = task.truth  # raises if the row has no ground truth
        action = await agent.act(task.prompt)
        begin = time.perf_counter()
        score = await self.scorer.score_task(action.text, task)
        agent.record.seconds_scoring += time.perf_counter() - begin
        agent.reward(score, **getattr(score, "parts", {}))


def check_choices(option: str, configured: Sequence[object], choices: Sequence[object]) -> None:
    """Check that an option has at least one value, and only values among the choices.

    Raises:
        UserError: There is no value, or a value is no choice.
    """
    for choice in configured or [None]:
        if choice not in choices:
            choice_names = [str(name) for name in choices]
            raise UserError(unknown(option, str(choice), choice_names))
