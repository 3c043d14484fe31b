"""A debate: one seat argues for a claim, the other against it; rules or a third seat judge.

Each observation holds the rules, the claim and all speeches so far, so agents need no memory.
"""

import random
import re
from collections.abc import Iterator
from statistics import fmean

from arealite.api.agent import Agent
from arealite.api.env import Env
from arealite.api.game_config import DebateConfig
from arealite.api.task import Row, Task
from arealite.api.trial import TrialConfig
from arealite.base.errors import EpisodeError, UserError
from arealite.impl.env.debate.rules import WORDS, judge
from arealite.impl.env.prompts import PROMPTS

SIDES = {"pro": "for", "con": "against"}
HELD_OUT = 5
"""One in HELD_OUT topics is left out of the split train and used by all other splits."""
RULES = PROMPTS["debate"]["rules"]
ASK = PROMPTS["debate"]["judge"]
VERDICT = re.compile(r"pro\s*[=:]\s*(\d+(?:\.\d+)?)\W+con\s*[=:]\s*(\d+(?:\.\d+)?)", re.IGNORECASE)


class JudgeUnreadable(EpisodeError, failure_class="judge_unreadable"):
    """The judge's answer holds no valid scores, so the seats get no reward."""


class DebateEnv(Env):
    """A debate between seats pro and con, judged by rules or by a seat judge."""

    seats = ("pro", "con", "judge")
    resumable = True

    def __init__(self, args: TrialConfig, config: DebateConfig) -> None:
        super().__init__(args, config)
        if config.judge == "rules":
            self.seats = ("pro", "con")

    @classmethod
    def rows(cls, config: DebateConfig, *, split: str, seed: int) -> Iterator[Row]:
        """Yield the built-in claims without end, shuffled again each time."""
        is_train = split == "train"
        every = enumerate(WORDS["topics"])
        topics = [topic for i, topic in every if (i % HELD_OUT != 0) is is_train]
        rng = random.Random(f"debate/{split}/{seed}")
        while True:
            yield from ({"prompt": topic} for topic in rng.sample(topics, len(topics)))

    async def run(self, task: Task, **agents: Agent) -> None:
        """Run both sides; reward each with its score and the winner with `win_reward`.

        Raises:
            JudgeUnreadable: The seat judge gave no valid scores.
            UserError: The agent of the seat judge is trained.
        """
        config = self.config
        claim = task.text
        speeches = dict[str, list[str]](pro=[], con=[])
        rules = RULES.format(rounds=config.rounds, words=config.words, claim=claim)
        transcript = ""
        for number in range(config.rounds):
            for side, stance in SIDES.items():
                turn = f"You are {side}. Give your speech {number + 1}, {stance} the claim.\n"
                text = (await agents[side].act(f"{rules}{transcript}{turn}")).text.strip()
                speeches[side].append(text)
                transcript += f"[{side}, speech {number + 1}] {text}\n"
        scores = {
            side: judge(claim, speeches[side], speeches[other], words=config.words, first=first)
            for side, other, first in (("pro", "con", True), ("con", "pro", False))
        }
        if config.judge == "model":
            scores = await self.ask(agents["judge"], rules, speeches)
        totals = {side: fmean(parts.values()) for side, parts in scores.items()}
        for side, other in (("pro", "con"), ("con", "pro")):
            ahead = totals[side] - totals[other]
            won = 0 if abs(ahead) < config.win_margin else (ahead > 0) - (ahead < 0)
            value = totals[side] + config.win_reward * won
            agents[side].reward(value, score=totals[side], win=float(won > 0), **scores[side])

    async def ask(
        self, agent: Agent, rules: str, speeches: dict[str, list[str]]
    ) -> dict[str, dict[str, float]]:
        """Ask the seat judge for scores in [0, 1].

        The judge gives two verdicts, with each side first once. The scores are their means.
        """
        if agent.trainable:
            what = "a trained agent cannot judge a debate, because the judge gets no reward"
            raise UserError(f"collector.seats.judge.type: {what}. Use fixed_policy.")
        found: dict[str, list[float]] = {"pro": [], "con": []}
        for order in (("pro", "con"), ("con", "pro")):
            said = [(side, *each) for side in order for each in enumerate(speeches[side], start=1)]
            text = "".join(f"[{side}, speech {number}] {speech}\n" for side, number, speech in said)
            answer = (await agent.act(f"{rules}{text}{ASK}")).text
            verdicts = VERDICT.findall(answer)
            if not verdicts or max(map(float, verdicts[-1])) > 10:
                raise JudgeUnreadable(f"no scores as in 'pro=5 con=5' in: {answer[-200:]!r}")
            for side, score in zip(found, verdicts[-1], strict=True):
                found[side].append(float(score) / 10)
        return {side: {"judge": fmean(each)} for side, each in found.items()}
