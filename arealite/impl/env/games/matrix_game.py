"""Matrix games: both seats choose at the same time, in one round or several.

Each observation holds the rules, the payoffs and all earlier choices.
"""

import asyncio
from collections.abc import Iterator
from itertools import product, repeat
from statistics import fmean

from arealite.api.agent import Agent
from arealite.api.env import Env
from arealite.api.game_config import MatrixGameConfig, PrisonersDilemmaConfig
from arealite.api.observation import Observation
from arealite.api.task import Row, Task
from arealite.api.trial import TrialConfig
from arealite.base.data import read_toml
from arealite.base.errors import UserError
from arealite.base.registry import unknown
from arealite.impl.env.games.choices import chosen

Payoffs = dict[tuple[str, str], tuple[float, float]]
EXAMPLE = "{'stag stag': [4, 4], 'stag hare': [0, 3], 'hare stag': [3, 0], 'hare hare': [2, 2]}"
GAMES: dict[str, dict[str, list[float]]] = read_toml(__file__, "payoffs.toml")
"""Payoffs of row and column by game and by both choices, as "row column"."""


class MatrixGameEnv(Env):
    """A matrix game between the seats row and column, a known one or with configured payoffs."""

    seats = ("row", "column")
    resumable = True
    rounds = 1

    def __init__(self, args: TrialConfig, config: MatrixGameConfig) -> None:
        super().__init__(args, config)
        self.payoffs = payoffs(config)
        self.choices = [tuple(dict.fromkeys(pair[i] for pair in self.payoffs)) for i in (0, 1)]

    @classmethod
    def rows(cls, config: MatrixGameConfig, *, split: str, seed: int) -> Iterator[Row]:
        """Yield the same row without end."""
        payoffs(config)
        yield from repeat({"prompt": "your own" if config.payoffs else config.game})

    async def run(self, task: Task, **agents: Agent) -> None:
        """Run all rounds: request a choice of each seat, then set both rewards."""
        seats = [agents[name] for name in self.seats]
        history: list[list[str]] = [[], []]
        for number in range(self.rounds):
            async with asyncio.TaskGroup() as tasks:
                pairs = zip(seats, [self.show(i, number, history[i]) for i in (0, 1)], strict=True)
                acts = [tasks.create_task(agent.act(seen)) for agent, seen in pairs]
            made = [chosen(acts[i].result().text, self.choices[i]) for i in (0, 1)]
            for i, agent in enumerate(seats):
                value = self.value(i, made)
                own = made[i]
                other = made[1 - i]
                parts = {f"chose_{each}": (each == own) / self.rounds for each in self.choices[i]}
                agent.reward(value / self.rounds, illegal=float(own is None), **parts)
                line = f"Round {number + 1}: you: {own or 'unreadable'}, "
                history[i].append(f"{line}the other: {other or 'unreadable'}. You got {value:g}.\n")

    def value(self, seat: int, made: list[str | None]) -> float:
        """Return a seat's payoff of a round.

        If the other seat's choice is unreadable, the payoff is the mean over that seat's choices.

        Args:
            seat: 0 for row, 1 for column.
            made: Both choices; None for an unreadable one.
        """
        own = made[seat]
        if own is None:
            return self.config.illegal_reward
        other = made[1 - seat]
        against = self.choices[1 - seat] if other is None else (other,)
        pairs = [(own, each) if seat == 0 else (each, own) for each in against]
        return fmean(self.payoffs[pair][seat] for pair in pairs)

    def show(self, seat: int, number: int, history: list[str]) -> Observation:
        """Return a seat's observation before a round.

        Args:
            seat: 0 for row, 1 for column.
            number: Index of the round, from 0.
            history: One line for each earlier round.
        """
        mine = {pair: (each[seat], each[1 - seat]) for pair, each in self.payoffs.items()}
        table = "".join(
            f"you {pair[seat]}, the other {pair[1 - seat]}: you get {own:g}, the other {other:g}\n"
            for pair, (own, other) in mine.items()
        )
        often = f", {self.rounds} times" if self.rounds > 1 else ""
        rules = f"You and another player choose at the same time{often}. What you get:\n{table}"
        ask = f"Answer with one of: {', '.join(self.choices[seat])}. An unreadable answer is "
        ask += f"worth {self.config.illegal_reward:g}.\n"
        now = f"Round {number + 1} of {self.rounds}.\n" if self.rounds > 1 else ""
        return Observation(rules + ask + "".join(history) + now, self.choices[seat])


class PrisonersDilemmaEnv(MatrixGameEnv):
    """The iterated prisoner's dilemma, or another matrix game, over several rounds."""

    def __init__(self, args: TrialConfig, config: PrisonersDilemmaConfig) -> None:
        super().__init__(args, config)
        self.rounds = config.rounds


def payoffs(config: MatrixGameConfig) -> Payoffs:
    """Return the game's payoffs.

    Raises:
        UserError: The game is unknown, or the configured payoffs lack a pair of choices.
    """
    if not config.payoffs and config.game not in GAMES:
        raise UserError(unknown("matrix game", config.game, list(GAMES)))
    given = config.payoffs or GAMES[config.game]
    pairs = {tuple(key.split()): tuple(values) for key, values in given.items()}
    whole = all(len(key) == len(values) == 2 for key, values in pairs.items())
    if whole:
        rows, columns = zip(*pairs, strict=True)
        whole = {*product(rows, columns)} == {*pairs}
    if not whole:
        what = "payoffs: each pair of choices needs two numbers, for row and column"
        raise UserError(f"{what}. Write {EXAMPLE}.")
    return pairs  # pyright: ignore[reportReturnType]
