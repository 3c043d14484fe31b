"""OpenEnv servers: observations as text, and failure classes of faulty servers."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from itertools import islice
from typing import Any

import pytest

from arealite.api.env import EnvConfig
from arealite.api.rollout_messages import Lease
from arealite.api.task import Task
from arealite.base.errors import UserError
from arealite.ext.adapters.config import OpenEnvConfig
from arealite.ext.adapters.openenv import OpenEnvEnv
from arealite.impl.rollout.collector import Collector
from tests.fakes.client import ScriptedClient, response
from tests.fakes.env_servers import failed, fake_openenv, hosted
from tests.fakes.experiment import experiment, tokenizer
from tests.waiting import eventually


def observed(reward: Any = 1.0, *, done: bool = True, **fields: Any) -> Any:
    data = {"observation": fields or {"message": "hi"}, "reward": reward, "done": done}
    return {"type": "observation", "data": data}


@asynccontextmanager
async def playing(*addresses: str, **options: Any) -> Any:
    """Yield a collector that plays in OpenEnv servers."""
    own = OpenEnvConfig(**{"addresses": list(addresses), "wait_s": 60.0} | options)
    config = experiment("openenv")
    object.__setattr__(config.trainer.ppo.collector, "env", EnvConfig(type="openenv", openenv=own))
    client = ScriptedClient(lambda _: response([10, 11, 12]))
    collector = Collector(config, client, tokenizer())
    await collector.setup()
    try:
        yield collector
    finally:
        await collector.close()


async def play(collector: Collector, prompt: Any = "play.", **extra: Any) -> Any:
    work = Lease(
        lease_id="l",
        group_id="g",
        split="train",
        task=Task(task_id="train-0", prompt=prompt, ground_truth=None, extra_info=extra),
        members=[0],
        version=0,
    )
    return (await collector.run(work, 0))[0]


async def test_echo_server_is_played_until_done() -> None:
    said: list[Any] = []

    def echo(message: Any, _: Any) -> Any:
        said.append(message)
        if message["type"] == "reset":
            return observed(0.0, done=False, echoed_message="ready", message_length=0)
        text = message["data"]["message"]
        reward = [True, 0.25, None][min(len(said) - 2, 2)]
        return observed(reward, done=len(said) == 4, echoed_message=text)

    async with fake_openenv(echo) as address, playing(address) as collector:
        episode = await play(collector, reset={"seed": 3})
        (header,) = episode.headers
        assert (header.reward, header.turns) == (1.25, 3)
        text = tokenizer().decode([10, 11, 12])
        steps = [{"type": "step", "data": {"message": text}}] * 3
        assert said == [{"type": "reset", "data": {"seed": 3}}, *steps]
        prompts = [tokenizer().decode(r.input_ids) for r in collector._agents.client.requests]
        assert prompts[0].endswith("ready")
        assert prompts[0].startswith("play.")
        assert prompts[1] == text


async def test_episode_ends_at_max_steps_and_invalid_actions_are_reported() -> None:
    def strict(message: Any, _: Any) -> Any:
        if message["type"] == "reset":
            return observed(done=False)
        return {"type": "error", "data": {"message": "no such move", "code": "VALIDATION_ERROR"}}

    async with fake_openenv(strict) as address, playing(address, max_steps=4) as collector:
        (header,) = (await play(collector)).headers
        assert (header.reward, header.turns) == (0.0, 4)
        last = collector._agents.client.requests[-1].input_ids
        assert "no such move" in tokenizer().decode(last)


async def flood(socket: Any) -> Any:
    for _ in range(500):
        await socket.send_json(observed(message="x" * 1000, done=False))
    return observed(done=False)


WRONG = {
    "error": lambda _: {"type": "error", "data": {"message": "boom", "code": "EXECUTION_ERROR"}},
    "nan": lambda _: '{"type": "observation", "data": {"observation": {}, "reward": NaN}}',
    "text reward": lambda _: observed("much"),
    "no json": lambda _: "<html>",
    "no type": lambda _: {"data": {}},
    "binary": lambda socket: socket.send_bytes(b"\xff\xfe"),
    "long": lambda _: observed(message="x" * 100_000),
    "close": lambda socket: socket.close(),
    "silence": lambda _: None,
    "flood": flood,
}


def wrong(kind: str) -> Any:
    """Serve an environment that answers a reset and then violates the protocol."""

    def answer(message: Any, socket: Any) -> Any:
        return observed(done=False) if message["type"] == "reset" else WRONG[kind](socket)

    return answer


@pytest.mark.parametrize(
    ("kind", "counted"),
    {
        "error": "env_server_error",
        "nan": "env_server_garbage",
        "text reward": "env_server_garbage",
        "no json": "env_server_garbage",
        "no type": "env_server_garbage",
        "binary": "env_server_garbage",
        "long": "env_message_too_large",
        "close": "env_server_lost",
        "silence": "env_step_timeout",
        "flood": "env_server_garbage",
    }.items(),
)
async def test_faulty_server_fails_the_episode_with_its_class(kind: str, counted: str) -> None:
    async with (
        fake_openenv(wrong(kind)) as address,
        playing(
            address, max_message_kb=64, answer_s=0.2 if kind == "silence" else 60.0
        ) as collector,
    ):
        episodes = await asyncio.gather(*(play(collector) for _ in range(3)))
        assert {failed(episode) for episode in episodes} == {counted}
        assert not any(episode.headers for episode in episodes)
        assert [server.load for server in collector.parts[""].env.servers.known] == [0]


async def test_dead_and_frozen_servers_are_lost() -> None:
    async with playing("127.0.0.1:9", wait_s=0.1) as collector:
        assert failed(await play(collector)) == "env_server_lost"

    frozen = asyncio.Event()

    async def health(request: Any) -> Any:
        from aiohttp import web

        if frozen.is_set():
            await asyncio.Event().wait()
        return web.json_response({})

    def stuck(message: Any, _: Any) -> Any:
        frozen.set()
        return None

    async with (
        fake_openenv(stuck, health=health) as address,
        playing(address, silence_s=0.1, answer_s=60.0) as collector,
    ):
        assert failed(await play(collector)) == "env_server_lost"


async def test_arealite_serve_is_an_openenv_server() -> None:
    async with hosted("host_steps") as (server, address):
        options = {"action": {"text": "{text}"}, "observation": ["content"], "max_steps": 3}
        async with playing(address, **options) as collector:
            (header,) = (await play(collector, reset={"seed": 1})).headers
            assert (header.reward, header.turns) == (1.5, 3)
            first = collector._agents.client.requests[0].input_ids
            assert tokenizer().decode(first).endswith("train 1")
        await eventually(lambda: not server.sessions)


def test_observations_become_text_and_text_becomes_an_action() -> None:
    def env(**options: Any) -> OpenEnvEnv:
        return OpenEnvEnv(None, OpenEnvConfig(addresses=["a:1"], **options))

    plain = env()
    assert plain.text({"message": "m", "prompt": "p", "metadata": {}}) == "m"
    assert plain.text({"board": [1, 2]}) == '{"board": [1, 2]}'
    assert plain.text("as it is") == "as it is"
    assert plain.action("hi {text}") == {"message": "hi {text}"}
    chosen = env(observation=["board", "note"], action={"n": "{json}", "say": "I: {text}", "k": 1})
    assert chosen.text({"board": [1], "note": "x"}) == "board: [1]\nnote: x"
    assert chosen.action("7") == {"n": 7, "say": "I: 7", "k": 1}
    assert chosen.action("up")["n"] == "up"
    assert env(action="{json}").action('{"a": 1}') == {"a": 1}
    messages = plain.first(
        Task(
            task_id="t", prompt=[{"role": "user", "content": "q"}], ground_truth=None, extra_info={}
        ),
        {"text": "a"},
    )
    assert messages == [{"role": "user", "content": "q"}, {"role": "user", "content": "a"}]


def test_rows_seed_the_server_and_splits_differ() -> None:
    def seeds(split: str, seed: int) -> list[int]:
        rows = islice(OpenEnvEnv.rows(OpenEnvConfig(), split=split, seed=seed), 50)
        return [row["extra_info"]["reset"]["seed"] for row in rows]

    assert seeds("train", 1) == seeds("train", 1)
    assert len({*seeds("train", 1), *seeds("train", 2), *seeds("eval", 1)}) == 150


async def test_missing_addresses_are_a_user_error() -> None:
    with pytest.raises(UserError, match="addresses"):
        async with playing():
            pass
