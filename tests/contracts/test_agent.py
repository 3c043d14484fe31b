"""The contract of all agents. Add a new agent to AGENTS."""

from __future__ import annotations

import pytest

from arealite.api.agent import Agent, AgentFactory, agents
from arealite.api.collector_config import AgentConfig
from arealite.api.episode import Action, Seat
from arealite.api.llm import SamplingConfig
from arealite.base.errors import RewardNotFinite
from arealite.ext.agents.config import FixedPolicyConfig, ScriptedConfig
from tests.fakes.client import ScriptedClient, response
from tests.fakes.experiment import tokenizer
from tests.impl.rollout import worlds

AGENTS = [
    *("math_code_single_step", "chat", "tool_use", "reasoning", "scripted", "fixed_policy"),
    *("shouting", "judge"),
]
GENERATING = [name for name in AGENTS if name != "scripted"]
"""Agents that sample through a client: the trial's client or, if frozen, their own."""
SEAT = Seat(
    name="left",
    group_id="group-3",
    episode_id="lease-1/2",
    min_version=5,
    sampling=SamplingConfig(temperature=0.25),
)


def make(name: str) -> Agent:
    assert worlds is not None
    client = ScriptedClient(lambda request: response([10, 11, 12]))
    factory = AgentFactory(None, client=client, tokenizer=tokenizer())
    frozen = FixedPolicyConfig(sampling=SEAT.sampling)
    config = AgentConfig(type=name, scripted=ScriptedConfig(answers=["789"]), fixed_policy=frozen)
    agent = factory.make_agent(config, SEAT)
    if name == "fixed_policy":
        agent.shared = client, tokenizer()
    return agent


def test_every_built_in_agent_is_tested() -> None:
    built_in = {name for name, target in agents._table.items() if "arealite" in str(target)}
    assert built_in <= set(AGENTS)


@pytest.mark.parametrize("name", GENERATING)
async def test_agent_returns_an_action_and_records_sampled_turns(name: str) -> None:
    agent = make(name)
    action = await agent.act("1+1=")
    assert isinstance(action, Action)
    assert isinstance(action.text, str)
    turns = agent.record.turns
    assert len(turns) == len(agent.client.requests) >= 1
    for turn, request in zip(turns, agent.client.requests, strict=True):
        assert turn.input_ids == request.input_ids
        assert turn.response.output_ids == [10, 11, 12]
        assert turn.temperature == 0.25


@pytest.mark.parametrize("name", GENERATING)
async def test_requests_have_unique_ids_and_the_seat(name: str) -> None:
    agent = make(name)
    await agent.act("a")
    await agent.act("b")
    requests = agent.client.requests
    assert len({request.request_id for request in requests}) == len(requests)
    for request in requests:
        assert request.request_id.startswith("lease-1/2/left/")
        # A frozen server is never updated, so requests have no min_version.
        oldest = 0 if name == "fixed_policy" else 5
        assert (request.group_id, request.min_version) == ("group-3", oldest)
        assert request.sampling is SEAT.sampling


@pytest.mark.parametrize("name", GENERATING)
async def test_rewards_go_to_the_latest_turn(name: str) -> None:
    agent = make(name)
    if agent.trainable:
        with pytest.raises(RuntimeError):
            agent.reward(1.0)
    await agent.act("a")
    agent.reward(1.0, style=0.5)
    await agent.act("b")
    agent.reward(0.25, style=0.5)
    agent.reward(0.25)
    turns = agent.record.turns
    assert (turns[0].reward, turns[-1].reward) == (1.0, 0.5)
    assert agent.record.reward_parts.items() >= {"style": 1.0}.items()
    with pytest.raises(RewardNotFinite, match="finite"):
        agent.reward(float("nan"))


@pytest.mark.parametrize(
    "odd", [None, 5, b"a", {"role": "user"}, ["a"], [{"role": "user", "content": None}]]
)
@pytest.mark.parametrize("name", sorted({*GENERATING} - {"shouting"}))
async def test_invalid_observation_is_a_type_error(name: str, odd: object) -> None:
    with pytest.raises(TypeError, match="a text or chat messages"):
        await make(name).act(odd)


@pytest.mark.parametrize("name", AGENTS)
async def test_agents_share_no_state(name: str) -> None:
    first, second = make(name), make(name)
    await first.act("a")
    assert not second.record.turns
    said = [(await agent.act("b")).text for agent in (make(name), second)]
    assert said[0] == said[1]


async def test_rewards_of_an_untrained_seat_without_turns_are_discarded() -> None:
    agent = make("judge")
    agent.reward(1.0, style=0.5)
    assert agent.record.turns == []
    with pytest.raises(RewardNotFinite, match="finite"):
        agent.reward(float("inf"))
