"""The options of environments that need no package of their own: mathematics, debate, games."""

from __future__ import annotations

from dataclasses import dataclass

from arealite.api.fields import opt, sub
from arealite.api.reward import RewardConfig


@dataclass(frozen=True, kw_only=True)
class MathEnvConfig:
    """One question, one answer, scored by a reward function."""

    reward: RewardConfig = sub(RewardConfig, "how the answer is scored")


@dataclass(frozen=True, kw_only=True)
class DebateConfig:
    """Two seats argue for and against."""

    rounds: int = opt(2, "turns of each seat", at_least=1)


@dataclass(frozen=True, kw_only=True)
class TicTacToeConfig:
    """Two seats, nine squares."""

    illegal_reward: float = opt(-1.0, "of a seat whose move cannot be made; it ends the game")


@dataclass(frozen=True, kw_only=True)
class MatrixGameConfig:
    """Two seats choose at the same time."""

    game: str = opt("prisoners_dilemma", "which payoffs")


@dataclass(frozen=True, kw_only=True)
class PrisonersDilemmaConfig:
    """The prisoner's dilemma, again and again."""

    rounds: int = opt(5, "times both choose", at_least=1)


@dataclass(frozen=True, kw_only=True)
class ReverseConfig:
    """Write a text backwards; in reverse_echo in several turns."""

    length: int = opt(5, "letters of a generated text", at_least=1)
