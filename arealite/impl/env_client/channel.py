"""One session with an environment's server, seen from the client: a question, an answer.

OpenEnv's wire has no ids: what comes unasked cannot be told from an answer, so it ends the session.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import aiohttp
import msgspec
from aiohttp import WSCloseCode, WSMessage, WSMsgType
from yarl import URL

from arealite.api.env_server import Refusal
from arealite.api.runtime import EnvServersConfig
from arealite.base.errors import DeadlineError, EpisodeError
from arealite.impl.env_server.wire import CAPACITY, MessageTooLarge, failure, frame
from arealite.system.health.waits import Wait, is_cancelled

CLOSE_S = 1.0
"""A server that is told good-bye has this long to say it, too."""
SPOKEN = (WSMsgType.TEXT, WSMsgType.BINARY)
T = TypeVar("T")
CLOSING = (WSMsgType.CLOSE, WSMsgType.CLOSING, WSMsgType.CLOSED)


class EnvServerLost(EpisodeError):
    """The server of an episode died, is gone or silent or closed the session; or there is none."""

    failure_class = "env_server_lost"


class EnvServerFull(EpisodeError):
    """No server had room for the episode in time."""

    failure_class = "env_server_full"


class EnvServerGarbage(EpisodeError):
    """A server said what is none of the protocol."""

    failure_class = "env_server_garbage"


class EnvStepTimeout(EpisodeError):
    """A server did not answer a step in time."""

    failure_class = "env_step_timeout"


class Answer(msgspec.Struct):
    """What a server says."""

    type: str
    data: msgspec.Raw = msgspec.Raw(b"{}")


decode = msgspec.json.Decoder(Answer).decode
decode_refusal = msgspec.json.Decoder(Refusal).decode


@dataclass(eq=False)
class Server:
    """One server, as a worker knows it."""

    url: URL
    most: int = 0
    """Episodes that it may begin in all, 0: any number."""
    alive: bool = False
    """It answered when last asked."""
    full: bool = False
    """It has just refused an episode."""
    lost: bool = False
    """It was alive, and is silent or gone."""
    retired: bool = False
    """It finishes what it has, and gets no more."""
    heard: float = 0.0
    load: int = 0
    """Episodes in it, of this worker."""
    begun: int = 0
    channels: set[Channel[Any]] = field(default_factory=set)

    @property
    def name(self) -> str:
        return f"env_server-{self.url.authority}"

    @property
    def is_free(self) -> bool:
        is_worn = self.retired or bool(self.most and self.begun >= self.most)
        return self.alive and not self.full and not is_worn

    def lose(self) -> None:
        """Take it out of use, and end what waits for it."""
        self.alive, self.lost = False, True
        for channel in self.channels:
            channel.pending.cancel()


class Channel(Generic[T]):
    """An open session; `decode` reads the data of an answer, a T."""

    def __init__(
        self,
        server: Server,
        socket: aiohttp.ClientWebSocketResponse,
        *,
        config: EnvServersConfig,
        decode: Callable[[msgspec.Raw], T],
    ) -> None:
        self.server = server
        self.pending = asyncio.ensure_future(socket.receive())
        """What the server says next: done before it is asked, the session is broken."""
        self._socket = socket
        self._config = config
        self._decode = decode
        server.channels.add(self)

    async def ask(self, kind: str, data: Any) -> T:
        """Send a message; return its answer.

        Raises:
            EpisodeError: there is none; or the server tells of a failure, which has the same class
                here.
            UserError, InvariantError: the server tells of one.
        """
        self.check()
        text = frame(kind, data, self._config.max_message_kb * 1024)
        seconds, name = self._config.answer_s, self.server.name
        try:
            with Wait(f"the answer to {kind}", owner="episode", on=name, seconds=seconds):
                await self._socket.send_str(text)
                message = await self.pending
        except DeadlineError as error:
            raise EnvStepTimeout(f"{name}: no answer to {kind} in answer_s={seconds}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EnvServerLost(f"{name}: {type(error).__name__}: {error}") from error
        except asyncio.CancelledError:
            if not is_cancelled():
                raise EnvServerLost(f"{name} is gone or silent") from None
            raise
        self.pending = asyncio.ensure_future(self._socket.receive())
        await asyncio.sleep(0)  # what came together with the answer is there now
        answer = self._read(message)
        if self.pending.done() and self.pending.result().type in SPOKEN:
            raise EnvServerGarbage(f"{name} spoke twice")
        return answer

    def check(self) -> None:
        """Raise what is wrong if the server has spoken unasked, closed or died."""
        if not self.pending.done():
            return
        if self.pending.cancelled():
            raise EnvServerLost(f"{self.server.name} is gone or silent")
        self._read(self.pending.result())
        raise EnvServerGarbage(f"{self.server.name} spoke without being asked")

    async def close(self) -> None:
        """End the session."""
        self.server.channels.discard(self)
        self.pending.cancel()
        await asyncio.gather(self.pending, return_exceptions=True)
        wait = Wait("its good-bye", owner="episode", on=self.server.name, seconds=CLOSE_S)
        with suppress(DeadlineError), wait:
            await self._socket.close()

    def _read(self, message: WSMessage) -> T:
        if message.type not in SPOKEN:
            raise self._ended(message)
        try:
            answer = decode(message.data)
            if answer.type != "error":
                return self._decode(answer.data)
            told = decode_refusal(answer.data)
        except msgspec.MsgspecError as error:
            raise EnvServerGarbage(f"{self.server.name}: {error}") from error
        if told.code == CAPACITY:
            raise EnvServerFull(f"{self.server.name}: {told.message}")
        raise failure(told, self.server.name)

    def _ended(self, message: WSMessage) -> EpisodeError:
        """Say why there is no answer."""
        code, name = self._socket.close_code, self.server.name
        if code == WSCloseCode.MESSAGE_TOO_BIG:
            most = self._config.max_message_kb
            what = f"{name}: a message longer than its limit, or than max_message_kb={most}"
            return MessageTooLarge(what)
        if message.type in CLOSING:
            why = f"{code} {message.extra or ''}".strip()
            return EnvServerLost(f"{name} closed the session ({why})")
        return EnvServerGarbage(f"{name}: {message.data!r}")
