"""The contract of all registered parts: class, config, and behaviour of each kind."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest

from arealite.api.agent import Agent, agents
from arealite.api.collector_config import AgentConfig
from arealite.api.engine import TrainEngine, engines
from arealite.api.engine_config import TrainEngineConfig
from arealite.api.env import Env, EnvConfig, envs
from arealite.api.launcher import Launcher, LauncherConfig, launchers
from arealite.api.llm import LLMClient, LLMClientConfig, clients
from arealite.api.llm_server import LLMServer, LLMServerConfig, servers
from arealite.api.logger import MetricLogger, loggers
from arealite.api.publisher import PublisherConfig, WeightPublisher, publishers
from arealite.api.reward import Reward, RewardConfig, make_reward, rewards
from arealite.api.tool import Tool, tools
from arealite.api.trainer import Trainer, trainers
from arealite.ext.math.reward_options import MathVerifyConfig
from arealite.ext.rewards.config import FunctionRewardConfig
from tests.ext.games import players
from tests.fakes.foreign import ADAPTERS, installed

KINDS: list[tuple[Any, type, type | None]] = [
    (agents, Agent, AgentConfig),
    (clients, LLMClient, LLMClientConfig),
    (engines, TrainEngine, TrainEngineConfig),
    (envs, Env, EnvConfig),
    (launchers, Launcher, LauncherConfig),
    (loggers, MetricLogger, None),
    (publishers, WeightPublisher, PublisherConfig),
    (rewards, Reward, RewardConfig),
    (servers, LLMServer, LLMServerConfig),
    (tools, Tool, None),
    (trainers, Trainer, None),
]


def built_in(table: Any) -> list[str]:
    """List the built-in parts, without parts that other tests register."""
    return [name for name in table.names() if table.get(name).__module__.startswith("arealite.")]


PARTS = [(table, name, base, config) for table, base, config in KINDS for name in built_in(table)]
IDS = [f"{table.kind}-{name}" for table, name, _, _ in PARTS]


@pytest.mark.parametrize(("table", "name", "base", "config"), PARTS, ids=IDS)
def test_part_implements_its_class_and_has_a_docstring(
    table: Any, name: str, base: type, config: type | None
):
    part = table.get(name)
    assert issubclass(part, base)
    assert not inspect.isabstract(part), "every abstract method is there"
    assert (part.__doc__ or "").strip(), "a part says what it is"
    if config is not None and name in {"math_verify", "math", "sglang", "embedded", "disk", "fsdp"}:
        own = {field.name for field in dataclasses.fields(config)}
        assert name in own, "its options stand under its name"


@pytest.mark.parametrize(("_table", "_base", "config"), KINDS)
def test_default_type_is_registered(_table: Any, _base: type, config: type | None):
    if config is not None:
        assert config().type in _table.names()


@pytest.mark.parametrize("name", built_in(rewards))
async def test_reward_scores_a_right_answer_above_a_wrong_one(name: str):
    patient = MathVerifyConfig(timeout_s=60.0)
    function = FunctionRewardConfig(paths=["tests.fakes.rewards:is_right"])
    reward = make_reward(RewardConfig(type=name, math_verify=patient, function=function))
    await reward.setup()
    try:
        assert await reward.score("42", "42") > await reward.score("41", "42")
        assert await reward.score("nothing to see", "42") == 0.0
    finally:
        await reward.close()


SERVICES = {"wandb", "trackio"}
"""Loggers that need a service's package; see tests/ext/loggers/test_services.py."""


@pytest.mark.parametrize("name", [n for n in built_in(loggers) if n not in SERVICES])
def test_logger_accepts_steps_in_order_and_closes(name: str, tmp_path: Path):
    logger = loggers.get(name)(tmp_path)
    logger.log(0, {"reward/mean": 0.25})
    logger.log(1, {"reward/mean": 0.5})
    logger.close()
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert written, "it left something below the run's folder"
    assert all(path.stat().st_size > 0 for path in written)


SERVED = {"openenv", "webarena", "harness", "verifiers"}
"""Environments that need an external server, which test_env.py starts, or agents from outside."""


@pytest.mark.parametrize("name", [installed(n) for n in built_in(envs) if n not in SERVED])
async def test_environment_can_be_set_up_and_closed_twice(name: str):
    for _ in range(2):
        env = players.make(name, **ADAPTERS.get(name, {}))
        await env.setup()
        await env.close()
    assert env.seats
