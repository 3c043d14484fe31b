"""Remote environments: the same trajectories and failure classes as in process; lost servers."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from msgspec import structs
from structlog.testing import capture_logs

from arealite.api.collector_config import AgentConfig
from arealite.api.env import EnvConfig, envs
from arealite.api.rollout_messages import Episode
from arealite.api.runtime import EnvServersConfig
from arealite.base.errors import InvariantError, UserError
from arealite.ext.hosting.client import server_pool as servers_module
from arealite.ext.hosting.client.server_pool import ServerPool, parse
from arealite.ext.hosting.server.env_app import EnvServer
from arealite.ext.hosting.server_config import EnvServerConfig, EnvServerOptions, StepReply
from tests.fakes.client import response
from tests.fakes.env_hosts import Moods
from tests.fakes.env_servers import collecting, failed, fake_openenv, hosted, played, wired
from tests.fakes.experiment import lease
from tests.fakes.ports import held_port
from tests.impl.rollout import worlds
from tests.waiting import eventually


def random_response(request: Any) -> Any:
    """Return a random generation; the seed is the request."""
    rng = random.Random(f"{request.request_id}/{request.input_ids}")
    ids = [rng.randrange(10, 40) for _ in range(rng.randrange(1, 6))]
    return response(ids, stop_reason=rng.choice(["stop", "length"]))


def steps(server: EnvServer) -> int:
    """Return the number of steps of the only session."""
    return next(iter(server.sessions.values())).steps


def without_times(episode: Episode) -> list[Any]:
    """Return the headers of an episode without durations."""
    return [structs.replace(header, seconds=0.0, waits={}) for header in episode.headers]


@pytest.mark.parametrize("env", ["host_steps", "host_duel", "host_apart"])
async def test_remote_episode_equals_the_episode_in_process(env: str) -> None:
    async with hosted(env) as (_, address):
        async with collecting(env, script=random_response) as local:
            expected = [await local.run(lease(n, prompt="go", members=1), 0) for n in range(4)]
        async with collecting(env, address, script=random_response) as remote:
            got = [await remote.run(lease(n, prompt="go", members=1), 0) for n in range(4)]
    for (one, frames), (other, others) in zip(expected, got, strict=True):
        assert one.failure is None
        assert without_times(one) == without_times(other)
        assert frames == others


async def test_reward_of_none_leaves_a_remote_episode_without_a_score() -> None:
    async with hosted("world") as (_, address), collecting("world", address) as collector:
        for prompt in ("unscored", "unscored later"):
            (header,) = (await played(collector, prompt)).headers
            assert header.reward is None
            assert "length" in header.reward_parts


async def test_tools_choices_and_stop_reason_are_sent() -> None:
    def script(_: Any) -> Any:
        return response([10], stop_reason="length")

    async with (
        hosted("host_moods") as (_, address),
        collecting("host_moods", address, script=script) as collector,
    ):
        (header,) = (await played(collector, "tools")).headers
        assert header.reward == 2.0  # 1.0 for the stop reason, 1.0 at the end
        assert header.reward_parts == {"cut": 1.0}


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [
        ("unlucky", "unlucky"),
        ("check", "reward_timeout"),
        ("key", "error:KeyError"),
        ("nan", "reward_not_finite"),
        ("nan part", "reward_not_finite"),
        ("words", "error:ValueError"),
        ("long", "env_message_too_large"),
    ],
)
async def test_failed_episode_keeps_the_servers_failure_class(prompt: str, kind: str) -> None:
    async with (
        hosted("host_moods", max_message_kb=64) as (server, address),
        collecting("host_moods", address) as collector,
    ):
        assert failed(await played(collector, prompt)) == kind
        assert failed(await played(collector, "fine")) is None
        await eventually(lambda: not server.sessions)


@pytest.mark.parametrize(("prompt", "kind"), [("user", UserError), ("broken", InvariantError)])
async def test_user_and_invariant_errors_of_the_server_stop_the_run(prompt: str, kind: Any) -> None:
    async with (
        hosted("host_moods") as (_, address),
        collecting("host_moods", address) as collector,
    ):
        with pytest.raises(kind):
            await played(collector, prompt)


async def test_message_over_the_clients_limit_fails_the_episode() -> None:
    async with hosted("host_moods", max_message_kb=2**14) as (_, address):
        async with collecting("host_moods", address, max_message_kb=64) as collector:
            assert failed(await played(collector, "long")) == "env_message_too_large"
        async with collecting("host_moods", address, max_message_kb=1) as collector:
            assert failed(await played(collector, "x" * 2000)) == "env_message_too_large"


async def test_hanging_environment_fails_by_answer_s_or_episode_timeout_s() -> None:
    async with hosted("host_moods") as (server, address):
        async with collecting("host_moods", address, answer_s=0.05) as collector:
            assert failed(await played(collector, "hang")) == "env_step_timeout"
        async with collecting("host_moods", address) as collector:
            object.__setattr__(collector.config, "episode_timeout_s", 0.05)
            assert failed(await played(collector, "hang")) == "episode_timeout"
        await eventually(lambda: not server.sessions and not Moods.open)


async def test_cancelled_episode_is_cancelled_in_the_server() -> None:
    async with (
        hosted("host_moods") as (server, address),
        collecting("host_moods", address) as collector,
    ):
        task = asyncio.create_task(played(collector, "hang"))
        await eventually(lambda: server.sessions and steps(server))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await eventually(lambda: not server.sessions and not Moods.open)
        assert [each.load for each in collector.parts[""].env.servers.known] == [0]


async def test_failure_in_the_client_ends_the_session_in_the_server() -> None:
    def script(request: Any) -> Any:
        return ValueError("no policy")

    async with (
        hosted("host_steps") as (server, address),
        collecting("host_steps", address, script=script) as collector,
    ):
        assert failed(await played(collector, "go")) == "error:ValueError"
        await eventually(lambda: not server.sessions)


async def test_episodes_are_spread_by_load_and_survive_the_loss_of_a_server(monkeypatch) -> None:
    monkeypatch.setattr(servers_module, "PROBE_S", 0.02)
    async with AsyncExitStack() as stack:
        _, first = await stack.enter_async_context(hosted("host_moods"))
        second_stack = await stack.enter_async_context(AsyncExitStack())
        port = stack.enter_context(held_port())
        _, second = await second_stack.enter_async_context(hosted("host_moods", port=port))
        collector = await stack.enter_async_context(collecting("host_moods", first, second))
        known = collector.parts[""].env.servers.known
        await eventually(lambda: all(server.alive for server in known))
        collector._agents.client.gate.clear()
        running = [asyncio.create_task(played(collector, "fine", n)) for n in range(8)]
        await collector._agents.client.received(8)
        assert [server.load for server in known] == [4, 4]

        await second_stack.aclose()  # the server dies while its episodes wait for a generation
        await eventually(lambda: sum(task.done() for task in running) == 4)
        assert {failed(task.result()) for task in running if task.done()} == {"env_server_lost"}
        collector._agents.client.gate.set()
        await asyncio.gather(*running)
        assert [failed(task.result()) for task in running].count(None) == 4

        await eventually(lambda: not known[1].alive)
        started = known[1].started
        assert failed(await played(collector, "fine")) is None  # the other server plays it
        assert known[1].started == started
        await stack.enter_async_context(hosted("host_moods", port=port))
        await eventually(lambda: known[1].alive)
        for number in range(4):
            assert failed(await played(collector, "fine", number)) is None
        assert known[1].started > started


async def test_episode_takes_another_server_waits_or_fails_if_a_server_is_full() -> None:
    async with (
        hosted("host_moods", max_sessions=2) as (_, small),
        hosted("host_moods", max_sessions=3) as (_, other),
        collecting("host_moods", small, other) as collector,
    ):
        env = collector.parts[""].env
        known = env.servers.known
        await eventually(lambda: all(server.alive for server in known))
        client = collector._agents.client
        client.gate.clear()
        running = [asyncio.create_task(played(collector, "fine", n)) for n in range(5)]
        await client.received(5)
        assert sorted(server.load for server in known) == [2, 3]
        object.__setattr__(env.config.runtime, "wait_s", 0.2)
        assert failed(await played(collector, "fine")) == "env_server_full"
        object.__setattr__(env.config.runtime, "wait_s", 60.0)
        waiting = asyncio.create_task(played(collector, "fine", 9))
        client.gate.set()
        assert [failed(each) for each in await asyncio.gather(*running, waiting)] == [None] * 6


async def test_unreachable_server_is_logged_once() -> None:
    async with hosted("host_steps") as (_, address), collecting("host_steps", address) as collector:
        servers = collector.parts[""].env.servers
        gone = servers.add(parse("127.0.0.1:9"))
        servers._monitors[gone].cancel()
        gone.alive, servers.known[0].load = True, 100
        with capture_logs() as logs:
            done = await asyncio.gather(*(played(collector, "go", n) for n in range(4)))
        assert [failed(each) for each in done] == [None] * 4
        event = "environment server unreachable"
        errors = [line["error"] for line in logs if line["event"] == event]
        assert len(errors) == 1
        assert "Cannot connect to host 127.0.0.1:9" in errors[0]


async def test_missing_unreachable_or_wrong_server_is_a_user_error() -> None:
    with pytest.raises(UserError, match=r"arealite serve env\.type=host_steps"):
        async with collecting("host_steps", type="remote"):
            pass
    with pytest.raises(UserError, match=r"no server answers at 127\.0\.0\.1:9"):
        async with collecting("host_steps", "127.0.0.1:9", wait_s=0.1):
            pass
    for wrong in ("nonsense", "ftp://host:1", "http://", "host:x"):
        with pytest.raises(UserError, match="the address must be host:port"):
            async with collecting("host_steps", wrong):
                pass
    async with hosted("host_duel") as (_, address):
        with pytest.raises(UserError, match="hosts environment host_duel"):
            async with collecting("host_steps", address):
                pass


async def test_token_is_sent_and_a_missing_one_is_a_user_error(monkeypatch) -> None:
    with pytest.raises(UserError, match="environment variable is not set"):
        async with collecting("host_steps", "127.0.0.1:9", token_env="NO_SUCH_TOKEN"):
            pass
    monkeypatch.setenv("HOST_TOKEN", "s3cret")
    async with hosted("host_steps", token_env="HOST_TOKEN") as (_, address):
        async with collecting("host_steps", address, token_env="HOST_TOKEN") as collector:
            assert failed(await played(collector, "go")) is None
        with pytest.raises(UserError, match=r"needs another token; set env\.runtime\.token_env"):
            async with collecting("host_steps", address, wait_s=0.1):
                pass


async def test_token_stays_out_of_the_log_when_a_server_answers_with_errors(monkeypatch) -> None:
    async def fail(request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer s3cret-token"
        return web.Response(status=503)

    monkeypatch.setenv("HOST_TOKEN", "s3cret-token")
    monkeypatch.setattr(servers_module, "PROBE_S", 0.01)
    app = web.Application()
    app.router.add_get("/health", fail)
    async with TestServer(app) as host:
        config = EnvServersConfig(addresses=[str(host.make_url(""))], token_env="HOST_TOKEN")
        servers = ServerPool(config, StepReply)
        with capture_logs() as events:
            await servers.start()
            try:
                (server,) = servers.known
                await asyncio.sleep(0)  # the health check starts
                server.alive, server.last_seen = True, float("-inf")
                await eventually(lambda: events, what="a lost server")
            finally:
                await servers.close()
    assert "503" in events[0]["why"] and "s3cret" not in str(events)


async def test_redirects_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(servers_module, "PROBE_S", 3600.0)
    async with hosted("host_steps") as (server, address):

        async def away(request: web.Request) -> web.StreamResponse:
            raise web.HTTPFound(f"http://{address}{request.path}")

        async with fake_openenv(lambda *_: None, ws=away) as foreign:
            with pytest.raises(UserError, match="does not describe its environment at /metadata"):
                async with collecting("host_steps", foreign):
                    pass
            async with collecting("host_steps", address) as collector:
                env = collector.parts[""].env
                env.servers.remove(env.servers.known[0])
                added = env.servers.add(parse(foreign))
                await eventually(lambda: added.alive)
                object.__setattr__(env.config.runtime, "wait_s", 0.2)
                assert failed(await played(collector, "go")) == "env_server_lost"
        assert not server.sessions


async def test_server_hosts_an_environment_with_a_remote_runtime() -> None:
    async with hosted("host_duel") as (_, address):
        far = EnvConfig(type="host_duel")
        object.__setattr__(far.runtime, "type", "remote")
        object.__setattr__(far.runtime, "addresses", [address])
        config = EnvServerConfig(env=far, server=EnvServerOptions())
        async with EnvServer(config).serving() as outer, wired(outer) as wire:
            first = await wire.reset("go")
            assert first["observation"]["waiting"]


@pytest.mark.parametrize("is_remote", [False, True])
async def test_server_sets_the_seats_and_detects_which_are_trained(is_remote: bool) -> None:
    assert worlds is not None
    seats = {"judge": AgentConfig(type="judge")}
    async with hosted("host_judged") as (_, address):
        where = [address] if is_remote else []
        async with collecting("host_judged", *where, seats=seats) as collector:
            episode = await played(collector, "go")
            assert failed(episode) is None
            assert [(header.seat, header.reward) for header in episode.headers] == [("player", 1.0)]
        if is_remote:
            async with collecting("host_judged", address) as collector:
                with pytest.raises(UserError, match="the judge is trained"):
                    await played(collector, "go")


async def test_remote_environment_is_resumable_if_the_hosted_one_is() -> None:
    for name, resumes in {"host_duel": True, "host_moods": False}.items():
        async with hosted(name) as (_, address), collecting(name, address) as collector:
            env = collector.parts[""].env
            assert env.resumable == resumes
            assert env.seats == envs.get(name).seats


async def test_each_runtime_selects_its_environment_of_a_shared_server() -> None:
    async with hosted("host_steps", "host_duel", "host_moods") as (server, address):
        for name, seats in {"host_duel": 2, "host_steps": 1, "host_moods": 1}.items():
            async with collecting(name, address) as collector:
                assert collector.parts[""].env.resumable == envs.get(name).resumable
                episode = await played(collector, "fine")
                assert failed(episode) is None
                assert len(episode.headers) == seats
        async with collecting("host_duel", f"http://{address}/env/host_steps") as collector:
            assert len((await played(collector, "go")).headers) == 2, "the reset names the type"
        with pytest.raises(UserError, match="hosts environment host_steps, host_duel, host_moods"):
            async with collecting("host_apart", address):
                pass
        await eventually(lambda: not server.sessions)
