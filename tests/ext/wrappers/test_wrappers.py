"""Wrappers change what agents observe and earn, for Requests and in training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from arealite.api.env import envs
from arealite.base.errors import UserError
from arealite.ext.games.debate.env import DebateEnv
from arealite.ext.wrappers.play import Requests, make, make_vec
from arealite.ext.wrappers.wrappers import (
    Record,
    ScaleReward,
    TimeLimit,
    TransformObservation,
    Wrapper,
    wrap,
)
from tests.fakes import env_hosts
from tests.fakes.env_servers import collecting, failed, played

GENTLE: list[Any] = [TimeLimit(2), ScaleReward(0.5, bias=-0.125)]
SEEN: list[dict[str, Any]] = []
envs.register("host_gentle")(wrap(env_hosts.Steps, *GENTLE, Record(SEEN)))


def played_steps(*wrappers: Wrapper, steps: int = 3) -> list[Any]:
    """Return the only Request of each step; an episode gives 0.5 for each step."""
    with make("host_steps", wrappers=wrappers) as env:
        env.reset(task="begin")
        return [env.step("go")[0] for _ in range(steps)]


def test_time_limit_ends_the_episode_and_keeps_its_rewards() -> None:
    first, last = played_steps(TimeLimit(2), steps=2)
    assert (first.done, last.done, last.reward, last.info) == (False, True, 0.5, {"truncated": 1.0})
    with make("tic_tac_toe", opening_moves=0, wrappers=[TimeLimit(1)]) as env:
        env.reset(seed=1)
        env.step("1")
        x, o = env.step("2")  # x has to act a second time
        assert (x.done, o.done, x.reward, o.reward) == (True, True, 0.0, 0.0)
        assert env.reset(seed=1)[0].needs_action
    with pytest.raises(UserError, match=r"TimeLimit\(0\): an episode needs at least one action"):
        TimeLimit(0)


def test_rewards_are_scaled_and_clipped_and_each_action_adds_the_bias() -> None:
    assert [each.reward for each in played_steps(ScaleReward(3.0))] == [1.5] * 3
    assert [each.reward for each in played_steps(ScaleReward(-3.0, clip=1.0))] == [-1.0] * 3
    assert [each.reward for each in played_steps(ScaleReward(3.0, clip=1.0, bias=0.25))] == [
        1.25
    ] * 3
    first, second = ScaleReward(2.0), ScaleReward(clip=0.75)
    assert played_steps(first, second)[0].reward == 1.0  # the first one is next to the agent
    assert played_steps(second, first)[0].reward == 0.75


def test_observation_is_transformed_and_keeps_choices() -> None:
    upper = TransformObservation(lambda seen: str(seen).upper())
    assert str(played_steps(upper)[0].observation) == "STEP 1: GO"
    few = TransformObservation(lambda seen: structs.replace(seen, choices=seen.choices[:1]))
    with make("tic_tac_toe", wrappers=[few, upper]) as env:
        (request,) = env.reset(task="play")
        assert str(request.observation).startswith("TIC-TAC-TOE.")
        assert request.observation.choices == ("1",)


def test_events_of_every_episode_are_recorded_in_a_list_or_a_file(tmp_path: Path) -> None:
    events, file = [], tmp_path / "events.jsonl"
    with make_vec("host_steps", 2, wrappers=[Record(events), Record(file)]) as env:
        requests = env.reset(task="begin")
        env.step({each.actor: "end" for each in requests})
    assert [json.loads(line) for line in file.read_text().splitlines()] == events
    kinds = [
        {**event, "episode": ""} for event in events if event["episode"] == events[0]["episode"]
    ]
    agent = {"episode": "", "actor": "agent"}
    expected = [{"observation": "begin"}, {"action": "end"}, {"reward": 0.5}]
    assert kinds == [agent | each for each in expected]
    assert len({event["episode"] for event in events}) == 2


async def test_wrapped_environment_trains_under_its_own_name() -> None:
    SEEN.clear()
    async with collecting("host_gentle") as collector:
        assert collector.parts[""].env.resumable
        episode = await played(collector, "begin")
    assert failed(episode) is None
    (header,) = episode.headers
    assert header.reward == 2 * (0.5 * 0.5 - 0.125)
    assert header.reward_parts["truncated"] == 1.0
    assert [event["reward"] for event in SEEN if "reward" in event] == [0.5, 0.5]


def test_wrapped_class_has_the_options_of_its_base() -> None:
    envs.register("short_debate")(wrap(DebateEnv, TimeLimit(1)))
    with make("short_debate", rounds=3) as env:
        requests = env.reset(task="Cats are cute.")
        while any(each.needs_action for each in requests):
            requests = env.step({each.actor: "Yes." for each in requests if each.needs_action})
        assert all(each.done for each in requests)


class Doubled(Wrapper):
    """A wrapper of a user: rewards count twice."""

    def reward(self, value: float, **parts: float) -> None:
        self.agent.reward(2 * value, **parts)


def test_own_wrapper_overrides_one_method() -> None:
    assert played_steps(Doubled())[0].reward == 1.0


def scaled(**options: Any) -> Requests:
    """Create a Request environment, for `env.gyllm.factory`."""
    return make("tic_tac_toe", wrappers=[ScaleReward(0.5)], **options)
