"""The pool of environment servers: health checks, and the choice of a server for each episode.

Episodes that run on a lost server fail and are offered again. The server gets new episodes when it
answers again.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

import aiohttp
import msgspec
from yarl import URL

from arealite.api.runtime import EnvServersConfig
from arealite.base import log
from arealite.base.errors import ArealiteError, DeadlineError, UserError
from arealite.ext.hosting.client.session_channel import (
    EnvServerFull,
    EnvServerLost,
    ServerState,
    SessionChannel,
    T,
)
from arealite.ext.hosting.server.env_messages import read_token
from arealite.system.health.waits import Wait

logger = log.get(__name__)

V = TypeVar("V")
PROBE_S = 0.5
"""Interval of the requests to each server's /health."""
CONNECT_S = 10.0
MAX_BODY = 2**16


class ServerPool(Generic[T]):
    """Opens sessions for episodes. Call `start` before the first episode and `close` at the end."""

    def __init__(self, config: EnvServersConfig, answer: type[T]) -> None:
        """Read the addresses and the token.

        Args:
            config: Addresses, token and limits.
            answer: Type that the data of an answer is decoded to.

        Raises:
            UserError: An address is invalid, or the token's environment variable is not set.
        """
        self.config = config
        self._decode = msgspec.json.Decoder(answer).decode
        self._urls = [parse(address) for address in config.addresses]
        self.known: list[ServerState] = []
        self.finished = 0
        """Number of episodes that ended without an error."""
        self.fatal: ArealiteError | None = None
        """Set when no server will become available any more; episodes raise it."""
        self.changed = asyncio.Event()
        """Set whenever the state of a server changes."""
        self._monitors = dict[ServerState, asyncio.Task[None]]()
        self._session: aiohttp.ClientSession
        token = read_token(config.token_env)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    async def start(self) -> None:
        """Start the health checks of the servers at `addresses`."""
        trace = aiohttp.TraceConfig()
        trace.on_request_redirect.append(_no_redirect)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            headers=self._headers,
            trace_configs=[trace],
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        for url in self._urls:
            self.add(url)

    async def close(self) -> None:
        """Remove all servers and close all connections."""
        for server in [*self.known]:
            self.remove(server)
        await asyncio.gather(*self._monitors.values(), return_exceptions=True)
        await self._session.close()

    def add(self, url: URL, *, max_episodes: int = 0) -> ServerState:
        """Add a server; it gets episodes as soon as it answers /health.

        Args:
            url: The server's base URL.
            max_episodes: Episodes that may start on the server; 0: no limit.
        """
        server = ServerState(url=url, max_episodes=max_episodes)
        self.known.append(server)
        self._monitors[server] = asyncio.create_task(self._monitor(server), name=server.name)
        return server

    def remove(self, server: ServerState) -> None:
        """Remove a server; its running episodes fail with `EnvServerLost`."""
        server.mark_lost()
        self.known.remove(server)
        self._monitors[server].cancel()
        self.changed.set()

    @asynccontextmanager
    async def episode(self, reset: object) -> AsyncGenerator[tuple[SessionChannel[T], T], None]:
        """Start an episode on the least loaded server; close its session when the body exits.

        Args:
            reset: Data of the reset message.

        Yields:
            The session and its first answer.

        Raises:
            EpisodeError: No server had a free session within `wait_s`, or the chosen server died.
        """
        channel, first = await self._start_episode(reset)
        try:
            yield channel, first
            self.finished += 1
        finally:
            await self._close(channel)
            channel.server.full = False
            self.changed.set()

    async def wait_until(self, condition: Callable[[], V | None]) -> V:
        """Return the first true value of `condition`, evaluated after each change of a server."""
        while True:
            outcome = condition()
            if outcome:
                return outcome
            self.changed.clear()
            await self.changed.wait()

    async def get(self, server: ServerState, path: str) -> bytes:
        """Return the body of a GET request, at most MAX_BODY bytes.

        Raises:
            OSError: The server is not reachable.
            aiohttp.ClientError: The server does not answer with success.
        """
        timeout = aiohttp.ClientTimeout(total=self.config.silence_s)
        async with self._session.get(server.url / path, timeout=timeout) as response:
            response.raise_for_status()
            num_bytes = min(response.content_length or 0, MAX_BODY)
            return await response.content.readexactly(num_bytes)

    async def _start_episode(self, reset: object) -> tuple[SessionChannel[T], T]:
        """Try one server after the other until a server has a free session."""
        end = time.monotonic() + self.config.wait_s
        while True:
            server = await self._wait_for_server(end)
            channel = await self._connect(server)
            if channel is None:
                continue
            try:
                return channel, await channel.ask("reset", reset)
            except BaseException as error:
                await self._close(channel)
                if not isinstance(error, EnvServerFull):
                    raise
                server.full = True

    async def _close(self, channel: SessionChannel[T]) -> None:
        channel.server.load -= 1
        await channel.close()

    async def _wait_for_server(self, end: float) -> ServerState:
        """Return the free server with the fewest episodes; wait for one until `end`."""
        wait = Wait(
            event="an environment server with room",
            owner="episode",
            on="environment servers",
            seconds=max(0.0, end - time.monotonic()),
        )
        try:
            with wait:
                return await self.wait_until(self._pick)
        except DeadlineError as error:
            is_any_alive = any(server.alive for server in self.known)
            error_class = EnvServerFull if is_any_alive else EnvServerLost
            names = ", ".join(server.name for server in self.known) or "none"
            raise error_class(
                f"no server had a free session in wait_s={self.config.wait_s} ({names})"
            ) from error

    def _pick(self) -> ServerState | None:
        """Return the free server with the fewest episodes; raise `fatal` if it is set."""
        if self.fatal is not None:
            raise self.fatal
        free = [server for server in self.known if server.is_free]
        return min(free, key=lambda server: (server.load, server.started), default=None)

    async def _connect(self, server: ServerState) -> SessionChannel[T] | None:
        """Open a session. If the server does not answer, mark it as not alive and return None."""
        server.load += 1
        server.started += 1
        try:
            with Wait(event="a session", owner="episode", on=server.name, seconds=CONNECT_S):
                max_bytes = self.config.max_message_kb * 1024
                socket = await self._session.ws_connect(server.url / "ws", max_msg_size=max_bytes)
        except BaseException as error:
            server.load -= 1
            if not isinstance(error, aiohttp.ClientError | OSError | DeadlineError):
                raise
            if server.alive:  # log once, also if several episodes connect at the same time
                logger.warning(
                    "environment server unreachable",
                    server=server.name,
                    error=str(error) or repr(error),
                )
            server.alive = False
            return None
        return SessionChannel(
            server=server, _socket=socket, _config=self.config, _decode=self._decode
        )

    async def _monitor(self, server: ServerState) -> None:
        server.last_seen = time.monotonic()
        while True:
            try:
                await self.get(server, "health")
            except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError) as error:
                is_silent = time.monotonic() - server.last_seen > self.config.silence_s
                is_refused = isinstance(error, aiohttp.ClientConnectorError)
                if server.alive and (is_silent or is_refused):
                    logger.warning(
                        "environment server lost",
                        server=server.name,
                        why=f"{type(error).__name__}: {error}",  # repr(error) may have the token
                    )
                    server.mark_lost()
            else:
                if not server.alive:
                    logger.info("environment server found", server=server.name)
                server.last_seen = time.monotonic()
                server.alive = True
                server.full = False
                server.lost = False
                self.changed.set()
            await asyncio.sleep(PROBE_S)


def parse(address: str) -> URL:
    """Return the URL of an address, host:port or http(s)://host[:port].

    Raises:
        UserError: The address has another form.
    """
    has_scheme = "://" in address
    try:
        url = URL(address if has_scheme else f"http://{address}")
        is_http = url.scheme in ("http", "https")
        if is_http and url.host and (has_scheme or url.explicit_port):
            return url
    except ValueError:
        pass
    raise UserError(
        f"environment server '{address}': the address must be host:port or http(s)://host[:port]."
    )


async def _no_redirect(_: object, __: object, params: aiohttp.TraceRequestRedirectParams) -> None:
    """Raise an error: episodes and the token go only to the servers in the config."""
    location = params.response.headers.get("Location", "")
    raise aiohttp.ClientError(f"{params.url} redirects to {location[:200]}; redirects are refused")
