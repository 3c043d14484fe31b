"""Every environment as Requests: `make(NAME)`, reset, and step until the episode is over."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from importlib.util import find_spec
from math import isfinite
from typing import Any

import pytest

from arealite.ext.web.config import BrowserConfig
from arealite.ext.wrappers.play import make
from tests.contracts.test_env import ENVS
from tests.ext.web.browser.sites import one_task
from tests.fakes.env_servers import hosted
from tests.fakes.foreign import ADAPTERS, installed

FAMILIES = {
    "gymnasium/CliffWalking-v1": {"max_steps": 3},
    "reasoning_gym/chain_sum": {},
    "textarena/SimpleNegotiation-v0": {},
    "matrix_game/chicken": {},
    "openenv/echo": {},
}
"""Names with a variant, and their options."""
NOT_PLAYED = ("world", "duel", "counter", "harness")
"""Environments of the tests, which generate no tasks, and one whose agent needs a model."""


def play(name: str, options: dict[str, Any]) -> tuple[tuple[str, ...], list[Any]]:
    """Play two episodes with the first choice or "1"; return the actors and the last Requests."""
    with make(name, **options) as env:
        for seed in (1, 2):
            requests = env.reset(seed=seed)
            for _ in range(500):
                asked = [each for each in requests if each.needs_action]
                if not asked:
                    break
                assert not any(each.done for each in requests)
                assert all(str(each.observation) for each in asked)
                actions = {each.actor: [*each.observation.choices, "1"][0] for each in asked}
                requests = env.step(actions)
        return env.actors, requests


def cases() -> list[Any]:
    """Return every built-in environment and family; skipped if its package is missing."""
    named = [installed(name) for name in ENVS if name not in NOT_PLAYED]
    for name in FAMILIES:
        family = name.partition("/")[0]
        is_missing = family == "gymnasium" and find_spec(family) is None
        reason = "gymnasium is not installed: the extra envs"
        marks = [*installed(family).marks, pytest.mark.skipif(is_missing, reason=reason)]
        named.append(pytest.param(name, marks=marks))
    return named


@pytest.mark.parametrize("name", cases())
async def test_every_environment_is_played_from_python(name: str, tmp_path: Any) -> None:
    kind = name.partition("/")[0]
    options: dict[str, Any] = {**FAMILIES.get(name, ADAPTERS.get(kind, {}))}
    async with AsyncExitStack() as stack:
        if kind == "webarena":
            options = await stack.enter_async_context(one_task(tmp_path))
            options |= {"browser": BrowserConfig(contexts=4, timeout_s=60.0), "max_steps": 2}
        if kind == "openenv":  # `arealite serve` is an OpenEnv server
            _, address = await stack.enter_async_context(hosted("host_steps"))
            options = {"addresses": [address], "action": {"text": "{text}"}, "max_steps": 3}
            options["observation"] = ["content"]
        actors, requests = await asyncio.to_thread(play, name, options)
    assert tuple(each.actor for each in requests) == actors
    assert all(each.done and isfinite(each.reward) for each in requests)
    assert len({each.episode_id for each in requests}) == 1
    assert requests[0].group_id
