"""The options of environments that others wrote."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from arealite.api.fields import opt, sub
from arealite.api.runtime import EnvServersConfig


@dataclass(frozen=True, kw_only=True)
class ReasoningGymConfig:
    """One of reasoning-gym's datasets."""

    dataset: str = opt("chain_sum", "its name in reasoning-gym")
    options: dict[str, Any] = sub(dict, "its own options, as in options.max_terms=3")
    answer_tag: str = opt(
        "answer",
        "questions ask for the answer in <answer>…</answer>, and the last one is scored; '': the "
        "question as it is, and the whole completion",
    )
    any_scorer: bool = opt(
        False, "also datasets whose scorer is known to be wrong, or runs answers as programs"
    )


@dataclass(frozen=True, kw_only=True)
class GymnasiumConfig:
    """A text environment of Gymnasium's kind."""

    env_id: str = opt("", "as for gymnasium.make")
    factory: str = opt("", "module:callable that makes one, instead of env_id")
    kwargs: dict[str, Any] = sub(dict, "arguments for making it, as in kwargs.is_slippery=false")
    rules: str = opt("", "what is told first; '': the actions, where they can be listed")
    repeat_rules: bool = opt(False, "tell them in every turn, for agents without a memory")
    actions: list[str] = sub(list, "names of the actions 0, 1, …; []: their numbers")
    illegal_reward: float = opt(0.0, "for an answer that names no action; it is told so")
    max_illegal: int = opt(3, "such answers in an episode, which ends with the last", at_least=1)
    max_steps: int = opt(100, "turns of an episode", at_least=1)
    threads: int = opt(8, "environments that compute at a time", at_least=1)


@dataclass(frozen=True, kw_only=True)
class GyLLMConfig:
    """An environment of GyLLM's kind, which speaks in Requests."""

    env_id: str = opt("", "as for gyllm.make")
    factory: str = opt("", "module:callable that makes one, instead of env_id")
    kwargs: dict[str, Any] = sub(dict, "arguments for making it")
    seats: list[str] = sub(lambda: ["agent"], "its actors, as in [player_a,player_b]")
    options: dict[str, Any] = sub(dict, "for its reset, besides the task's seed")
    illegal_reward: float = opt(0.0, "for an answer that it refuses; the actor is told why")
    max_illegal: int = opt(3, "such answers in an episode, which ends with the last", at_least=1)
    max_steps: int = opt(100, "steps of an episode", at_least=1)
    threads: int = opt(8, "environments that compute at a time", at_least=1)


@dataclass(frozen=True, kw_only=True)
class TextArenaConfig:
    """One of TextArena's games."""

    env_id: str = opt("", "as for textarena.make")
    kwargs: dict[str, Any] = sub(dict, "arguments for making it")
    players: int = opt(2, "seats player_0, player_1, …", at_least=1)
    observation: Literal["new", "whole"] = opt(
        "new", "what happened since the player's last turn; whole: all, for agents without memory"
    )
    max_turns: int = opt(200, "after which a game is over without a reward", at_least=1)


@dataclass(frozen=True, kw_only=True)
class OpenEnvConfig(EnvServersConfig):
    """Environments behind OpenEnv servers."""

    observation: list[str] = sub(
        list, "fields that the agent reads; []: the one that is its text, else all as JSON"
    )
    action: Any = opt(
        None,
        "what is sent, with {text} for the completion, {json} for what it says as JSON; null: "
        "{message: '{text}'}",
    )
    instruction: str = opt(
        "Act in the environment: answer each observation with your next action.",
        "prompt of generated tasks; a task's prompt stands before the first observation",
    )
    max_steps: int = opt(100, "steps after which an episode ends", at_least=1)
