"""The environment server: OpenEnv's messages, isolated sessions, limits."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from arealite.api.agent import Agent
from arealite.api.env import Env, EnvConfig
from arealite.api.reward import RewardConfig
from arealite.api.task import Task
from arealite.base.errors import UserError
from arealite.ext.hosting.server.env_app import EnvServer
from arealite.ext.hosting.server.env_session import EnvSession
from arealite.ext.hosting.server_config import EnvServerConfig, Reset, Step
from arealite.ext.math.config import MathEnvConfig
from arealite.ext.rewards.config import FunctionRewardConfig
from arealite.system.health.waits import table
from tests.fakes.env_hosts import Moods
from tests.fakes.env_servers import Wire, hosted, wired
from tests.impl.rollout import worlds
from tests.waiting import eventually

assert worlds is not None


async def test_steps_return_observations_and_rewards_until_the_episode_is_done() -> None:
    async with hosted("host_steps") as (_, address), wired(address) as wire:
        first = await wire.reset("go")
        assert first == {
            "observation": {"seat": "agent", "turn": 1, "content": "go"},
            "reward": None,
            "done": False,
        }
        then = await wire.ask("step", {"text": "hi"})
        assert (then["observation"]["content"], then["reward"]) == ("step 1: hi", 0.5)
        assert (await wire.ask("state"))["step_count"] == 1
        end = await wire.ask("step", {"text": "end", "metadata": {}})
        assert (end["done"], end["reward"]) == (True, 0.5)
        rewards = [{"seat": "agent", "turn": 2, "value": 0.5, "parts": {}}]
        assert end["observation"] == {"rewards": rewards}
        assert (await wire.reset("again"))["observation"]["content"] == "again"


@pytest.mark.parametrize(
    ("kind", "data", "code"),
    [
        ("step", {"text": "a"}, "VALIDATION_ERROR"),  # before a reset
        ("step", {"message": "a"}, "VALIDATION_ERROR"),
        ("step", {"text": "a", "seat": "nobody"}, "VALIDATION_ERROR"),
        ("step", {"text": 5}, "VALIDATION_ERROR"),
        ("reset", {"task": {"prompt": ""}}, "VALIDATION_ERROR"),
        ("reset", {"seed": "x"}, "VALIDATION_ERROR"),
        ("dance", {}, "UNKNOWN_TYPE"),
        ("batch", [{"type": "state"}], "UNKNOWN_TYPE"),
    ],
)
async def test_invalid_message_is_refused_and_changes_nothing(kind, data, code) -> None:
    async with hosted("host_steps") as (_, address), wired(address) as wire:
        refused = await wire.ask(kind, data)
        assert refused["code"] == code
        assert not refused["failure_class"]
        await wire.reset("go")
        refused = await wire.ask(kind, data)
        if (kind, data) != ("step", {"text": "a"}):
            assert refused["code"] == code
            assert (await wire.ask("step", {"text": "a"}))["reward"] == 0.5


@pytest.mark.parametrize("raw", ["{", "[]", '{"data": {}}', "\x00", '"reset"'])
async def test_malformed_json_is_refused_and_the_session_continues(raw: str) -> None:
    async with hosted("host_steps") as (_, address), wired(address) as wire:
        await wire.socket.send_str(raw)
        answer = await wire.receive()
        assert answer["type"] == "error"
        assert answer["data"]["code"] in ("INVALID_JSON", "VALIDATION_ERROR")
        assert (await wire.reset("go"))["done"] is False


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b'{"type": "reset", "data": ' + b"[" * 40_000, "INVALID_JSON"),
        (
            b'{"type": "reset", "data": {"task": ' + b'{"a":' * 40_000 + b"1" + b"}" * 40_002,
            "INVALID_JSON",
        ),
        (b'{"type": "reset", "data": {"task": {"prompt": "\xff"}}}', "INVALID_JSON"),
        (b'{"type": "reset", "data": {"seed": 1' + b"0" * 5_000 + b"}}", "VALIDATION_ERROR"),
        (b'{"type": "reset", "data": {"task": [' + b"[]," * 70_000 + b"1]}}", "TOO_MANY_PARTS"),
    ],
    ids=["open", "deep", "no text", "long number", "many parts"],
)
async def test_message_too_costly_to_decode_is_refused_and_changes_nothing(
    raw: bytes, code: str
) -> None:
    async with hosted("host_steps") as (_, address), wired(address) as wire:
        await wire.reset("go")
        await wire.socket.send_bytes(raw)
        refused = await wire.receive()
        assert (refused["type"], refused["data"]["code"]) == ("error", code)
        assert (await wire.ask("step", {"text": "a"}))["reward"] == 0.5
        async with aiohttp.ClientSession() as session:
            data = raw.partition(b'"data": ')[2][:-1]
            async with session.post(f"http://{address}/reset", data=data) as answer:
                assert answer.status == 422


async def test_reset_without_a_task_draws_one_by_its_seed() -> None:
    async with hosted("host_steps") as (_, address), wired(address) as wire:

        async def drawn(**data: Any) -> str:
            return (await wire.ask("reset", data))["observation"]["content"]

        assert await drawn(seed=7) == await drawn(seed=7, episode_id="e") == "train 7"
        assert await drawn(seed=7, split="eval") == "eval 7"
        assert await drawn() != await drawn()
    async with hosted("host_moods") as (_, address), wired(address) as wire:
        assert "generates no tasks" in (await wire.ask("reset", {}))["message"]


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [
        ("unlucky", "unlucky"),
        ("check", "reward_timeout"),
        ("key", "error:KeyError"),
        ("timeout", "error:TimeoutError"),
        ("nan", "reward_not_finite"),
        ("nan part", "reward_not_finite"),
        ("words", "error:ValueError"),
        ("odd", "error:TypeError"),
        ("long", "env_message_too_large"),
        ("user", "error:UserError"),
        ("broken", "error:InvariantError"),
    ],
)
async def test_failed_episode_is_reported_with_its_class_and_without_a_reward(prompt, kind) -> None:
    async with hosted("host_moods") as (_, address), wired(address) as wire:
        await wire.reset(prompt)
        failed = await wire.ask("step", {"text": "a"})
        assert (failed["code"], failed["failure_class"]) == ("EXECUTION_ERROR", kind)
        assert "reward" not in failed
        assert "no episode" in (await wire.ask("step", {"text": "a"}))["message"]
        assert not Moods.open
        assert (await wire.reset("fine"))["done"] is False


async def test_episode_fails_after_episode_s() -> None:
    async with hosted("host_moods", episode_s=0.05) as (_, address), wired(address) as wire:
        await wire.reset("hang")
        step = {"text": "a", "turn": 1}  # the episode may have failed already
        assert (await wire.ask("step", step))["failure_class"] == "episode_timeout"


async def test_sessions_are_isolated_and_listed_without_their_messages() -> None:
    async with (
        hosted("host_steps") as (_, address),
        wired(address) as one,
        wired(address) as other,
        aiohttp.ClientSession() as session,
    ):
        await one.reset("secret")
        await other.reset("b")
        await one.ask("step", {"text": "secret"})
        assert (await other.ask("step", {"text": "b"}))["observation"]["content"] == "step 1: b"
        async with session.get(f"http://{address}/sessions") as answer:
            text = await answer.text()
            listed = await answer.json()
        assert "secret" not in text
        assert {each["step_count"] for each in listed} == {1}
        assert {each["status"] for each in listed} == {"waiting"}
        assert len({each["id"] for each in listed}) == 2


async def test_replies_hold_the_waits_and_rewards_of_all_seats() -> None:
    async with hosted("host_duel") as (_, address), wired(address) as wire:
        first = await wire.reset("go")
        waits = first["observation"]["waiting"]
        assert [(wait["seat"], wait["turn"]) for wait in waits] == [("first", 1), ("second", 1)]
        then = await wire.ask("step", {"text": "abc", "seat": "first", "turn": 1})
        assert [wait["seat"] for wait in then["observation"]["waiting"]] == ["second"]
        late = await wire.ask("step", {"text": "late", "seat": "first", "turn": 1})
        assert late["observation"]["waiting"] == then["observation"]["waiting"]
        then = (await wire.ask("step", {"text": "a", "seat": "second"}))["observation"]
        assert [(wait["seat"], wait["turn"]) for wait in then["waiting"]] == [("second", 2)]
        assert then["waiting"][0]["content"] == "go round 0: abc"
        values = [(given["seat"], given["value"], given["parts"]) for given in then["rewards"]]
        assert values == [("first", 3.0, {"moved": 0.1}), ("first", 0.25, {"style": 0.3})]


async def test_sessions_over_max_sessions_are_refused_and_others_continue() -> None:
    async with hosted("host_steps", max_sessions=2) as (server, address):
        async with wired(address) as one, wired(address) as two:
            await one.reset("a")
            await two.reset("b")
            for _ in range(20):
                async with wired(address) as refused:
                    answer = await refused.receive()
                    assert answer["data"]["code"] == "CAPACITY_REACHED"
                    assert (await refused.socket.receive(timeout=60)).type.name == "CLOSE"
                    assert refused.socket.close_code == 1013
            async with (
                aiohttp.ClientSession() as session,
                session.post(f"http://{address}/reset") as answer,
            ):
                assert answer.status == 503
            assert (await one.ask("step", {"text": "a"}))["reward"] == 0.5
        await eventually(lambda: not server.sessions)
        async with wired(address) as again:
            assert (await again.reset("c"))["done"] is False


async def test_oversized_message_closes_only_its_own_session() -> None:
    async with (
        hosted("host_moods", max_message_kb=16) as (server, address),
        wired(address) as other,
        wired(address) as wire,
    ):
        await other.reset("fine")
        await wire.reset("hang", "big")
        await wire.socket.send_str("x" * 20_000)
        await wire.socket.receive(timeout=60)
        assert wire.socket.close_code == 1009
        await eventually(lambda: len(server.sessions) == 1 and "big" in Moods.cut)
        assert (await other.ask("step", {"text": "a"}))["reward"] == 1.0


async def test_session_of_a_client_that_does_not_read_answers_is_closed() -> None:
    async with (
        hosted("host_moods", idle_s=0.2) as (server, address),
        aiohttp.ClientSession() as session,
    ):
        reader, writer = await asyncio.open_connection(*address.split(":"), limit=1024)
        writer.write(
            b"GET /ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n\r\n"
        )
        await reader.readuntil(b"\r\n\r\n")
        reset = json.dumps({"type": "reset", "data": {"task": {"prompt": "x" * 60_000}}}).encode()
        frame = b"\x81\xfe" + len(reset).to_bytes(2, "big") + bytes(4) + reset  # masked by zeros
        writer.writelines([frame] * 500)
        await eventually(lambda: not server.sessions, "the session to be closed")
        writer.transport.abort()
        async with session.get(f"http://{address}/health") as answer:
            assert answer.status == 200


async def test_idle_session_is_closed_and_its_episode_cancelled() -> None:
    async with hosted("host_moods", idle_s=1000.0) as (server, address), wired(address) as wire:
        await wire.reset("fine", "idle")
        (wait,) = (each for each in table if each.event == "a message")
        assert wait.seconds == 1000
        wait.expire()
        message = await wire.socket.receive(timeout=60)
        assert (wire.socket.close_code, message.extra) == (1008, "idle for too long")
        await eventually(lambda: not server.sessions and "idle" in Moods.cut)


@pytest.mark.parametrize("how", ["close", "drop", "in the middle"])
async def test_episode_of_a_client_that_disconnects_is_cancelled(how: str) -> None:
    async with hosted("host_moods") as (server, address):
        quick = aiohttp.ClientWSTimeout(ws_close=0.05)  # a busy server does not answer the close
        async with wired(address, timeout=quick) as wire:
            await wire.reset("hang", how)
            if how == "close":
                await wire.socket.send_str('{"type": "close"}')
            if how == "in the middle":
                await wire.socket.send_str('{"type": "step", "data": {"text": "a"}}')
                await eventually(lambda: next(iter(server.sessions.values())).steps)
        await eventually(lambda: not server.sessions and how in Moods.cut and not Moods.open)


async def test_http_post_plays_one_turn_without_a_session() -> None:
    async with (
        hosted("host_moods") as (server, address),
        aiohttp.ClientSession(f"http://{address}") as session,
    ):
        task = {"task": {"prompt": "fine"}}
        async with session.post("/reset", json=task) as answer:
            assert (await answer.json())["observation"]["content"] == "you said fine"
        async with session.post("/step", json=task | {"action": {"text": "a"}}) as answer:
            body = await answer.json()
            assert (answer.status, body["reward"], body["done"]) == (200, 1.0, True)
        async with session.post("/step", json=task) as answer:
            assert answer.status == 422
        async with session.post("/step", data="{") as answer:
            assert answer.status == 422
        task = {"task": {"prompt": "key"}, "action": {"text": "a"}}
        async with session.post("/step", json=task) as answer:
            body = await answer.json()
            assert (answer.status, body["failure_class"]) == (500, "error:KeyError")
        assert not server.sessions
        for path, key in {
            "/health": "status",
            "/metadata": "seats",
            "/schema": "action",
            "/state": "step_count",
        }.items():
            async with session.get(path) as answer:
                assert key in await answer.json()


async def test_requests_without_the_token_or_from_web_pages_are_refused(monkeypatch) -> None:
    with pytest.raises(UserError, match="environment variable is not set"):
        async with hosted("host_steps", token_env="NO_SUCH_TOKEN"):
            pass
    monkeypatch.setenv("HOST_TOKEN", "s3cret")
    async with (
        hosted("host_steps", token_env="HOST_TOKEN") as (_, address),
        aiohttp.ClientSession(f"http://{address}") as session,
    ):
        for sent, status in {"": 401, "Bearer nö": 401, "Bearer s3cret": 200}.items():
            async with session.get("/schema", headers={"Authorization": sent}) as answer:
                assert answer.status == status
        headers = {"Authorization": "Bearer s3cret", "Origin": "http://evil.example"}
        async with session.get("/health", headers=headers) as answer:
            assert answer.status == 403


async def test_port_in_use_is_a_user_error() -> None:
    async with hosted("host_steps") as (_, address):
        with pytest.raises(UserError, match="cannot listen"):
            async with hosted("host_steps", port=int(address.rpartition(":")[2])):
                pass


async def test_many_sessions_run_concurrently() -> None:
    async def play(wire: Wire, name: str) -> None:
        await wire.reset(name)
        for turn in range(1, 4):
            answer = await wire.ask("step", {"text": name})
            assert answer["observation"]["content"] == f"step {turn}: {name}"

    async with hosted("host_steps") as (server, address):
        async with aiohttp.ClientSession() as session:
            sockets = [await session.ws_connect(f"http://{address}/ws") for _ in range(50)]
            wires = [Wire(socket) for socket in sockets]
            await asyncio.gather(*(play(wire, str(n)) for n, wire in enumerate(wires)))
            assert len(server.sessions) == 50
        await eventually(lambda: not server.sessions)


class GivesUp(Env):
    """Waits for a first action until the test cancels that wait, then for a second one."""

    async def run(self, task: Task, **agents: Agent) -> None:
        self.first = asyncio.ensure_future(agents["agent"].act("first"))
        await asyncio.wait([self.first])
        await agents["agent"].act("second")


async def test_step_for_a_cancelled_wait_changes_nothing() -> None:
    session = EnvSession(env := GivesUp(None, None), episode_s=60.0)
    await session.reset(Task(task_id="t", prompt="?", ground_truth=None, extra_info={}), Reset())
    env.first.cancel()
    late = await session.step(Step(text="late", turn=1))
    assert (late.observation.content, late.done) == ("second", False)
    await session.end()


THREE = ("host_steps", "host_duel", "host_moods")


async def get(address: str, path: str) -> Any:
    """Return status and body of a GET request."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{address}{path}") as answer,
    ):
        is_json = answer.content_type == "application/json"
        return answer.status, await (answer.json() if is_json else answer.text())


