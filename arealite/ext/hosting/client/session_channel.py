"""One session with an environment server, on the client's side: each request has one answer.

OpenEnv's messages have no ids, so the client cannot distinguish an unexpected message from an
answer. An unexpected message ends the session.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import aiohttp
import msgspec
from aiohttp import WSCloseCode, WSMessage, WSMsgType
from yarl import URL

from arealite.api.runtime import EnvServersConfig
from arealite.base.errors import DeadlineError, EpisodeError
from arealite.ext.hosting.server.env_messages import CAPACITY, MessageTooLarge, failure, frame
from arealite.ext.hosting.server_config import SessionFailure, SessionMessage
from arealite.system.health.waits import Wait, cancel_all, is_cancelled

CLOSE_S = 1.0
"""Timeout for the server's answer to a closing handshake."""
CONTENT = (WSMsgType.TEXT, WSMsgType.BINARY)
T = TypeVar("T")
CLOSING = (WSMsgType.CLOSE, WSMsgType.CLOSING, WSMsgType.CLOSED)


class EnvServerLost(EpisodeError, failure_class="env_server_lost"):
    """The server died, does not answer or closed the session; or no server answers."""


class EnvServerFull(EpisodeError, failure_class="env_server_full"):
    """No server had a free session within `wait_s`."""


class EnvServerGarbage(EpisodeError, failure_class="env_server_garbage"):
    """Malformed or unexpected server message."""


class EnvStepTimeout(EpisodeError, failure_class="env_step_timeout"):
    """A server did not answer a request within `answer_s`."""


decode = msgspec.json.Decoder(SessionMessage).decode
decode_refusal = msgspec.json.Decoder(SessionFailure).decode


@dataclass(eq=False, kw_only=True)
class ServerState:
    """A worker's view of one environment server."""

    url: URL
    max_episodes: int = 0
    """Episodes that this worker may start on the server; 0: no limit."""
    alive: bool = False
    """The server answered the last request."""
    full: bool = False
    """The server refused an episode because all sessions are in use."""
    lost: bool = False
    """The server was alive and does not answer any more."""
    retired: bool = False
    """The server gets no new episodes."""
    last_seen: float = 0.0
    """Time of the last answer to /health, by `time.monotonic`."""
    load: int = 0
    """Episodes of this worker that are running on the server."""
    started: int = 0
    """Episodes that this worker has started on the server."""
    channels: "set[SessionChannel[Any]]" = field(default_factory=set)

    @property
    def name(self) -> str:
        return f"env_server-{self.url.authority}"

    @property
    def is_free(self) -> bool:
        is_used_up = bool(self.max_episodes and self.started >= self.max_episodes)
        return self.alive and not (self.full or self.retired or is_used_up)

    def mark_lost(self) -> None:
        """Use the server no more; fail the requests that wait for its answers."""
        self.alive = False
        self.lost = True
        for channel in self.channels:
            channel.pending.cancel()


@dataclass(eq=False, kw_only=True)
class SessionChannel(Generic[T]):
    """An open session, whose answers are decoded to T."""

    server: ServerState
    _socket: aiohttp.ClientWebSocketResponse
    _config: EnvServersConfig
    _decode: Callable[[msgspec.Raw], T]

    def __post_init__(self) -> None:
        self.pending = asyncio.ensure_future(self._socket.receive())
        """The next message. If it is done while no request is open, the session is broken."""
        self.server.channels.add(self)

    async def ask(self, kind: str, data: object) -> T:
        """Send a message; return the decoded data of its answer.

        Raises:
            EpisodeError: No valid answer came, or the server answered with a failed episode; the
                failure class is the server's.
            UserError: The environment raised a UserError.
            InvariantError: The environment raised an InvariantError.
        """
        self.check()
        request = frame(kind, data, self._config.max_message_kb * 1024)
        answer_s = self._config.answer_s
        name = self.server.name
        wait = Wait(event=f"the answer to {kind}", owner="episode", on=name, seconds=answer_s)
        try:
            with wait:
                await self._socket.send_str(request)
                message = await self.pending
        except DeadlineError as error:
            raise EnvStepTimeout(f"{name}: no answer to {kind} in answer_s={answer_s}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EnvServerLost(f"{name}: {type(error).__name__}: {error}") from error
        except asyncio.CancelledError:
            if not is_cancelled():
                raise EnvServerLost(f"{name} does not answer") from None
            raise
        self.pending = asyncio.ensure_future(self._socket.receive())
        await asyncio.sleep(0)  # a message that arrived with the answer is received now
        answer = self._read(message)
        if self.pending.done() and self.pending.result().type in CONTENT:
            raise EnvServerGarbage(f"{name} sent two answers to one message")
        return answer

    def check(self) -> None:
        """Check, between requests, that the session is intact.

        Raises:
            EpisodeError: The server sent an unexpected message, closed the session or died.
        """
        if not self.pending.done():
            return
        if self.pending.cancelled():
            raise EnvServerLost(f"{self.server.name} does not answer")
        self._read(self.pending.result())
        raise EnvServerGarbage(f"{self.server.name} sent a message without a request")

    async def close(self) -> None:
        """Close the message ends the session."""
        self.server.channels.discard(self)
        await cancel_all([self.pending])
        wait = Wait(event="its good-bye", owner="episode", on=self.server.name, seconds=CLOSE_S)
        with suppress(DeadlineError), wait:
            await self._socket.close()

    def _read(self, message: WSMessage) -> T:
        if message.type not in CONTENT:
            raise self._close_reason(message)
        try:
            answer = decode(message.data)
            if answer.type != "error":
                return self._decode(answer.data)
            refused = decode_refusal(answer.data)
        except msgspec.MsgspecError as error:
            raise EnvServerGarbage(f"{self.server.name}: {error}") from error
        if refused.code == CAPACITY:
            raise EnvServerFull(f"{self.server.name}: {refused.message}")
        raise failure(refused, self.server.name)

    def _close_reason(self, message: WSMessage) -> EpisodeError:
        """Return the error for a message without content: the session was closed."""
        code = self._socket.close_code
        name = self.server.name
        if code == WSCloseCode.MESSAGE_TOO_BIG:
            return MessageTooLarge(
                f"{name}: a message is longer than max_message_kb={self._config.max_message_kb} "
                "of the runtime, or than the server's server.max_message_kb. Raise both."
            )
        if message.type in CLOSING:
            close_reason = f"{code} {message.extra or ''}".strip()
            return EnvServerLost(f"{name} closed the session ({close_reason})")
        return EnvServerGarbage(f"{name}: {message.data!r}")
