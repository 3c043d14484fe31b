"""Environment servers in this event loop, and collectors that play in them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

from arealite.api.collector_config import AgentConfig
from arealite.api.env import EnvConfig
from arealite.api.rollout_messages import Episode
from arealite.api.runtime import RuntimeConfig
from arealite.ext.hosting.server.env_app import EnvServer
from arealite.ext.hosting.server_config import EnvServerConfig, EnvServerOptions
from arealite.impl.rollout.collector import Collector
from tests.fakes import env_hosts
from tests.fakes.client import ScriptedClient, response
from tests.fakes.experiment import experiment, lease, tokenizer

MODULE = env_hosts.__name__


@asynccontextmanager
async def hosted(env: str, *more: str, **options: Any) -> AsyncIterator[tuple[EnvServer, str]]:
    """Serve environments until the body exits; yield the server and its address."""
    config = EnvServerConfig(
        environments=[env, *more] if more else [],
        env=EnvConfig(type=env),
        server=EnvServerOptions(**options),
    )
    server = EnvServer(config)
    async with server.serving() as address:
        yield server, address


class Wire:
    """A client that sends and receives raw messages."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket

    async def ask(self, kind: str, data: Any = None, **more: Any) -> Any:
        """Send a message; return the data of its answer, also of an error."""
        message = {"type": kind} | ({} if data is None else {"data": data}) | more
        await self.socket.send_str(json.dumps(message))
        return (await self.receive())["data"]

    async def receive(self) -> Any:
        """Return the next message."""
        return json.loads(await self.socket.receive_str(timeout=60))

    async def reset(self, prompt: str, task_id: str = "t") -> Any:
        """Begin an episode of a task."""
        return await self.ask("reset", {"task": {"task_id": task_id, "prompt": prompt}})


@asynccontextmanager
async def wired(address: str, path: str = "/ws", **options: Any) -> AsyncIterator[Wire]:
    """Connect a raw client to a server."""
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(f"http://{address}{path}", **options) as socket,
    ):
        yield Wire(socket)


@asynccontextmanager
async def collecting(
    env: str,
    *addresses: str,
    script: Callable[..., Any] | None = None,
    seats: dict[str, AgentConfig] | None = None,
    **runtime: Any,
) -> AsyncIterator[Collector]:
    """Yield a collector whose environment runs at `addresses`; without any, in this process."""
    kind = "remote" if addresses else "in_process"
    where = RuntimeConfig(**{"type": kind, "addresses": list(addresses), "wait_s": 60.0} | runtime)
    client = ScriptedClient(script or (lambda _: response([10, 11, 12])))
    config = experiment(env, seats=seats or {})
    object.__setattr__(config, "imports", [MODULE])
    own = config.trainer.ppo.collector
    object.__setattr__(own, "env", EnvConfig(type=env, runtime=where))
    made = Collector(config, client, tokenizer())
    await made.setup()
    try:
        yield made
    finally:
        await made.close()


async def played(collector: Collector, prompt: str, number: int = 0) -> Episode:
    """Play one episode of a task with this prompt."""
    episode, _ = await collector.run(lease(number, prompt=prompt, ground_truth=None), 0)
    return episode


def failed(episode: Episode) -> str | None:
    """Return the failure class of an episode, or None."""
    return None if episode.failure is None else episode.failure.failure_class


@asynccontextmanager
async def fake_openenv(
    answer: Callable[[Any, web.WebSocketResponse], Any], **routes: Any
) -> AsyncIterator[str]:
    """Serve OpenEnv's routes by `answer`; yield the address.

    Args:
        answer: Called with each message and the socket. It returns the answer, or None if it has
            sent one itself; it may be async.
        routes: Handlers that replace those of `ws` and `health`.
    """

    async def socket(request: web.Request) -> web.WebSocketResponse:
        made = web.WebSocketResponse()
        await made.prepare(request)
        async for message in made:
            reply = answer(json.loads(message.data), made)
            reply = await reply if hasattr(reply, "__await__") else reply
            if reply is not None:
                await made.send_str(reply if isinstance(reply, str) else json.dumps(reply))
        return made

    async def health(request: web.Request) -> web.Response:
        return web.json_response({"status": "healthy"})

    app = web.Application()
    app.add_routes([web.get("/ws", routes.get("ws", socket))])
    app.add_routes([web.get("/health", routes.get("health", health))])
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
