"""Small environments with the interfaces of Gymnasium and GyLLM."""

from __future__ import annotations

import random
import threading
from importlib.util import find_spec
from typing import Any

import pytest

from arealite.ext.sandbox.config import SandboxConfig
from arealite.ext.web.config import BrowserConfig
from tests.ext.web.browser.sites import needs_chromium

ADAPTERS = {
    "browser": {
        "tasks": ["click-test"],
        "max_steps": 2,
        "browser": BrowserConfig(contexts=4, timeout_s=60.0),
    },
    "code": {"sandbox": SandboxConfig(backend="unsafe", concurrency=4, timeout_s=60.0)},
    "harness": {"run": "tests.ext.harness.agents:number"},
    "gymnasium": {"factory": "tests.fakes.foreign:Guess"},
    "gyllm": {"factory": "tests.fakes.foreign:Sum", "seats": ["a", "b"]},
    "reasoning_gym": {"dataset": "chain_sum"},
    "textarena": {"env_id": "SimpleNegotiation-v0"},
}
"""Options of environments that need some for tests; these play generated rows."""


def installed(name: str) -> Any:
    """Skip the test if the package of an environment is not installed."""
    if name in ("browser", "webarena"):
        return pytest.param(name, marks=[needs_chromium, pytest.mark.processes])
    is_missing = name in ("reasoning_gym", "textarena") and find_spec(name) is None
    skip = pytest.mark.skipif(is_missing, reason=f"{name} is not installed: the extra envs")
    return pytest.param(name, marks=skip)


RELEASE = threading.Event()
"""Set to end the calls that hang."""


class Discrete:
    """Stands for gymnasium.spaces.Discrete."""

    def __init__(self, n: int, start: int = 0) -> None:
        self.n, self.start = n, start


class Guess:
    """Guess a number below `size`: 1.0 for a hit, which ends the episode."""

    made: list[Guess] = []  # noqa: RUF012

    def __init__(self, size: int = 3, text: bool = False, fault: str = "") -> None:
        if fault == "make":
            raise RuntimeError("no display")
        self.action_space = None if text else Discrete(size, 1)
        self.size, self.fault = size, fault
        self.resets, self.is_closed = 0, False
        Guess.made.append(self)

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        self.resets += 1
        self.wanted = random.Random(seed).randint(1, self.size)
        return {"hint": f"1 to {self.size}"}, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.fault == "hang":
            RELEASE.wait(60)
        if self.fault == "raise":
            raise KeyError("lost")
        if self.fault == "nan":
            return "", float("nan"), False, False, {}
        hit = str(action) == str(self.wanted)
        return f"not {action}", float(hit), hit, False, {}

    def close(self) -> None:
        self.is_closed = True


class ActionError(Exception):
    """Stands for gyllm's ActionError."""


class Sum:
    """Both players name a number at the same time after a round of talk; the higher number wins."""

    def __init__(self, players: tuple[str, ...] = ("a", "b"), batched: bool = False) -> None:
        self.agents = list(players)
        self.batched = batched
        self.episode = -1

    def reset(self, options: dict[str, Any]) -> list[dict[str, Any]]:
        self.seed, self.round = options["seed"], 0
        self.episode += 1
        rules = {"role": "system", "content": "Say a number; the higher one wins."}
        return [
            self.request(name, f"talk {self.seed}", system_message=rules) for name in self.agents
        ]

    def request(self, name: str, text: str, reward: float = 0.0, **more: Any) -> dict[str, Any]:
        actor = f"{name}::env=0::episode={self.episode}"
        said = {"role": "user", "content": text}
        asks = not more.get("episode_end", False)
        about = {"episode_id": self.episode, "needs_action": asks}
        return {"actor": actor, "message": said, "reward": reward, **about, **more}

    def step(self, actions: dict[str, str]) -> list[dict[str, Any]]:
        said = {actor.partition("::")[0]: text for actor, text in actions.items()}
        assert sorted(said) == sorted(self.agents)
        self.round += 1
        if self.round == 1:
            other = {n: next(said[m] for m in self.agents if m != n) for n in self.agents}
            asked = [self.request(name, f"the other said {other[name]}") for name in self.agents]
            return asked * (1 + self.batched)
        if not all(text.strip().isdigit() for text in said.values()):
            self.round -= 1
            raise ActionError("a number, please")
        best = max(int(text) for text in said.values())
        ended = [
            self.request(name, "over", float(int(said[name]) == best), episode_end=True)
            for name in self.agents
        ]
        self.episode += 1  # the environment starts the next episode by itself
        return [*ended, self.request(self.agents[0], "talk again", 7.0)]
