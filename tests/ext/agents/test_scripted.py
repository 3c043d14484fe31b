"""Scripted agents act the same in every attempt."""

from __future__ import annotations

import pytest

from arealite.api.agent import Agent, AgentFactory
from arealite.api.collector_config import AgentConfig
from arealite.api.episode import Seat
from arealite.api.observation import Observation
from arealite.base.errors import RewardNotFinite, UserError
from arealite.ext.agents.config import ScriptedConfig
from arealite.ext.agents.scripted import ScriptedAgent
from tests.fakes.client import ScriptedClient
from tests.fakes.experiment import tokenizer

CHOICES = Observation("move", choices=tuple("abcdefgh"))


def scripted(group: str = "g", episode: str = "lease/0", name: str = "o", **options) -> Agent:
    config = AgentConfig(type="scripted", scripted=ScriptedConfig(**options))
    factory = AgentFactory(None, client=ScriptedClient(), tokenizer=tokenizer())
    return factory.make_agent(config, Seat(name=name, group_id=group, episode_id=episode))


async def says(agent: Agent, turns: int = 6) -> str:
    return "".join([(await agent.act(CHOICES)).text for _ in range(turns)])


async def test_answers_are_given_in_order_and_repeat() -> None:
    assert await says(scripted(answers=["x", "y"]), 5) == "xyxyx"


async def test_policy_first_takes_the_first_choice() -> None:
    assert await says(scripted(policy="first"), 3) == "aaa"


async def test_random_choices_are_the_same_in_each_attempt() -> None:
    first = await says(scripted(policy="random", episode="lease-1/3"))
    assert first == await says(scripted(policy="random", episode="again/3"))
    others = [
        {"episode": "lease-1/4"},
        {"episode": "lease-1/3", "group": "h"},
        {"episode": "lease-1/3", "name": "x"},
        {"episode": "lease-1/3", "seed": 1},
    ]
    drawn = {await says(scripted(policy="random", **other)) for other in others}
    assert len(drawn | {first}) == 5
    assert len(set(first)) > 1


async def test_scripted_agent_samples_nothing_and_takes_rewards() -> None:
    agent = scripted(answers=["x"])
    agent.reward(1.0, win=1.0)
    action = await agent.act("a")
    agent.reward(-1.0)
    assert action.response is None
    assert not agent.trainable
    assert not agent.record.turns
    with pytest.raises(RewardNotFinite, match="finite"):
        agent.reward(float("nan"))


async def test_missing_answers_or_choices_are_a_user_error() -> None:
    with pytest.raises(UserError, match=r"needs scripted\.answers"):
        ScriptedAgent.share(None, ScriptedConfig())
    with pytest.raises(UserError, match="offers choices"):
        await scripted(policy="random").act("a")
