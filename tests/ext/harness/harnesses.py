"""Play episodes of the harness through a real gateway, with a scripted model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import uvloop
from msgspec import structs

from arealite.api.experiment_config import ExperimentConfig
from arealite.api.llm import LLMRequest
from arealite.api.reward import RewardConfig
from arealite.api.rollout_messages import Episode
from arealite.api.trajectory import TrajectoryHeader
from arealite.ext.harness.config import HarnessConfig
from arealite.impl.rollout.collector import Collector
from tests.fakes.client import ScriptedClient, response
from tests.fakes.experiment import experiment, lease, tokenizer

AGENTS = Path(__file__).with_name("agents.py")
EXACT = RewardConfig(type="exact_match")
EOS = 2
COUNTED = ("malformed_calls", "branches")
"""Parts that the environment itself reports."""


def answer(text: str) -> Any:
    """Return a script that answers every request with a text."""
    ids = tokenizer().encode(text, add_special_tokens=False)

    def script(_: LLMRequest) -> Any:
        return response([*ids, EOS])

    return script


def configured(**options: Any) -> ExperimentConfig:
    """Return an experiment with the harness; `run` names a function of agents.py."""
    if name := options.get("run"):
        options["run"] = name if ":" in name else f"{AGENTS}:{name}"
    collector = {k: options.pop(k) for k in ("episode_timeout_s", "seats_of_run") if k in options}
    config = experiment("harness", **collector)
    ppo = config.trainer.ppo
    env = replace(ppo.collector.env, harness=HarnessConfig(**{"reward": EXACT} | options))
    ppo = replace(ppo, collector=replace(ppo.collector, env=env))
    return replace(config, trainer=replace(config.trainer, ppo=ppo))


@asynccontextmanager
async def collecting(script: Any = None, **options: Any) -> AsyncGenerator[Collector]:
    """Yield a collector whose environment is the harness."""
    made = Collector(configured(**options), ScriptedClient(script or answer("2")), tokenizer())
    await made.setup()
    try:
        yield made
    finally:
        await made.close()


async def play(script: Any = None, *, truth: Any = "2", columns: Any = None, **o: Any) -> Episode:
    """Play one episode; the task is `1+1=`, the model says "2" unless scripted."""
    work = lease(ground_truth=truth)
    work = structs.replace(work, task=structs.replace(work.task, columns=columns or {}))
    async with collecting(script, **o) as made:
        return (await made.run(work, 0))[0]


def rewarded(header: TrajectoryHeader) -> tuple[float, dict[str, float]]:
    """Return the reward and the agent's own parts."""
    return header.reward, {n: v for n, v in header.reward_parts.items() if n not in COUNTED}


async def failed(kind: str, *args: Any, **options: Any) -> str:
    """Play one episode that fails with a class; return the detail."""
    episode = await play(*args, **options)
    assert episode.failure is not None, episode.headers
    assert episode.failure.failure_class == kind, episode.failure
    return episode.failure.detail


def in_a_workers_loop(test: Callable[..., Any]) -> Callable[..., None]:
    """Run a test on uvloop, as workers do: asyncio's own loop waits for all pipes of a process."""

    @wraps(test)
    def run(*args: Any, **named: Any) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(test(*args, **named))

    return run
