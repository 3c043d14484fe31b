"""Reverse a text: the smallest tasks with partial credit, in one turn or several.

A model's tokens hold several letters, so long texts are hard even for large models.
"""

import random
import string
from collections.abc import Iterator, Sequence
from itertools import count

from arealite.api.agent import Agent
from arealite.api.env import Env
from arealite.api.task import Row, Task
from arealite.base.errors import UserError
from arealite.ext.games.config import ReverseConfig
from arealite.ext.games.prompt_texts import PROMPTS

ASK = PROMPTS["reverse"]


class ReverseEnv(Env):
    """Asks for one text reversed; the reward is the share of letters in the right place."""

    resumable = True

    @classmethod
    def rows(
        cls,
        config: ReverseConfig,
        *,
        split: str,
        seed: int,
    ) -> Iterator[Row]:
        """Yield words of random letters."""
        rng = random.Random(f"reverse/{split}/{seed}")
        while True:
            yield {
                "prompt": word(rng, config.length),
                "extra_info": {"level": config.length},
            }

    async def run(self, task: Task, **agents: Agent) -> None:
        """Ask for the task's prompt, reversed."""
        orders = [("reverse", task.text)]
        await self.ask(agents["agent"], orders)

    async def ask(self, agent: Agent, orders: Sequence[tuple[str, ...]]) -> None:
        """Give the orders one after the other; all rewards together are at most 1.

        Args:
            agent: The agent that answers.
            orders: Pairs of an order, a key of ASK, and a text.
        """
        num_orders = len(orders)
        for order, source in orders:
            action = await agent.act(ASK[order] + source)
            wanted = source
            if order == "reverse":
                wanted = source[::-1]
            answer = action.text.strip()
            score = similarity(answer, wanted.strip())
            exact = float(score == 1.0)
            credit = score if self.config.partial_credit else exact
            agent.reward(credit / num_orders, exact=exact / num_orders)


class ReverseEchoEnv(ReverseEnv):
    """Asks in each turn for one text, reversed or repeated."""

    @classmethod
    def rows(
        cls,
        config: ReverseConfig,
        *,
        split: str,
        seed: int,
    ) -> Iterator[Row]:
        """Yield tasks with lines `reverse TEXT` or `echo TEXT`, chosen at random."""
        for number in count():
            rng = random.Random(f"reverse-echo/{split}/{seed}/{number}")
            lines: list[str] = []
            for _ in range(config.turns):
                order = rng.choice([*ASK])
                source = word(rng, config.length)
                lines.append(f"{order} {source}")
            yield {
                "prompt": "\n".join(lines),
                "extra_info": {"level": config.length},
            }

    async def run(self, task: Task, **agents: Agent) -> None:
        """Give the orders in the lines of the task's prompt.

        Raises:
            UserError: A line is not an order.
        """
        orders: list[tuple[str, str]] = []
        for line in task.text.splitlines():
            order, _, source = line.partition(" ")
            if order not in ASK or not source:
                raise UserError(
                    f"{task.task_id}: a line of `prompt` is not an order. "
                    "Write lines `reverse TEXT` and `echo TEXT`."
                )
            orders.append((order, source))
        await self.ask(agents["agent"], orders)


def word(rng: random.Random, length: int) -> str:
    """Return `length` random lower-case letters."""
    letters = rng.choices(string.ascii_lowercase, k=length)
    return "".join(letters)


def similarity(answer: str, wanted: str) -> float:
    """Return the number of letters in the right place, divided by the longer text's length."""
    num_right = 0
    for letter, wanted_letter in zip(answer, wanted, strict=False):
        if letter == wanted_letter:
            num_right += 1
    longer = max(len(answer), len(wanted), 1)
    return num_right / longer
