"""The options of environments that need no package of their own: mathematics, debate, games."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from arealite.api.fields import opt, sub
from arealite.api.reward import RewardConfig

ANSWER = "Put the final answer in \\boxed{}."


@dataclass(frozen=True, kw_only=True)
class MathEnvConfig:
    """One question, one answer, scored by a reward function."""

    reward: RewardConfig = sub(RewardConfig, "how the answer is scored")
    kinds: list[str] = sub(
        lambda: ["arithmetic", "algebra", "word", "multi_step"], "of the questions it makes itself"
    )
    levels: list[int] = sub(lambda: [1, 2, 3], "how hard those are, 1 to 5, drawn evenly")
    instruction: str = opt(ANSWER, "what follows each of those questions")


@dataclass(frozen=True, kw_only=True)
class DebateConfig:
    """Two seats argue for and against."""

    rounds: int = opt(2, "speeches of each seat", at_least=1)
    words: int = opt(120, "length of a good speech; half of it, or three times it, is bad", above=0)
    judge: Literal["rules", "model"] = opt(
        "rules", "model: a third seat, `judge`, as in collector.seats.judge.type=fixed_policy"
    )
    win_reward: float = opt(1.0, "of the better seat beside its score; the other loses as much")
    win_margin: float = opt(0.05, "scores that are nearer to each other are a draw", at_least=0)


@dataclass(frozen=True, kw_only=True)
class TicTacToeConfig:
    """Two seats, nine squares."""

    win_reward: float = opt(1.0, "of the seat with three in a row, or that an illegal move favours")
    draw_reward: float = opt(0.25, "of both seats where neither wins")
    loss_reward: float = opt(-1.0, "of the seat that lets the other have three in a row")
    illegal_reward: float = opt(-1.0, "of a seat whose move cannot be made; it ends the game")
    opening_moves: int = opt(0, "up to so many random moves come first", at_least=0, at_most=4)
    rules: str = opt("", "what each observation begins with; {seat} is x or o; '': the rules")


@dataclass(frozen=True, kw_only=True)
class MatrixGameConfig:
    """Two seats choose at the same time."""

    game: str = opt(
        "prisoners_dilemma",
        "or stag_hunt, chicken, matching_pennies, rock_paper_scissors: which payoffs",
    )
    payoffs: dict[str, list[float]] = sub(
        dict, "of your own game, by what row and column choose: {'stag stag': [4, 4], …}"
    )
    illegal_reward: float = opt(
        -1.0, "of a seat whose choice cannot be read; the other gets its mean over all choices"
    )


@dataclass(frozen=True, kw_only=True)
class PrisonersDilemmaConfig(MatrixGameConfig):
    """The same game again and again, by default the prisoner's dilemma."""

    rounds: int = opt(5, "times both choose; rewards are a round's payoff over this", at_least=1)


@dataclass(frozen=True, kw_only=True)
class ReverseConfig:
    """Write a text backwards; in reverse_echo in several turns, some as they are."""

    length: int = opt(5, "letters of a generated text", at_least=1)
    turns: int = opt(4, "texts of a generated task of reverse_echo", at_least=1)
    partial_credit: bool = opt(True, "the share of right letters; false: 1 where all are, else 0")