async def test_reset_or_path_selects_one_of_several_environments() -> None:
    task = {"task": {"prompt": "go"}}
    async with hosted(*THREE) as (_, address):
        async with wired(address) as wire:
            default = await wire.ask("reset", task)
            assert default["observation"]["content"] == "go"
            duel = await wire.ask("reset", task | {"env": "host_duel"})
            assert len(duel["observation"]["waiting"]) == 2
            assert (await wire.ask("reset", task))["observation"]["content"] == "go"
        async with wired(address, "/env/host_duel/ws") as wire:
            assert len((await wire.ask("reset", task))["observation"]["waiting"]) == 2
            steps = await wire.ask("reset", task | {"env": "host_steps"})
            assert steps["observation"]["content"] == "go"
            assert (await wire.ask("reset", {"seed": 3, "env": "host_steps"}))["observation"][
                "content"
            ] == "train 3"


async def test_unknown_environment_is_refused_and_the_session_continues() -> None:
    async with hosted(*THREE) as (_, address):
        async with wired(address) as wire:
            await wire.reset("go")
            refused = await wire.ask("reset", {"task": {"prompt": "a"}, "env": "host_step"})
            assert refused["code"] == "VALIDATION_ERROR"
            assert "Did you mean 'host_steps'? Known: host_steps, host_duel" in refused["message"]
            assert (await wire.ask("step", {"text": "a"}))["reward"] == 0.5
        status, text = await get(address, "/env/chess/metadata")
        assert status == 404
        assert "Unknown environment 'chess'" in text
        with pytest.raises(aiohttp.WSServerHandshakeError) as failed:
            async with wired(address, "/env/chess/ws"):
                pass
        assert failed.value.status == 404


