"""The servers of an environment: who is alive, who has room, and which gets the next episode.

A lost one takes its running episodes with it, which are offered again; others go elsewhere, and
come back to it when it answers again.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any, Generic

import aiohttp
import msgspec
from yarl import URL

from arealite.api.runtime import EnvServersConfig
from arealite.base import log
from arealite.base.errors import ArealiteError, DeadlineError, UserError
from arealite.impl.env_client.channel import Channel, EnvServerFull, EnvServerLost, Server, T
from arealite.system.health.waits import Wait

logger = log.get(__name__)

PROBE_S = 0.5
"""How often each server is asked for its health."""
CONNECT_S = 10.0
MAX_BODY = 2**16


class Servers(Generic[T]):
    """Opens sessions for episodes, in which answers are T; `start` it before, `close` it after."""

    def __init__(self, config: EnvServersConfig, answer: type[T]) -> None:
        """Raises UserError where an address is none, or the token's variable is not set."""
        self.config = config
        self._decode = msgspec.json.Decoder(answer).decode
        self._urls = [parse(address) for address in config.addresses]
        self.known: list[Server] = []
        self.finished = 0
        """Episodes that came to their end."""
        self.verdict: ArealiteError | None = None
        """Why there will be no server any more; raised instead of waiting for one."""
        self.changed = asyncio.Event()
        self._watching = dict[Server, asyncio.Task[None]]()
        self._session: aiohttp.ClientSession
        self._headers = dict[str, str]()
        if config.token_env:
            if config.token_env not in os.environ:
                raise UserError(f"token_env={config.token_env}: no such variable is set.")
            self._headers["Authorization"] = f"Bearer {os.environ[config.token_env]}"

    async def start(self) -> None:
        """Begin to ask the servers of `addresses` for their health."""
        trace = aiohttp.TraceConfig()
        trace.on_request_redirect.append(_refuse)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            headers=self._headers,
            trace_configs=[trace],
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        for url in self._urls:
            self.add(url)

    async def close(self) -> None:
        """Stop asking."""
        for server in [*self.known]:
            self.remove(server)
        await asyncio.gather(*self._watching.values(), return_exceptions=True)
        await self._session.close()

    def add(self, url: URL, *, most: int = 0) -> Server:
        """Use a server, as soon as it answers, for `most` episodes (0: any number)."""
        server = Server(url, most)
        self.known.append(server)
        self._watching[server] = asyncio.create_task(self._watch(server), name=server.name)
        return server

    def remove(self, server: Server) -> None:
        """Use a server no more; what runs there is lost."""
        server.lose()
        self.known.remove(server)
        self._watching[server].cancel()
        self.changed.set()

    @asynccontextmanager
    async def episode(self, reset: Any) -> AsyncGenerator[tuple[Channel[T], T], None]:
        """Begin an episode on the least loaded server; yield its session and the first answer.

        Raises:
            EpisodeError: no server had room in `wait_s`, or the server that was chosen is lost.
        """
        channel, first = await self._begin(reset)
        try:
            yield channel, first
            self.finished += 1
        finally:
            await self._end(channel)
            channel.server.full = False
            self.changed.set()

    async def until(self, condition: Callable[[], Any]) -> Any:
        """Return what `condition` gives of the servers' state, as soon as it is true."""
        while not (found := condition()):
            self.changed.clear()
            await self.changed.wait()
        return found

    async def get(self, server: Server, path: str) -> bytes:
        """Return what a server tells under a path.

        Raises:
            OSError, aiohttp.ClientError: it tells nothing, or too much.
        """
        limit = aiohttp.ClientTimeout(total=self.config.silence_s)
        async with self._session.get(server.url / path, timeout=limit) as response:
            response.raise_for_status()
            return await response.content.readexactly(min(response.content_length or 0, MAX_BODY))

    async def _begin(self, reset: Any) -> tuple[Channel[T], T]:
        """Go from server to server until one has room; a message is sent to one alone."""
        end = time.monotonic() + self.config.wait_s
        while True:
            server = await self._free(end)
            channel = await self._connect(server)
            if channel is None:
                continue
            try:
                return channel, await channel.ask("reset", reset)
            except EnvServerFull:
                await self._end(channel)
                server.full = True
            except BaseException:
                await self._end(channel)
                raise

    async def _end(self, channel: Channel[T]) -> None:
        channel.server.load -= 1
        await channel.close()

    async def _free(self, end: float) -> Server:
        """Return the free server with the fewest episodes."""
        if self.verdict is None and (server := self._pick()):
            return server
        what, on = "an environment server with room", "environment servers"
        seconds = max(0.0, end - time.monotonic())
        try:
            with Wait(what, owner="episode", on=on, seconds=seconds):
                await self.until(lambda: self.verdict or self._pick())
        except DeadlineError as error:
            kind = EnvServerFull if any(server.alive for server in self.known) else EnvServerLost
            names = ", ".join(server.name for server in self.known) or "none"
            most = self.config.wait_s
            raise kind(f"no server had room in wait_s={most} (known: {names})") from error
        if self.verdict is not None:
            raise self.verdict
        return await self._free(end)

    def _pick(self) -> Server | None:
        free = [server for server in self.known if server.is_free]
        return min(free, key=lambda server: (server.load, server.begun), default=None)

    async def _connect(self, server: Server) -> Channel[T] | None:
        """Open a session; None: the server does not answer, and is left until it does."""
        server.load += 1
        server.begun += 1
        try:
            with Wait("a session", owner="episode", on=server.name, seconds=CONNECT_S):
                socket = await self._session.ws_connect(
                    server.url / "ws", max_msg_size=self.config.max_message_kb * 1024
                )
        except (aiohttp.ClientError, OSError, DeadlineError) as error:
            if server.alive:  # of the episodes that come at the same time, the first tells
                why = str(error) or repr(error)
                logger.warning("environment server refuses", server=server.name, error=why)
            server.alive = False
            server.load -= 1
            return None
        except BaseException:
            server.load -= 1
            raise
        return Channel(server, socket, config=self.config, decode=self._decode)

    async def _watch(self, server: Server) -> None:
        server.heard = time.monotonic()
        while True:
            try:
                await self.get(server, "health")
            except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError) as error:
                is_silent = time.monotonic() - server.heard > self.config.silence_s
                if server.alive and (is_silent or isinstance(error, aiohttp.ClientConnectorError)):
                    why = f"{type(error).__name__}: {error}"  # its repr may show the token
                    logger.warning("environment server lost", server=server.name, why=why)
                    server.lose()
            else:
                if not server.alive:
                    logger.info("environment server found", server=server.name)
                server.heard, server.alive = time.monotonic(), True
                server.full = server.lost = False
                self.changed.set()
            await asyncio.sleep(PROBE_S)


def parse(address: str) -> URL:
    """Return the URL of host:port, or of http(s)://host[:port].

    Raises:
        UserError: it is neither.
    """
    try:
        url = URL(address if "://" in address else f"http://{address}")
        is_whole = url.host and ("://" in address or url.explicit_port)
        if url.scheme in ("http", "https") and is_whole:
            return url
    except ValueError:
        pass
    raise UserError(f"environment server '{address}': host:port or http(s)://host is expected.")


async def _refuse(session: Any, context: Any, params: aiohttp.TraceRequestRedirectParams) -> None:
    """Refuse to go elsewhere: an episode stays with the servers that the config names."""
    where = params.response.headers.get("Location", "")
    raise aiohttp.ClientError(f"{params.url} wants to redirect to {where[:200]}")
