"""The HTTP/1.1 client of a run's servers, with keep-alive connections.

A request is one write, and a reply is read without a web framework: with aiohttp's client, a worker
needs 1.7 times the CPU time for each episode of one turn. TLS, redirects and compression are not
supported; servers of a run use none of them.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import cast
from urllib.parse import urlsplit

import msgspec

KEEPALIVE_S = 4.0
"""Less than the 5 s after which SGLang closes an idle connection."""
MAX_HEAD = 1 << 16
"""Bytes of status line and headers, and of the line before a chunk."""


OnData = Callable[[bytes], None]
StatusAndBody = tuple[int, bytes]
"""Status and body."""


class ServerEndpoint:
    """A URL of one server, with the method and the headers of each request."""

    def __init__(self, url: str, headers: Mapping[str, str], method: str = "POST") -> None:
        parts = urlsplit(url)
        _, _, target = url.partition(parts.netloc)
        self.place = (parts.hostname or "", parts.port or 80)
        """Host and port."""
        all_headers = {
            "Host": parts.netloc,
            "Content-Type": "application/json",
            **headers,
        }
        lines = [f"{method} {target} HTTP/1.1"]
        for name, content in all_headers.items():
            lines.append(f"{name}: {content}")
        lines.append("Content-Length: ")
        self.head = "\r\n".join(lines).encode()
        """The request up to the value of its last header, which is the length of the body."""


class IdleConnectionClosed(ConnectionError):
    """The server closed an idle connection before it read the request that we sent."""


class Pool:
    """The connections of a client, of which at most `limit` carry a request.

    Args:
        connect_s: Timeout of a new connection, in seconds.
        limit: Number of requests that are open at once, at all servers.
    """

    def __init__(self, connect_s: float, *, limit: int = 1024) -> None:
        self._connect_s = connect_s
        self._slots = asyncio.Semaphore(limit)
        self._idle = defaultdict[tuple[str, int], list[Connection]](list)

    async def request(
        self, url: str, headers: Mapping[str, str], body: object = None
    ) -> StatusAndBody:
        """POST `body` as JSON, or GET without one; see `send`.

        A server that closes an idle connection at this moment gets a GET once more. It gets no POST
        again, because it may be another process by now.
        """
        endpoint = ServerEndpoint(url, headers, "GET" if body is None else "POST")
        raw_body = b"" if body is None else msgspec.json.encode(body)
        try:
            return await self.send(endpoint, raw_body)
        except IdleConnectionClosed:
            if body is not None:
                raise
            for connection in self._idle.pop(endpoint.place, []):
                connection.transport.close()
        return await self.send(endpoint, raw_body)

    async def send(
        self, endpoint: ServerEndpoint, body: bytes, on_data: OnData | None = None
    ) -> StatusAndBody:
        """Send a JSON body; return the status and the body of the reply.

        Args:
            endpoint: Where to send it.
            body: The JSON; empty for a GET.
            on_data: Gets each part of a body in chunks as soon as it arrives, if the status is 200;
                the body that is returned lacks these parts.

        Raises:
            OSError: The server cannot be reached, closed the connection, or sent a malformed reply.
            Exception: `on_data` raised it.
        """
        async with self._slots:
            connection = self._take_idle(endpoint) or await self._connect(endpoint)
            try:
                reply = await connection.exchange(endpoint.head, body, on_data)
            except BaseException:
                connection.transport.abort()
                raise
            connection.idle_since = asyncio.get_running_loop().time()
            self._idle[endpoint.place].append(connection)
            return reply

    def _take_idle(self, endpoint: ServerEndpoint) -> "Connection | None":
        """Return an open idle connection; None without one. Close those that are idle too long."""
        idle = self._idle[endpoint.place]
        oldest_reply = asyncio.get_running_loop().time() - KEEPALIVE_S
        while idle and idle[0].idle_since < oldest_reply:
            idle.pop(0).transport.close()
        while idle and idle[-1].transport.is_closing():
            idle.pop()
        return idle.pop() if idle else None

    async def _connect(self, endpoint: ServerEndpoint) -> "Connection":
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await loop.create_connection(Connection, *endpoint.place)
                return connection
        except TimeoutError as error:
            raise TimeoutError(f"no connection within {self._connect_s} s") from error

    def close(self) -> None:
        """Close the idle connections."""
        for connection in chain(*self._idle.values()):
            connection.transport.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyHead:
    """Status line and headers of a reply."""

    status: int
    length: int | None
    """Bytes of the body; None: the body has chunks, or ends with the connection."""
    is_chunked: bool
    is_last: bool
    """Whether the server closes the connection after this reply."""


@lru_cache(maxsize=64)
def read_head(raw: bytes) -> ReplyHead:
    """Parse status line and headers. The cache hits often: most replies have equal headers."""
    status_line, *lines = raw.decode("latin-1").lower().split("\r\n")
    headers: dict[str, str] = {}
    for line in lines:
        name, _, content = line.partition(":")
        headers[name.strip()] = content.strip()
    is_chunked = headers.get("transfer-encoding") == "chunked"
    content_length = headers.get("content-length")
    length = None
    if content_length is not None and not is_chunked:
        length = int("0" + content_length)
    closes = headers.get("connection") == "close"
    is_http_1_1 = status_line.startswith("http/1.1 ")
    return ReplyHead(
        status=int(status_line[9:12]),
        length=length,
        is_chunked=is_chunked,
        is_last=closes or not is_http_1_1,
    )


class Connection(asyncio.Protocol):
    """One connection, with at most one request."""

    idle_since = 0.0
    """Loop time of the latest reply."""

    def __init__(self) -> None:
        self._data = bytearray()
        """Received bytes; after the head those of the body."""
        self._head: ReplyHead | None = None
        self._chunks = bytearray()
        self._reply: asyncio.Future[StatusAndBody] | None = None
        self._on_data: OnData | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = cast(asyncio.Transport, transport)

    def exchange(
        self, head: bytes, body: bytes, on_data: OnData | None
    ) -> asyncio.Future[StatusAndBody]:
        """Send a request; return a future of its reply. `Pool.send` explains `on_data`."""
        self._reply = asyncio.get_running_loop().create_future()
        self._on_data = on_data
        self.transport.write(b"%b%d\r\n\r\n%b" % (head, len(body), body))
        return self._reply

    def data_received(self, data: bytes) -> None:
        """Add received bytes; set the reply once it is complete."""
        self._data += data
        try:
            if self._head is None:
                self._head = self._read_head()
            head = self._head
            if head is None:
                return
            if head.is_chunked:
                self._read_chunks(head)
            elif head.length is not None and len(self._data) >= head.length:
                self._finish(head, self._data, head.length)
        except ValueError as error:
            self._fail(ConnectionError(f"malformed HTTP reply: {error}"))

    def _read_head(self) -> ReplyHead | None:
        """Remove the head from the received bytes and return it; None while it is incomplete.

        Raises:
            ValueError: No reply is expected, or the head is too long or malformed.
        """
        raw_head, end_mark, body = self._data.partition(b"\r\n\r\n")
        if self._reply is None or len(raw_head) > MAX_HEAD:
            raise ValueError("bytes without a request, or headers without an end")
        if not end_mark:
            return None
        head = read_head(bytes(raw_head))
        self._data = body
        return head

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the request, unless its reply ends with the connection."""
        head = self._head
        if head is not None and head.length is None and not head.is_chunked:
            self._finish(head, self._data, len(self._data))
        reason = exc or "before its reply"
        error_type = ConnectionError
        if self.idle_since and head is None and not self._data:
            error_type = IdleConnectionClosed
        self._fail(error_type(f"the server closed the connection: {reason}"))

    def _read_chunks(self, head: ReplyHead) -> None:
        """Move complete chunks into the body; finish the reply at the chunk of size 0."""
        data = self._data
        position = 0
        size = -1
        while (line_end := data.find(b"\r\n", position)) >= 0:
            hex_size, _, _ = data[position:line_end].partition(b";")
            size = int(b"0" + hex_size, 16)
            chunk_start = line_end + 2
            chunk_end = chunk_start + size
            next_position = chunk_end + 2  # after the line end of the chunk
            if size == 0 or len(data) < next_position:
                break
            self._chunks += data[chunk_start:chunk_end]
            position = next_position
        del data[:position]
        if self._on_data is not None and self._chunks and head.status == 200:
            try:
                self._on_data(bytes(self._chunks))
            except Exception as error:  # noqa: BLE001  (`send` raises it)
                self._fail(error)
            self._chunks.clear()
        if size == 0 and data.endswith(b"\r\n\r\n"):  # after trailers, if any
            self._finish(head, self._chunks, len(self._chunks))
        elif size < 0 and len(data) > MAX_HEAD:
            raise ValueError("the size of a chunk has no end")

    def _finish(self, head: ReplyHead, body: bytearray, length: int) -> None:
        """Set the reply. A connection that got more bytes is not used again."""
        if head.is_last or len(body) > length:
            self.transport.close()
        self._data = bytearray()
        self._head = None
        self._chunks = bytearray()
        reply = self._take_reply()
        if reply is not None:
            reply.set_result((head.status, bytes(body[:length])))

    def _fail(self, error: Exception) -> None:
        self.transport.abort()
        reply = self._take_reply()
        if reply is not None:
            reply.set_exception(error)

    def _take_reply(self) -> asyncio.Future[StatusAndBody] | None:
        """Return the future of the reply and forget it; None if nothing waits for it."""
        reply = self._reply
        self._reply = None
        if reply is None or reply.done():
            return None
        return reply


def error_message(status: int, raw: bytes) -> str:
    """Return the message of an error answer, in any of the forms that LLM servers use."""
    try:
        error = msgspec.json.decode(raw)
        for key in ("error", "message"):
            if isinstance(error, dict) and key in error:
                error = error[key]
    except msgspec.DecodeError:
        error = raw.decode(errors="replace")
    return f"HTTP {status}: {str(error)[:500]}"
