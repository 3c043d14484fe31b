"""The options of environments in a real browser."""

from __future__ import annotations

from dataclasses import dataclass

from arealite.api.fields import opt


@dataclass(frozen=True, kw_only=True)
class BrowserEnvConfig:
    """MiniWoB++'s tasks in headless Chromium."""

    max_steps: int = opt(10, "actions of an episode", at_least=1)


@dataclass(frozen=True, kw_only=True)
class WebArenaConfig:
    """WebArena's tasks on sites that the user serves."""

    max_steps: int = opt(30, "actions of an episode", at_least=1)
