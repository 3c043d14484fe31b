"""The default environment: one answer and its score."""

from __future__ import annotations

import asyncio

import pytest

from arealite.api.agent import AgentFactory
from arealite.api.collector_config import AgentConfig
from arealite.api.env import EnvConfig, make_env
from arealite.api.reward import Reward, RewardConfig, Score, rewards
from arealite.api.task import Task
from arealite.base.errors import EpisodeError, RewardTimeout
from arealite.ext.math.config import MathEnvConfig
from tests.fakes.client import ScriptedClient, response
from tests.fakes.experiment import tokenizer


@rewards.register("length_match")
class LengthMatch(Reward):
    """Score 1 if the length of the completion is the ground truth, else 0."""

    state = "new"

    async def setup(self) -> None:
        self.state = "open"

    async def close(self) -> None:
        self.state = "closed"

    async def score(self, completion: str, ground_truth: str) -> float:
        assert self.state == "open"
        await asyncio.sleep(0)
        if ground_truth == "slow":
            raise RewardTimeout("killed after 2 s")
        if ground_truth == "parts":
            return Score(0.5, unchecked=1.0)
        return float(len(completion) == int(ground_truth))


def agent(stop_reason: str = "stop"):
    client = ScriptedClient(lambda request: response([10, 11, 12], stop_reason=stop_reason))
    factory = AgentFactory(None, client=client, tokenizer=tokenizer())
    return factory.make_agent(AgentConfig())


@pytest.fixture
async def env():
    config = EnvConfig(math=MathEnvConfig(reward=RewardConfig(type="length_match")))
    made = make_env(None, config)
    await made.setup()
    yield made
    await made.close()
    assert made.scorer.state == "closed"


@pytest.mark.parametrize("stop_reason", ["stop", "length"])
@pytest.mark.parametrize(("truth", "score"), [("3", 1.0), ("4", 0.0)])
async def test_answer_is_scored_truncated_or_not(env, truth, score, stop_reason) -> None:
    seat = agent(stop_reason)
    await env.run(Task(task_id="t", prompt="1+1=", ground_truth=truth, extra_info={}), agent=seat)
    assert [turn.reward for turn in seat.record.turns] == [score]
    assert seat.record.seconds_scoring > 0


async def test_task_without_ground_truth_fails_before_generating(env) -> None:
    seat = agent()
    with pytest.raises(EpisodeError, match="ground_truth"):
        await env.run(
            Task(task_id="t-3", prompt="1+1=", ground_truth=None, extra_info={}), agent=seat
        )
    assert not seat.client.requests


async def test_check_that_times_out_gives_no_reward(env) -> None:
    seat = agent()
    with pytest.raises(RewardTimeout):
        await env.run(
            Task(task_id="t", prompt="1+1=", ground_truth="slow", extra_info={}), agent=seat
        )
    assert [turn.reward for turn in seat.record.turns] == [0.0]


async def test_parts_of_a_score_are_parts_of_the_reward(env) -> None:
    seat = agent()
    await env.run(Task(task_id="t", prompt="1+1=", ground_truth="parts", extra_info={}), agent=seat)
    assert seat.record.turns[0].reward == 0.5
    assert seat.record.reward_parts == {"unchecked": 1.0}
