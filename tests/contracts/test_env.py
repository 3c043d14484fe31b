"""The contract of all environments. Add a new environment to ENVS, with a task that it can play."""

from __future__ import annotations

import asyncio
import inspect
import random
from contextlib import AsyncExitStack

import pytest
from msgspec import structs

from arealite.api.agent import Agent
from arealite.api.env import Env, EnvConfig, envs, make_env
from arealite.api.reward import RewardConfig
from arealite.api.rollout_messages import TurnHeader
from arealite.api.trajectory import TrajectoryHeader
from arealite.ext.adapters.config import OpenEnvConfig
from arealite.ext.adapters.openenv import OpenEnvEnv
from arealite.ext.math.config import MathEnvConfig
from arealite.ext.tools.config import ToolsEnvConfig
from arealite.ext.web.config import BrowserConfig
from arealite.impl.rollout.collector import Collector
from arealite.system.data.dataset import make_task
from tests.ext.games import players
from tests.ext.harness.harnesses import configured
from tests.ext.math import test_env as test_math  # registers the reward
from tests.ext.web.browser.sites import one_task
from tests.fakes.client import ScriptedClient, response
from tests.fakes.env_servers import hosted
from tests.fakes.experiment import experiment, lease, tokenizer
from tests.fakes.foreign import ADAPTERS, installed
from tests.impl.rollout import worlds  # registers the environments

ENVS = {
    "math": ("1+1=", "3"),
    "code": ("play", None),
    "debate": ("Cats are cute.", None),
    "matrix_game": ("play", None),
    "iterated_prisoners_dilemma": ("play", None),
    "reverse": ("abc", None),
    "reverse_echo": ("reverse abc\necho def", None),
    "tic_tac_toe": ("play", None),
    "tools": ("1+1=", "3"),
    "harness": ("play", None),
    "gymnasium": ("play", None),
    "gyllm": ("play", None),
    "reasoning_gym": ("play", None),
    "textarena": ("play", None),
    "openenv": ("play", None),
    "browser": ("play", None),
    "webarena": ("play", None),
    "world": ("ok", None),
    "duel": ("go", None),
    "counter": ("a", None),
}
FOREIGN = {"harness", "verifiers"}
"""Environments whose agents come from outside and use the gateway; they have tests of their own."""
ANSWERS = {"tic_tac_toe": [10]}
"""Tokens of the answer that lets all seats act, for environments that need a special answer."""


@pytest.fixture(params=[installed(name) for name in ENVS])
async def played(request, tmp_path):
    """A collector with the environment, and the lease to play."""
    prompt, truth = ENVS[request.param]
    config = experiment(request.param)
    if request.param == "harness":
        config = configured(run="number")
    client = ScriptedClient(lambda _: response(ANSWERS.get(request.param, [10, 11, 12])))
    made = Collector(config, client, tokenizer())
    if request.param in ("math", "tools"):
        assert test_math is not None
        score = RewardConfig(type="length_match")
        math, tools = MathEnvConfig(reward=score), ToolsEnvConfig(reward=score)
        own = EnvConfig(type=request.param, math=math, tools=tools)
        made.parts[""] = made.parts[""]._replace(env=make_env(config, own))
    members = 4 if request.param in ("browser", "webarena") else 32
    work = lease(prompt=prompt, ground_truth=truth, members=members)
    async with AsyncExitStack() as stack:
        options = ADAPTERS.get(request.param)
        if request.param == "webarena":
            options = await stack.enter_async_context(one_task(tmp_path))
            options["browser"] = BrowserConfig(contexts=4, timeout_s=60.0)
        if options is not None:
            env = players.make(request.param, **options)
            made.parts[""] = made.parts[""]._replace(env=env)
            row = make_task(*players.first_rows(env, 1), "train-0", "here")
            work = structs.replace(work, task=row)
        if request.param == "openenv":  # `arealite serve` is an OpenEnv server
            _, address = await stack.enter_async_context(hosted("host_steps"))
            action, seen = {"text": "{text}"}, ["content"]
            own = OpenEnvConfig(addresses=[address], action=action, observation=seen, max_steps=3)
            made.parts[""] = made.parts[""]._replace(env=OpenEnvEnv(config, own))
        await made.setup()
        yield made, work
        await made.close()


