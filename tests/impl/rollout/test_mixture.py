"""Several environments in one collector: each task uses its environment and its agents."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from arealite.api.collector_config import AgentConfig, PartConfig
from arealite.api.env import EnvConfig
from arealite.api.rollout_messages import Lease
from arealite.base.errors import UserError
from arealite.impl.rollout.collector import Collector
from tests.fakes.client import ScriptedClient, response
from tests.fakes.experiment import experiment, lease, tokenizer
from tests.impl.rollout import worlds  # registers the environments


def part(env: str, **seats: str) -> PartConfig:
    agents = {seat: AgentConfig(type=kind) for seat, kind in seats.items()}
    return PartConfig(env=EnvConfig(type=env), seats=agents)


def mixed(**envs: PartConfig) -> Collector:
    config = experiment(envs=envs)
    return Collector(config, ScriptedClient(lambda request: response([10, 11])), tokenizer())


def of(env: str | None, **about: Any) -> Lease:
    made = lease(**about)
    extra = {} if env is None else {"env": env}
    return structs.replace(made, task=structs.replace(made.task, extra_info=extra))


async def test_each_task_runs_in_its_environment() -> None:
    made = mixed(alone=part("world"), pair=part("duel", second="judge"))
    opened, closed = worlds.World.opened, worlds.World.closed
    await made.setup()
    one, _ = await made.run(of("alone", prompt="ok"), 0)
    two, _ = await made.run(of("pair", prompt="go"), 0)
    await made.close()
    assert [(h.seat, h.source) for h in one.headers] == [("agent", "alone")]
    assert [(h.seat, h.source) for h in two.headers] == [("first", "pair")], (
        "a judge is not trained"
    )
    assert (worlds.World.opened, worlds.World.closed) == (opened + 1, closed + 1)


@pytest.mark.parametrize(("env", "named"), [("alonge", "'alonge'.*alone"), (None, "''")])
async def test_task_with_an_unknown_environment_is_a_user_error(
    env: str | None, named: str
) -> None:
    with pytest.raises(UserError, match=rf"train-0: .*environment {named}"):
        await mixed(alone=part("world")).run(of(env), 0)


async def test_agent_for_an_unknown_seat_is_refused_and_opened_environments_are_closed() -> None:
    opened, closed = worlds.World.opened, worlds.World.closed
    with pytest.raises(UserError, match=r"duel: .*seat 'secnd'.*second"):
        await mixed(alone=part("world"), pair=part("duel", secnd="judge")).setup()
    assert (worlds.World.opened, worlds.World.closed) == (opened + 1, closed + 1)


async def test_single_environment_runs_every_task() -> None:
    made = Collector(
        experiment("world"), ScriptedClient(lambda request: response([10])), tokenizer()
    )
    episode, _ = await made.run(of("any", prompt="ok"), 0)
    assert [header.source for header in episode.headers] == ["any"]