async def test_server_lists_its_environments() -> None:
    async with hosted(*THREE) as (_, address):
        _, health = await get(address, "/health")
        assert health["environments"] == [*THREE]
        _, listed = await get(address, "/environments")
        assert [each["name"] for each in listed] == [*THREE]
        assert [each["seats"] for each in listed][:2] == [["agent"], ["first", "second"]]
        _, default = await get(address, "/metadata")
        assert default["name"] == THREE[0] and default["environments"] == listed
        for each in listed:
            assert (await get(address, f"/env/{each['name']}/metadata"))[1]["name"] == each["name"]


async def test_sessions_of_all_environments_share_the_limit_and_posts_have_paths() -> None:
    async with hosted(*THREE, max_sessions=1) as (_, address):
        async with wired(address) as wire, wired(address, "/env/host_duel/ws") as late:
            await wire.reset("go")
            assert (await late.receive())["data"]["code"] == "CAPACITY_REACHED"
        async with aiohttp.ClientSession() as session:
            large = {"task": {"prompt": "x" * 100_000}}
            url = f"http://{address}/env/host_steps/reset"
            async with session.post(url, json=large) as answer:
                assert answer.status == 200


def rated(completion: str, difficulty: float) -> float:
    return difficulty * len(completion)


async def test_episodes_of_a_drawn_task_get_copies_of_its_row(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "changes", "extra_info": {"seen": []}}\n')
    server = EnvServer(EnvServerConfig(env=EnvConfig(type="world"), tasks=str(file)))
    async with server.serving() as address, wired(address) as wire:
        for _ in range(2):
            await wire.ask("reset", {})
            end = await wire.ask("step", {"text": "hi", "stop_reason": "stop"})
            assert end["observation"]["rewards"][0]["parts"] == {"seen": 1.0}


async def test_columns_of_a_task_reach_the_reward_function() -> None:
    function = FunctionRewardConfig(paths=[f"{__name__}:rated"])
    math = MathEnvConfig(reward=RewardConfig(type="function", function=function))
    server = EnvServer(EnvServerConfig(env=EnvConfig(type="math", math=math)))
    task = Task(
        task_id="train-0",
        prompt="1+1?",
        ground_truth=None,
        extra_info={},
        columns={"difficulty": 0.5},
    )
    async with server.serving() as address, wired(address) as wire:
        await wire.ask("reset", {"task": msgspec.to_builtins(task)})
        assert (await wire.ask("step", {"text": "four"}))["reward"] == 2.0
        del task.columns["difficulty"]
        await wire.ask("reset", {"task": msgspec.to_builtins(task)})
        refused = await wire.ask("step", {"text": "four"})
        assert refused["failure_class"] == "reward_function"
