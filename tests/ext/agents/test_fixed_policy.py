"""A frozen model plays a seat, by a server of another trial or an endpoint."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from arealite.api.agent import Agent, AgentFactory, agents
from arealite.api.collector_config import AgentConfig, CollectorConfig
from arealite.api.env import Env, EnvConfig, envs
from arealite.api.episode import Seat
from arealite.api.experiment_config import ExperimentConfig, ModelConfig, name_dir
from arealite.api.llm import LLMClientConfig, SamplingConfig, ServersClientConfig
from arealite.api.task import Task
from arealite.api.trainer import PPOConfig, TrainerConfig
from arealite.api.trial import ClusterConfig
from arealite.api.turns import decode_turn
from arealite.base.errors import DeadlineError, RewardNotFinite, UserError
from arealite.ext.agents.completions_client import FixedPolicyFailed
from arealite.ext.agents.config import FixedPolicyConfig
from arealite.impl.rollout.collector import Collector
from arealite.system.names.name_registry import NameRegistry
from tests.ext.agents.conversations import chat_tokenizer
from tests.fakes.client import ScriptedClient, response
from tests.fakes.completions import FakeCompletions
from tests.fakes.experiment import lease, tokenizer
from tests.fakes.sglang import FakeSGLang

SAMPLING = SamplingConfig(temperature=0.5, max_new_tokens=4)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with another tokenizer than the trained model's."""
    folder, other = tmp_path_factory.mktemp("frozen"), chat_tokenizer("chatml")
    other.save_pretrained(folder)
    shape = {"vocab_size": len(other), "eos_token_id": other.eos_token_id}
    (folder / "config.json").write_text(json.dumps(shape))
    return folder


def experiment(tmp_path: Path, opponent: FixedPolicyConfig) -> ExperimentConfig:
    own = ServersClientConfig(refresh_s=0.05, request_timeout_s=600.0, connect_timeout_s=60.0)
    collector = CollectorConfig(
        env=EnvConfig(type="against"),
        agent=AgentConfig(type="chat"),
        seats={"other": AgentConfig(type="fixed_policy", fixed_policy=opponent)},
        client=LLMClientConfig(servers=own),
        sampling=SamplingConfig(max_new_tokens=8),
    )
    return ExperimentConfig(
        cluster=ClusterConfig(name_root=str(tmp_path / "names"), ttl_s=600.0, user="test"),
        model=ModelConfig(path="trained"),
        server_wait_s=60.0,
        trainer=TrainerConfig(ppo=PPOConfig(collector=collector)),
    )


@envs.register("against")
class TwoSeatEnv(Env):
    """The trained seat asks and the frozen seat answers, twice; both get a reward."""

    seats = ("agent", "other")
    resumable = True

    async def run(self, task: Task, **agents: Agent) -> None:
        said = task.prompt
        for _ in range(2):
            for agent in agents.values():
                said = (await agent.act(said)).text
        agents["agent"].reward(1.0)
        agents["other"].reward(-1.0)


@asynccontextmanager
async def collecting(config: ExperimentConfig):
    client = ScriptedClient(lambda _: response([10, 11, 12], version=7))
    collector = Collector(config, client, tokenizer())
    await collector.setup()
    try:
        yield collector
    finally:
        await collector.close()


@asynccontextmanager
async def frozen(tmp_path: Path, model: Path, **options: Any):
    """Yield a collector whose other seat uses a server of the trial judge/one."""
    own = {"server": "judge/one", "model_path": str(model), "sampling": SAMPLING} | options
    config = experiment(tmp_path, FixedPolicyConfig(**own))
    other = replace(config, experiment_name="judge", trial_name="one")
    names = NameRegistry(root=name_dir(other), ttl_s=600.0)
    async with FakeSGLang(next_token=lambda ids: 64 + len(ids) % 26) as server:
        names.put("llm_server", "s0", server.entry())
        async with collecting(config) as collector:
            yield server, collector


async def test_server_of_another_trial_uses_its_own_tokenizer(tmp_path, model) -> None:
    async with frozen(tmp_path, model, system_prompt="S") as (server, collector):
        episode, _ = await collector.run(lease(prompt="a", version=7), 0)
    assert episode.failure is None
    (header,) = episode.headers  # only the trained seat's
    assert (header.seat, header.reward, header.oldest_version) == ("agent", 1.0, 7)
    first, second = server.requests
    shown = chat_tokenizer("chatml").decode(second.input_ids)
    assert shown.startswith("<|turn|>system\nS<|end|>\n<|turn|>user\n789<|end|>\n")
    assert second.input_ids[: len(first.input_ids)] == first.input_ids
    params = first.sampling
    assert (params["temperature"], params["max_new_tokens"]) == (0.5, 4)


