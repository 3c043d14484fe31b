"""A debate: one seat argues for a claim, the other against it; rules or a third seat judge.

Each observation holds the rules, the claim and all speeches so far, so agents need no memory.
"""

import random
import re
from collections.abc import Iterator
from statistics import fmean

from arealite.api.agent import Agent
from arealite.api.env import Env
from arealite.api.task import Row, Task
from arealite.api.trial import TrialConfig
from arealite.base.errors import EpisodeError, UserError
from arealite.ext.games.config import DebateConfig
from arealite.ext.games.debate.rules import WORDS, judge
from arealite.ext.games.prompt_texts import PROMPTS

SIDES = {"pro": "for", "con": "against"}
OPPONENTS = {"pro": "con", "con": "pro"}
Speeches = dict[str, list[str]]
"""Speeches by side, in order."""
Scores = dict[str, dict[str, float]]
"""Scores by name, by side."""
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
    prompt_use = "part"

    def __init__(self, args: TrialConfig, config: DebateConfig) -> None:
        super().__init__(args, config)
        if config.judge == "rules":
            self.seats = ("pro", "con")

    @classmethod
    def rows(cls, config: DebateConfig, *, split: str, seed: int) -> Iterator[Row]:
        """Yield the built-in claims without end, shuffled again each time."""
        is_train = split == "train"
        topics: list[str] = []
        for index, topic in enumerate(WORDS["topics"]):
            is_held_out = index % HELD_OUT == 0
            if is_held_out is not is_train:
                topics.append(topic)
        rng = random.Random(f"debate/{split}/{seed}")
        while True:
            for topic in rng.sample(topics, len(topics)):
                yield {"prompt": topic}

    async def run(self, task: Task, **agents: Agent) -> None:
        """Run both sides; reward each with its score and the winner with `win_reward`.

        Raises:
            JudgeUnreadable: The seat judge gave no valid scores.
            UserError: The agent of the seat judge is trained.
        """
        config = self.config
        claim = task.text
        rules = RULES.format(rounds=config.rounds, words=config.words, claim=claim)
        speeches = await self._debate(rules, agents)
        if config.judge == "model":
            scores = await self.ask(agents["judge"], rules, speeches)
        else:
            scores = self._score_by_rules(claim, speeches)
        totals = {side: fmean(parts.values()) for side, parts in scores.items()}
        for side, opponent in OPPONENTS.items():
            total = totals[side]
            outcome = self._outcome(lead=total - totals[opponent])
            reward = total + config.win_reward * outcome
            agents[side].reward(
                reward,
                score=total,
                win=float(outcome > 0),
                **scores[side],
            )

    async def _debate(self, rules: str, agents: dict[str, Agent]) -> Speeches:
        """Request the speeches of both sides in turn."""
        speeches: Speeches = {"pro": [], "con": []}
        transcript = ""
        for number in range(1, self.config.rounds + 1):
            for side, stance in SIDES.items():
                request = f"You are {side}. Give your speech {number}, {stance} the claim.\n"
                observation = f"{rules}{transcript}{request}"
                action = await agents[side].act(observation)
                speech = action.text.strip()
                speeches[side].append(speech)
                transcript += speech_line(side, number, speech)
        return speeches

    def _score_by_rules(self, claim: str, speeches: Speeches) -> Scores:
        scores: Scores = {}
        for side, opponent in OPPONENTS.items():
            scores[side] = judge(
                claim,
                speeches[side],
                speeches[opponent],
                words=self.config.words,
                first=side == "pro",
            )
        return scores

    def _outcome(self, lead: float) -> int:
        """Return 1 if a side with this lead wins, -1 if it loses, 0 for a draw."""
        is_draw = lead == 0 or abs(lead) < self.config.win_margin
        if is_draw:
            return 0
        return 1 if lead > 0 else -1

    async def ask(self, agent: Agent, rules: str, speeches: Speeches) -> Scores:
        """Ask the seat judge for scores in [0, 1].

        The judge gives two verdicts, with each side first once. The scores are their means.
        """
        if agent.trainable:
            raise UserError(
                "collector.seats.judge.type: a trained agent cannot judge a debate, "
                "because the judge gets no reward. Use fixed_policy."
            )
        pro_scores: list[float] = []
        con_scores: list[float] = []
        for first, second in OPPONENTS.items():
            transcript = ""
            for side in (first, second):
                for number, speech in enumerate(speeches[side], start=1):
                    transcript += speech_line(side, number, speech)
            action = await agent.act(f"{rules}{transcript}{ASK}")
            pro, con = read_verdict(action.text)
            pro_scores.append(pro / 10)
            con_scores.append(con / 10)
        return {
            "pro": {"judge": fmean(pro_scores)},
            "con": {"judge": fmean(con_scores)},
        }


def speech_line(side: str, number: int, speech: str) -> str:
    """Return a speech as a line of the transcript. The first speech of a side has the number 1."""
    return f"[{side}, speech {number}] {speech}\n"


def read_verdict(answer: str) -> tuple[float, float]:
    """Return the last scores of pro and con in a judge's answer, from 0 to 10.

    Raises:
        JudgeUnreadable: There are none, or a score is above 10.
    """
    verdicts = VERDICT.findall(answer)
    if verdicts:
        pro, con = map(float, verdicts[-1])
        if max(pro, con) <= 10:
            return pro, con
    raise JudgeUnreadable(f"no scores as in 'pro=5 con=5' in: {answer[-200:]!r}")
