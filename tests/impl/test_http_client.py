"""Check the client's HTTP connections against a server that sends the bytes of a test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arealite.impl import http_client
from arealite.impl.http_client import Connection, Pool, ServerEndpoint
from tests.waiting import eventually

PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3;x=1\r\nllo\r\n0\r\n\r\n"
)
TRAILED = CHUNKED[:-2] + b"Sum: 1\r\n\r\n"
ENDLESS = b"HTTP/1.1 200 OK\r\nServer: x\r\n\r\nhello"


class ByteServer:
    """Answers each request with the next bytes of `replies`; the last bytes repeat."""

    def __init__(self, *replies: bytes, closes: bool = False) -> None:
        self.replies, self.closes = [*replies], closes
        self.requests: list[bytes] = []
        self.accepted = 0
        self.writers: list[asyncio.StreamWriter] = []
        self.held: asyncio.Event | None = None
        """If set, a reply waits for this event."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        self.writers.append(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.partition(b"Content-Length: ")[2].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                if self.held is not None:
                    await self.held.wait()
                writer.write(self.replies.pop(0) if self.replies[1:] else self.replies[0])
                await writer.drain()
                if self.closes:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


Site = tuple[Pool, ServerEndpoint]


@pytest.fixture
def site() -> Callable[..., Any]:
    @asynccontextmanager
    async def start(server: ByteServer, *, limit: int = 8) -> AsyncIterator[Site]:
        listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        async with listening:
            port = listening.sockets[0].getsockname()[1]
            pool = Pool(30.0, limit=limit)
            yield (
                pool,
                ServerEndpoint(f"http://127.0.0.1:{port}/generate", {"Authorization": "Bearer s"}),
            )
            pool.close()

    return start


@pytest.mark.parametrize("raw", [PLAIN, CHUNKED, TRAILED])
async def test_replies_arrive_on_one_connection(site, raw: bytes) -> None:
    server = ByteServer(raw)
    async with site(server) as (pool, endpoint):
        assert [await pool.send(endpoint, b"{}") for _ in range(3)] == [(200, b"hello")] * 3
        host = ":".join(map(str, endpoint.place)).encode()
    assert server.accepted == 1
    assert server.requests[0] == (
        b"POST /generate HTTP/1.1\r\nHost: " + host + b"\r\nContent-Type: application/json\r\n"
        b"Authorization: Bearer s\r\nContent-Length: 2\r\n\r\n{}"
    )


async def test_request_with_a_body_is_a_post_and_without_one_a_get(site) -> None:
    server = ByteServer(PLAIN)
    async with site(server) as (pool, endpoint):
        url = "http://{}:{}/loads?include=core".format(*endpoint.place)
        assert await pool.request(url, {"Authorization": "Bearer s"}) == (200, b"hello")
        assert await pool.request(url, {}, {"mode": "abort"}) == (200, b"hello")
    get, post = server.requests
    assert get.startswith(b"GET /loads?include=core HTTP/1.1\r\n")
    assert get.endswith(b"\r\nAuthorization: Bearer s\r\nContent-Length: 0\r\n\r\n")
    assert post.startswith(b"POST /loads?include=core HTTP/1.1\r\n")
    assert post.endswith(b'\r\nContent-Length: 16\r\n\r\n{"mode":"abort"}')


class Transport(asyncio.Transport):
    """Counts the ends of a connection."""

    ended = 0

    def write(self, data: Any) -> None:
        pass

    def abort(self) -> None:
        self.ended += 1

    close = abort


@given(st.sampled_from([PLAIN, CHUNKED, TRAILED]), st.data())
async def test_reply_in_any_pieces_is_read(raw: bytes, data: st.DataObject) -> None:
    connection = Connection()
    connection.connection_made(Transport())
    reply = connection.exchange(b"", b"", None)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(raw) - 1))))
    for begin, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        assert not reply.done()
        connection.data_received(raw[begin:end])
    assert reply.result() == (200, b"hello")
    assert connection.transport.ended == 0  # type: ignore[attr-defined]


@given(st.binary(max_size=200), st.booleans())
async def test_garbage_is_a_connection_error_or_waits(raw: bytes, is_body: bool) -> None:
    connection = Connection()
    connection.connection_made(Transport())
    reply = connection.exchange(b"", b"", None)
    connection.data_received(CHUNKED[: CHUNKED.index(b"2\r\n")] * is_body + raw)
    connection.connection_lost(None)
    assert reply.done()
    assert reply.exception() is None or isinstance(reply.exception(), OSError)


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 two OK\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        + b"0" * (http_client.MAX_HEAD + 1),
        b"x" * (http_client.MAX_HEAD + 1),
    ],
)
async def test_malformed_reply_fails_the_request_and_its_connection(site, raw: bytes) -> None:
    server = ByteServer(raw, PLAIN)
    async with site(server) as (pool, endpoint):
        with pytest.raises(ConnectionError, match="malformed HTTP"):
            await pool.send(endpoint, b"{}")
        assert await pool.send(endpoint, b"{}") == (200, b"hello")
    assert server.accepted == 2


