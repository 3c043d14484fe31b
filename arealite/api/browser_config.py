"""The options of environments in a real browser."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from arealite.api.fields import opt, sub


@dataclass(frozen=True, kw_only=True)
class BrowserConfig:
    """One headless Chromium a rollout worker, and how its pages are told to agents."""

    executable: str = opt("chromium-headless-shell", "Chromium, by name or path")
    sandbox: bool = opt(False, "Chromium's own, for pages you do not trust; not as root")
    contexts: int = opt(8, "episodes that have a page at a time; the others wait", at_least=1)
    timeout_s: float = opt(10.0, "a page that loads or answers later has failed", above=0)
    settle_ms: int = opt(10, "what a page is given after an action, before it is read", at_least=0)
    max_chars: int = opt(4000, "of a page; the rest is cut off", at_least=20)
    rules: Literal["full", "short", "none"] = opt(
        "full", "how the first observation tells the actions; later ones do in short, unless none"
    )


@dataclass(frozen=True, kw_only=True)
class BrowserEnvConfig:
    """MiniWoB++'s tasks in headless Chromium."""

    tasks: list[str] = sub(lambda: ["all"], "their names, as click-test or flight.AA; all: 128")
    max_steps: int = opt(10, "actions of an episode", at_least=1)
    browser: BrowserConfig = sub(BrowserConfig, "in which browser")


@dataclass(frozen=True, kw_only=True)
class WebArenaConfig:
    """WebArena's tasks on sites that the user serves."""

    tasks: str = opt("", "file with the tasks, a list in JSON, as WebArena publishes them")
    sites: dict[str, str] = sub(dict, "URLs by name, as shopping; others from WA_SHOPPING, …")
    held_out: int = opt(5, "every n-th task is for evaluation; 0: all are for both", at_least=0)
    judge: bool = opt(
        False, "a seat of that name decides fuzzy matches; else texts must be equal but for signs"
    )
    max_steps: int = opt(30, "actions of an episode", at_least=1)
    browser: BrowserConfig = sub(BrowserConfig, "in which browser")
