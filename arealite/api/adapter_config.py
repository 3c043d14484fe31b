"""The options of environments that others wrote."""

from __future__ import annotations

from dataclasses import dataclass

from arealite.api.fields import opt, sub


@dataclass(frozen=True, kw_only=True)
class ReasoningGymConfig:
    """One of reasoning-gym's datasets."""

    dataset: str = opt("chain_sum", "its name in reasoning-gym")


@dataclass(frozen=True, kw_only=True)
class GymnasiumConfig:
    """A text environment of Gymnasium's kind."""

    env_id: str = opt("", "as for gymnasium.make")


@dataclass(frozen=True, kw_only=True)
class GyLLMConfig:
    """An environment of GyLLM's kind, which speaks in Requests."""

    env_id: str = opt("", "as for gyllm.make")


@dataclass(frozen=True, kw_only=True)
class TextArenaConfig:
    """One of TextArena's games."""

    env_id: str = opt("", "as for textarena.make")


@dataclass(frozen=True, kw_only=True)
class OpenEnvConfig:
    """Environments behind OpenEnv servers."""

    addresses: list[str] = sub(list, "host:port of each server")
