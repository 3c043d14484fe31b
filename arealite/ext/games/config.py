"""Options of the games and of the debate."""

from dataclasses import dataclass
from typing import Literal

from arealite.api.fields import opt, sub


@dataclass(frozen=True, kw_only=True)
class ReverseConfig:
    """Reverse a text. reverse_echo has several turns; some ask for the text unchanged."""

    length: int = opt(5, "letters of a generated text", at_least=1)
    turns: int = opt(4, "turns of a generated task of reverse_echo", at_least=1)
    partial_credit: bool = opt(True, "reward the share of right letters; false: 1 or 0")


@dataclass(frozen=True, kw_only=True)
class DebateConfig:
    """Two seats argue for and against a motion."""

    rounds: int = opt(2, "speeches of each seat", at_least=1)
    words: int = opt(120, "best length of a speech in words; half or triple scores 0", above=0)
    judge: Literal["rules", "model"] = opt(
        "rules", "model: the seat `judge` decides, see collector.seats.judge.type=fixed_policy"
    )
    win_reward: float = opt(1.0, "added to the winner's score, subtracted from the loser's")
    win_margin: float = opt(0.05, "a smaller difference of scores is a draw", at_least=0)


@dataclass(frozen=True, kw_only=True)
class TicTacToeConfig:
    """Tic-tac-toe with the seats x and o."""

    win_reward: float = opt(1.0, "reward for three in a row, or for the other's illegal move")
    draw_reward: float = opt(0.25, "reward of both seats for a draw")
    loss_reward: float = opt(-1.0, "reward of the seat whose opponent has three in a row")
    illegal_reward: float = opt(-1.0, "reward for an illegal move, which ends the game")
    opening_moves: int = opt(0, "largest number of random first moves", at_least=0, at_most=4)
    rules: str = opt("", "first text of each observation; {seat}: x or o; '': built-in rules")


@dataclass(frozen=True, kw_only=True)
class MatrixGameConfig:
    """A matrix game: two seats choose at the same time."""

    game: str = opt(
        "prisoners_dilemma",
        "prisoners_dilemma, stag_hunt, chicken, matching_pennies or rock_paper_scissors",
    )
    payoffs: dict[str, list[float]] = sub(dict, "your game by choices: {'stag stag': [4, 4], …}")
    illegal_reward: float = opt(-1.0, "reward if unreadable; the other seat gets its mean payoff")


@dataclass(frozen=True, kw_only=True)
class PrisonersDilemmaConfig(MatrixGameConfig):
    """A repeated matrix game, by default the prisoner's dilemma."""

    rounds: int = opt(5, "rounds of a game; rewards are payoffs divided by this", at_least=1)
