"""Texts to be written backwards: the smallest tasks with partial credit, in one turn or several.

Letters are where a language model's tokens are coarse, so even this is hard at some length.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from arealite.api.agent import Agent
from arealite.api.env import Env
from arealite.api.task import Task
from arealite.base.errors import UserError

ASK = {
    "reverse": "Write this backwards, letter by letter, and nothing else: ",
    "echo": "Repeat this, and nothing else: ",
}


class ReverseEnv(Env):
    """One text, to be written backwards; the reward is the share of letters in their place."""

    resumable = True

    @classmethod
    def rows(cls, config: Any, *, split: str, seed: int) -> Iterator[dict[str, Any]]:
        """Yield words of random letters."""
        dice = random.Random(f"reverse/{split}/{seed}")
        while True:
            yield {"prompt": word(dice, config.length), "extra_info": {"level": config.length}}

    async def run(self, task: Task, **agents: Agent) -> None:
        """Ask for the task's prompt backwards."""
        await self.ask(agents["agent"], [("reverse", task.text)])

    async def ask(self, agent: Agent, orders: Sequence[tuple[str, ...]]) -> None:
        """Give one order after the other; each answer is rewarded with its part of 1."""
        for order, text in orders:
            action = await agent.act(ASK[order] + text)
            wanted = text[::-1] if order == "reverse" else text
            score = similarity(action.text.strip(), wanted.strip())
            value = score if self.config.partial_credit else float(score == 1.0)
            agent.reward(value / len(orders), exact=float(score == 1.0) / len(orders))


class ReverseEchoEnv(ReverseEnv):
    """Several texts, one a turn, to be written backwards or just repeated, as each turn says."""

    @classmethod
    def rows(cls, config: Any, *, split: str, seed: int) -> Iterator[dict[str, Any]]:
        """Yield tasks of lines `reverse TEXT` and `echo TEXT`, orders at random."""
        for number in count():
            dice = random.Random(f"reverse-echo/{split}/{seed}/{number}")
            lines = [
                f"{dice.choice([*ASK])} {word(dice, config.length)}" for _ in range(config.turns)
            ]
            yield {"prompt": "\n".join(lines), "extra_info": {"level": config.length}}

    async def run(self, task: Task, **agents: Agent) -> None:
        """Give the orders in the lines of the task's prompt.

        Raises:
            UserError: a line is none.
        """
        orders = [line.partition(" ")[::2] for line in task.text.splitlines()]
        if not all(order in ASK and text for order, text in orders):
            hint = "Write lines `reverse TEXT` and `echo TEXT`."
            raise UserError(f"{task.task_id}: `prompt` has a line that is no order. {hint}")
        await self.ask(agents["agent"], orders)


def word(dice: random.Random, length: int) -> str:
    """Draw letters."""
    return "".join(dice.choices(string.ascii_lowercase, k=length))


def similarity(text: str, wanted: str) -> float:
    """Return the share of letters that are right in their place, of the longer text's length."""
    same = sum(a == b for a, b in zip(text, wanted, strict=False))
    return same / max(len(text), len(wanted), 1)