async def test_turns_are_recorded_without_a_version(tmp_path, model) -> None:
    async with frozen(tmp_path, model) as (server, collector):
        server.hold_after = 2
        task = asyncio.create_task(collector.run(lease(prompt="a", version=7), 0))
        await server.held(1)
        ((_, (asked,), _),) = collector.progress(True)
        server.release()
        await task
    assert (asked.seat, asked.oldest_version) == ("agent", 7)


async def test_recorded_answer_is_not_requested_again(tmp_path, model) -> None:
    told: list[Any] = []

    async with frozen(tmp_path, model) as (server, collector):
        rewards = Agent.reward

        def listen(agent: Agent, value: float) -> None:
            told.extend(collector.progress(True))
            rewards(agent, value)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Agent, "reward", listen)
            await collector.run(lease(prompt="a", version=7), 0)
        _, headers, payloads = told[0]
        assert [(h.seat, h.oldest_version) for h in headers] == [
            *[("agent", 7)] * 2,
            *[("other", 7)] * 2,
        ]
        assert {len(decode_turn(p).response.output_ids) for p in payloads} == {3, 4}
        asked = len(server.requests)
        again = lease(prompt="a", version=7)
        again.turns.extend(headers)
        episode, _ = await collector.run(again, 0, payloads)
        assert len(server.requests) == asked
    assert episode.failure is None


async def test_server_error_fails_the_episode_as_fixed_policy(tmp_path, model) -> None:
    async with frozen(tmp_path, model) as (server, collector):
        server.fail_next("400")
        episode, _ = await collector.run(lease(prompt="a"), 0)
    assert episode.failure.failure_class == "fixed_policy"
    assert "GenerationRefused" in episode.failure.detail


async def test_missing_server_fails_the_start(tmp_path, model) -> None:
    config = experiment(tmp_path, FixedPolicyConfig(server="judge/one", model_path=str(model)))
    with pytest.raises(DeadlineError, match=r"judge.one"):
        async with collecting(replace(config, server_wait_s=0.1)):
            pass


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({}, "set fixed_policy.server or fixed_policy.base_url"),
        ({"server": "a/b", "base_url": "http://h/v1"}, "and not both"),
        ({"server": "judge"}, "write EXPERIMENT/TRIAL"),
        ({"server": "a/b"}, "trained: this folder has no config.json"),
    ],
)
async def test_invalid_options_are_a_user_error(tmp_path, options, hint) -> None:
    with pytest.raises(UserError, match=hint):
        async with collecting(experiment(tmp_path, FixedPolicyConfig(**options))):
            pass


async def test_endpoint_gets_the_conversation_as_text(tmp_path) -> None:
    async with FakeCompletions("500") as server:
        opponent = FixedPolicyConfig(base_url=server.url, system_prompt="S")
        async with collecting(experiment(tmp_path, opponent)) as collector:
            episode, _ = await collector.run(lease(prompt="a"), 0)
    assert episode.failure is None
    assert [header.seat for header in episode.headers] == ["agent"]
    assert [message["content"] for message in server.bodies[-1]["messages"]] == [
        *("S", "789", "2: 789", "789"),
    ]


async def test_endpoint_error_fails_the_episode(tmp_path) -> None:
    async with FakeCompletions("401") as server:
        opponent = FixedPolicyConfig(base_url=server.url)
        async with collecting(experiment(tmp_path, opponent)) as collector:
            episode, _ = await collector.run(lease(prompt="a"), 0)
    assert episode.failure.failure_class == "fixed_policy"
    assert "HTTP 401" in episode.failure.detail


async def test_endpoint_agent_stops_after_max_turns(tmp_path) -> None:
    async with FakeCompletions() as server, AsyncExitStack() as stack:
        config = AgentConfig(
            type="fixed_policy", fixed_policy=FixedPolicyConfig(base_url=server.url, max_turns=1)
        )
        factory = AgentFactory(None, client=ScriptedClient(), tokenizer=tokenizer())
        await factory.share(config, stack)
        agent = factory.make_agent(config, Seat(name="other"))
        actions = [await agent.act("a") for _ in range(2)]
        assert [(action.text, action.is_last) for action in actions] == [("1: a", True), ("", True)]
        with pytest.raises(RewardNotFinite, match="finite"):
            agent.reward(float("inf"))
    assert len(server.bodies) == 1


def test_all_failures_have_one_class() -> None:
    assert FixedPolicyFailed.failure_class == "fixed_policy"
    assert not agents.get("fixed_policy").trainable
