"""Reverse a text: the smallest tasks with partial credit, in one turn or several.

A model's tokens hold several letters, so long texts are hard even for large models.
"""

import random
import string
from collections.abc import Iterator, Sequence
from itertools import count

from arealite.api.agent import Agent
from arealite.api.env import Env
from arealite.api.game_config import ReverseConfig
from arealite.api.task import Row, Task
from arealite.base.errors import UserError
from arealite.impl.env.prompts import PROMPTS

ASK = PROMPTS["reverse"]


class ReverseEnv(Env):
    """Asks for one text reversed; the reward is the share of letters in the right place."""

    resumable = True

    @classmethod
    def rows(cls, config: ReverseConfig, *, split: str, seed: int) -> Iterator[Row]:
        """Yield words of random letters."""
        rng = random.Random(f"reverse/{split}/{seed}")
        while True:
            yield {"prompt": word(rng, config.length), "extra_info": {"level": config.length}}

    async def run(self, task: Task, **agents: Agent) -> None:
        """Ask for the task's prompt, reversed."""
        await self.ask(agents["agent"], [("reverse", task.text)])

    async def ask(self, agent: Agent, orders: Sequence[tuple[str, ...]]) -> None:
        """Give the orders one after the other; all rewards together are at most 1.

        Args:
            agent: The agent that answers.
            orders: Pairs of an order, a key of ASK, and a text.
        """
        for order, text in orders:
            action = await agent.act(ASK[order] + text)
            wanted = text[::-1] if order == "reverse" else text
            score = similarity(action.text.strip(), wanted.strip())
            value = score if self.config.partial_credit else float(score == 1.0)
            agent.reward(value / len(orders), exact=float(score == 1.0) / len(orders))


class ReverseEchoEnv(ReverseEnv):
    """Asks in each turn for one text, reversed or repeated."""

    @classmethod
    def rows(cls, config: ReverseConfig, *, split: str, seed: int) -> Iterator[Row]:
        """Yield tasks with lines `reverse TEXT` or `echo TEXT`, chosen at random."""
        for number in count():
            rng = random.Random(f"reverse-echo/{split}/{seed}/{number}")
            orders = (rng.choice([*ASK]) for _ in range(config.turns))
            lines = [f"{order} {word(rng, config.length)}" for order in orders]
            yield {"prompt": "\n".join(lines), "extra_info": {"level": config.length}}

    async def run(self, task: Task, **agents: Agent) -> None:
        """Give the orders in the lines of the task's prompt.

        Raises:
            UserError: A line is not an order.
        """
        orders = [line.partition(" ")[::2] for line in task.text.splitlines()]
        if not all(order in ASK and text for order, text in orders):
            hint = "Write lines `reverse TEXT` and `echo TEXT`."
            raise UserError(f"{task.task_id}: a line of `prompt` is not an order. {hint}")
        await self.ask(agents["agent"], orders)


def word(rng: random.Random, length: int) -> str:
    """Return `length` random lower-case letters."""
    return "".join(rng.choices(string.ascii_lowercase, k=length))


def similarity(text: str, wanted: str) -> float:
    """Return the number of letters in the right place, divided by the longer text's length."""
    return sum(a == b for a, b in zip(text, wanted, strict=False)) / max(len(text), len(wanted), 1)