def test_every_built_in_environment_is_tested() -> None:
    assert worlds is not None
    built_in = {name for name, target in envs._table.items() if "arealite" in str(target)}
    assert built_in <= {*ENVS, *FOREIGN}


async def test_environment_has_unique_seat_names(played) -> None:
    env: Env = played[0].parts[""].env
    assert env.seats
    assert len(set(env.seats)) == len(env.seats)
    assert inspect.iscoroutinefunction(env.run)


async def test_episode_gives_every_seat_a_finite_reward(played) -> None:
    collector, work = played
    episode, payloads = await collector.run(work, 0)
    assert episode.failure is None
    assert [header.seat for header in episode.headers] == list(collector.parts[""].env.seats)
    assert len(payloads) == len(episode.headers)
    assert all(header.trained_tokens > 0 for header in episode.headers)


async def test_episodes_run_concurrently(played) -> None:
    collector, work = played
    client = collector._agents.client
    client.gate.clear()
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(collector.run(work, member)) for member in work.members]
        await client.received(
            len(work.members)
        )  # all episodes wait for a generation at the same time
        client.gate.set()
    ids = [header.trajectory_id for task in running for header in task.result()[0].headers]
    assert len(set(ids)) == len(ids) == len(work.members) * len(collector.parts[""].env.seats)


async def test_cancelled_episode_ends_its_generations(played) -> None:
    collector, work = played
    client = collector._agents.client
    client.gate.clear()
    task = asyncio.create_task(collector.run(work, 0))
    await client.received(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(client.cancelled) == len(client.requests)


def resumable() -> list[str]:
    assert worlds is not None
    return [name for name in ENVS if envs.get(name).resumable]


@pytest.mark.parametrize("played", resumable(), indirect=True)
async def test_replayed_generations_give_the_same_trajectory(played) -> None:
    """An episode interrupted after any generation resumes to the same end without repeating one."""
    collector, work = played
    client = collector._agents.client
    client.script = drawing(1)
    rewards = Agent.reward

    def listen(agent: Agent, *values: float, **parts: float) -> None:
        """Collect the progress at each reward: by then the generation must have been reported."""
        told.extend(collector.progress(True))
        rewards(agent, *values, **parts)

    told: list[tuple[object, list[TurnHeader], list[bytes]]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Agent, "reward", listen)
        whole, payloads = await collector.run(work, 0)
    assert whole.failure is None
    _, headers, frames = told[-1]
    ledger = list(zip(headers, frames, strict=True))
    asked, seats = len(client.requests), collector.parts[""].env.seats
    assert len(ledger) == asked
    for kept in range(1, asked + 1):
        client.requests.clear()
        client.script = drawing(1, skip=kept)
        turns = sorted(ledger, key=lambda each: (each[0].index, seats.index(each[0].seat)))[:kept]
        turns.sort(key=lambda each: (each[0].seat, each[0].index))
        again = structs.replace(work, lease_id="again", turns=[turn for turn, _ in turns])
        episode, replayed = await collector.run(again, 0, [payload for _, payload in turns])
        assert len(client.requests) == asked - kept
        assert replayed == payloads
        assert [pure(h) for h in episode.headers] == [pure(h) for h in whole.headers]


def drawing(seed: int, *, skip: int = 0):
    """Return a script with random answers; `skip` omits the first ones."""
    rng = random.Random(seed)

    def script(_):
        return response([rng.randrange(10, 40) for _ in range(3)])

    for _ in range(skip):
        script(None)
    return script


def pure(header: TrajectoryHeader) -> TrajectoryHeader:
    """Return a header without durations."""
    return structs.replace(header, seconds=0.0, waits={})
