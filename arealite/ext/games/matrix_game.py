"""Matrix games: both seats choose at the same time, in one round or several.

Each observation holds the rules, the payoffs and all earlier choices.
"""

import asyncio
from collections.abc import Iterable, Iterator
from itertools import product, repeat
from statistics import fmean

from arealite.api.agent import Agent
from arealite.api.env import Env
from arealite.api.observation import Observation
from arealite.api.task import Row, Task
from arealite.api.trial import TrialConfig
from arealite.base.errors import UserError
from arealite.base.files import read_toml
from arealite.base.registry import unknown
from arealite.ext.games.choices import chosen
from arealite.ext.games.config import MatrixGameConfig, PrisonersDilemmaConfig

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
        rows, columns = zip(*self.payoffs, strict=True)
        self.choices = [unique(rows), unique(columns)]

    @classmethod
    def rows(cls, config: MatrixGameConfig, *, split: str, seed: int) -> Iterator[Row]:
        """Yield the same row without end."""
        payoffs(config)
        prompt = "your own" if config.payoffs else config.game
        yield from repeat({"prompt": prompt})

    async def run(self, task: Task, **agents: Agent) -> None:
        """Run all rounds: request a choice of each seat, then set both rewards."""
        row_agent = agents["row"]
        column_agent = agents["column"]
        history: list[list[str]] = [[], []]
        for number in range(self.rounds):
            row_observation = self.show(0, number, history[0])
            column_observation = self.show(1, number, history[1])
            async with asyncio.TaskGroup() as group:
                row_act = group.create_task(row_agent.act(row_observation))
                column_act = group.create_task(column_agent.act(column_observation))
            row_answer = row_act.result().text
            column_answer = column_act.result().text
            choices = [
                chosen(row_answer, self.choices[0]),
                chosen(column_answer, self.choices[1]),
            ]
            for seat, agent in enumerate((row_agent, column_agent)):
                payoff = self.value(seat, choices)
                self._reward(agent, seat, choices[seat], payoff)
                choice = choices[seat] or "unreadable"
                other_choice = choices[1 - seat] or "unreadable"
                history[seat].append(
                    f"Round {number + 1}: "
                    f"you: {choice}, "
                    f"the other: {other_choice}. "
                    f"You got {payoff:g}.\n"
                )

    def _reward(self, agent: Agent, seat: int, choice: str | None, payoff: float) -> None:
        """Set the reward of a round and its parts."""
        parts: dict[str, float] = {}
        for possible_choice in self.choices[seat]:
            is_chosen = possible_choice == choice
            parts[f"chose_{possible_choice}"] = is_chosen / self.rounds
        is_illegal = choice is None
        agent.reward(
            payoff / self.rounds,
            illegal=float(is_illegal),
            **parts,
        )

    def value(self, seat: int, choices: list[str | None]) -> float:
        """Return a seat's payoff of a round.

        If the other seat's choice is unreadable, the payoff is the mean over that seat's choices.

        Args:
            seat: 0 for row, 1 for column.
            choices: Both choices; None for an unreadable one.
        """
        choice = choices[seat]
        if choice is None:
            return self.config.illegal_reward
        other_choice = choices[1 - seat]
        if other_choice is not None:
            return self._payoff(seat, choice, other_choice)
        other_choices = self.choices[1 - seat]
        return fmean(self._payoff(seat, choice, other) for other in other_choices)

    def _payoff(self, seat: int, choice: str, other_choice: str) -> float:
        """Return the payoff of a seat for its choice and the other seat's choice."""
        if seat == 0:
            row_payoff, _ = self.payoffs[choice, other_choice]
            return row_payoff
        _, column_payoff = self.payoffs[other_choice, choice]
        return column_payoff

    def show(self, seat: int, number: int, history: list[str]) -> Observation:
        """Return a seat's observation before a round.

        Args:
            seat: 0 for row, 1 for column.
            number: Index of the round, from 0.
            history: One line for each earlier round.
        """
        other_seat = 1 - seat
        choices = self.choices[seat]
        is_repeated = self.rounds > 1
        how_often = f", {self.rounds} times" if is_repeated else ""
        lines = [
            f"You and another player choose at the same time{how_often}. ",
            "What you get:\n",
        ]
        for pair, pair_payoffs in self.payoffs.items():
            lines += [
                f"you {pair[seat]}, ",
                f"the other {pair[other_seat]}: ",
                f"you get {pair_payoffs[seat]:g}, ",
                f"the other {pair_payoffs[other_seat]:g}\n",
            ]
        lines += [
            f"Answer with one of: {', '.join(choices)}. ",
            f"An unreadable answer is worth {self.config.illegal_reward:g}.\n",
            *history,
        ]
        if is_repeated:
            lines.append(f"Round {number + 1} of {self.rounds}.\n")
        return Observation("".join(lines), choices)


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
        raise UserError(unknown("matrix game", config.game, [*GAMES]))
    configured = config.payoffs or GAMES[config.game]
    pairs: dict[tuple[str, ...], tuple[float, ...]] = {}
    for key, numbers in configured.items():
        choices = tuple(key.split())
        pairs[choices] = tuple(numbers)
    if not is_complete(pairs):
        raise UserError(
            f"payoffs: each pair of choices needs two numbers, for row and column. Write {EXAMPLE}."
        )
    return pairs  # pyright: ignore[reportReturnType]


def is_complete(pairs: dict[tuple[str, ...], tuple[float, ...]]) -> bool:
    """Return whether each choice of row has two payoffs for each choice of column."""
    for choices, pair_payoffs in pairs.items():
        if len(choices) != 2 or len(pair_payoffs) != 2:
            return False
    rows, columns = zip(*pairs, strict=True)
    all_pairs = set(product(rows, columns))
    return all_pairs == set(pairs)


def unique(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names in order, each once."""
    return tuple(dict.fromkeys(names))