async def test_body_without_a_length_ends_with_the_connection(site) -> None:
    async with site(ByteServer(ENDLESS, closes=True)) as (pool, endpoint):
        assert await pool.send(endpoint, b"{}") == (200, b"hello")


async def test_connection_closed_before_the_reply_is_a_connection_error(site) -> None:
    async with site(ByteServer(PLAIN[:-1], closes=True)) as (pool, endpoint):
        with pytest.raises(ConnectionError, match="closed the connection"):
            await pool.send(endpoint, b"{}")


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(PLAIN + b"more", id="more bytes than announced"),
        pytest.param(PLAIN.replace(b"OK\r\n", b"OK\r\nConnection: Close\r\n"), id="close"),
        pytest.param(PLAIN.replace(b"1.1", b"1.0"), id="HTTP 1.0"),
    ],
)
async def test_connection_that_ends_is_not_used_again(site, first: bytes) -> None:
    server = ByteServer(first, PLAIN)
    async with site(server) as (pool, endpoint):
        for _ in range(2):
            assert await pool.send(endpoint, b"{}") == (200, b"hello")
    assert server.accepted == 2


async def test_idle_connection_that_the_server_closed_is_not_used_again(site) -> None:
    server = ByteServer(PLAIN)
    async with site(server) as (pool, endpoint):
        await pool.send(endpoint, b"{}")
        server.writers[0].close()
        await server.writers[0].wait_closed()
        [connection] = pool._idle[endpoint.place]
        await eventually(connection.transport.is_closing, "the end of the connection")
        assert await pool.send(endpoint, b"{}") == (200, b"hello")
    assert server.accepted == 2


async def test_request_is_repeated_if_an_idle_connection_closes_at_that_moment(site) -> None:
    server = ByteServer(PLAIN)
    async with site(server) as (pool, endpoint):
        await pool.send(endpoint, b"{}")
        server.writers[0].transport.pause_reading()
        host, port = endpoint.place
        again = asyncio.create_task(pool.request(f"http://{host}:{port}/generate", {}))
        [connection] = pool._idle[endpoint.place]
        await eventually(lambda: not pool._idle[endpoint.place], "the request is sent")
        assert connection._reply is not None
        server.writers[0].transport.abort()
        assert await again == (200, b"hello")
    assert server.accepted == 2


async def test_connection_idle_for_too_long_is_replaced(site, monkeypatch) -> None:
    server = ByteServer(PLAIN)
    async with site(server) as (pool, endpoint):
        await pool.send(endpoint, b"{}")
        monkeypatch.setattr(http_client, "KEEPALIVE_S", -1.0)
        await pool.send(endpoint, b"{}")
    assert server.accepted == 2


async def test_limit_bounds_the_open_requests(site) -> None:
    server = ByteServer(PLAIN)
    server.held = asyncio.Event()
    async with site(server, limit=2) as (pool, endpoint):
        posts = [asyncio.create_task(pool.send(endpoint, b"{}")) for _ in range(6)]
        await eventually(lambda: len(server.requests) == 2, "two requests")
        assert pool._slots.locked()
        server.held.set()
        assert await asyncio.gather(*posts) == [(200, b"hello")] * 6
    assert server.accepted == 2


async def test_cancelled_request_closes_its_connection_and_frees_its_slot(site) -> None:
    server = ByteServer(PLAIN)
    server.held = asyncio.Event()
    async with site(server, limit=1) as (pool, endpoint):
        post = asyncio.create_task(pool.send(endpoint, b"{}"))
        await eventually(lambda: server.requests, "the request")
        post.cancel()
        with pytest.raises(asyncio.CancelledError):
            await post
        server.held.set()
        assert await pool.send(endpoint, b"{}") == (200, b"hello")
    assert server.accepted == 2


async def test_connection_that_is_not_accepted_times_out(monkeypatch) -> None:
    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", never)
    with pytest.raises(TimeoutError, match=r"no connection within 0\.01 s"):
        await Pool(0.01, limit=1).send(ServerEndpoint("http://127.0.0.1:1/generate", {}), b"{}")


async def test_parts_of_a_body_are_passed_on_as_they_arrive() -> None:
    parts: list[bytes] = []
    connection = Connection()
    connection.connection_made(Transport())
    reply = connection.exchange(b"", b"", parts.append)
    for piece in (CHUNKED[:-14], CHUNKED[-14:]):
        connection.data_received(piece)
        parts.append(b"|")
    assert reply.result() == (200, b"")
    assert b"".join(parts) == b"he|llo|"


async def test_body_of_an_error_is_returned_whole(site) -> None:
    parts: list[bytes] = []
    async with site(ByteServer(CHUNKED.replace(b"200", b"500"))) as (pool, endpoint):
        assert await pool.send(endpoint, b"{}", parts.append) == (500, b"hello")
    assert not parts
