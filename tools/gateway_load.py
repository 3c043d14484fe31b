"""The clients of bench_gateway.py, in a process of their own: lean, so that they cost little CPU.

Reads jobs as JSON lines from stdin, and writes a line of figures for each.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import msgspec
import uvloop

HEAD = (
    "POST {} HTTP/1.1\r\nHost: {}\r\nAuthorization: Bearer {}\r\nContent-Type: application/json\r\n"
)


class Job(msgspec.Struct):
    """Work of the clients, all at once."""

    url: str
    """Of the request: a path of the gateway, or /generate of a server."""
    keys: list[str]
    """One client for each."""
    turns: int = 1
    history: int = 0
    """Characters of the conversation before the first turn."""
    user: int = 50
    """Characters of each turn's message."""
    pause_s: float = 0.0
    """Mean time between an answer and the next request: the agent's tools, and a model's speed."""
    stream: bool = False
    timeout_s: float = 60.0
    ids: list[int] = []
    """Prompt of /generate."""
    tokens: int = 16
    """Tokens of each answer of /generate."""


class Result(msgspec.Struct):
    """Figures of a job."""

    requests: int = 0
    timeouts: int = 0
    seconds: float = 0.0
    first_ms: float = 0.0
    """Median time to the first token of a stream, of a request otherwise."""
    errors: list[str] = []


class Client:
    """One connection, with at most one request."""

    def __init__(self, url: str, key: str) -> None:
        parts = urlsplit(url)
        self.place = parts.hostname, parts.port
        self.head = HEAD.format(parts.path, parts.netloc, key).encode()
        self.reader: asyncio.StreamReader | None = None

    async def post(self, body: bytes) -> tuple[bytes, float]:
        """Return the body of the answer, or its events, and the time of its first bytes."""
        if self.reader is None:
            self.reader, self.writer = await asyncio.open_connection(*self.place, limit=2**24)
        self.writer.write(b"%bContent-Length: %d\r\n\r\n%b" % (self.head, len(body), body))
        head = (await self.reader.readuntil(b"\r\n\r\n")).lower()
        if not head.startswith(b"http/1.1 200"):
            raise RuntimeError(head.decode() + (await self.reader.read(500)).decode())
        length = head.partition(b"content-length:")[2].partition(b"\r\n")[0]
        if length:
            return await self.reader.readexactly(int(length)), time.perf_counter()
        events, first = b"", 0.0
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            events += await self.reader.readexactly(size)
            await self.reader.readexactly(2)
            if not first and (b'"content":"' in events or b'"output_ids":[' in events):
                first = time.perf_counter()
        await self.reader.readexactly(2)
        return events, first


def message(role: str, text: str) -> bytes:
    """Return a message in JSON."""
    return msgspec.json.encode({"role": role, "content": text})


def body_of(job: Job, messages: list[bytes]) -> bytes:
    """Return the body of a request."""
    if not job.ids:
        stream = b',"stream":true' if job.stream else b""
        return b'{"model":"policy"%b,"messages":[%b]}' % (stream, b",".join(messages))
    sampling = {"max_new_tokens": job.tokens, "ignore_eos": True, "stream_interval": 8}
    made: dict[str, Any] = {"input_ids": job.ids, "sampling_params": sampling}
    return msgspec.json.encode(made | {"return_logprob": True, "stream": job.stream})


async def lane(job: Job, number: int, result: Result, firsts: list[float]) -> None:
    """Send the requests of one client."""
    draw = random.Random(number).uniform
    client, text = Client(job.url, job.keys[number]), "what is next? " * 20
    messages = [message("user", f"{number} " + "lorem ipsum " * (job.history // 12))]
    for turn in range(job.turns):
        if job.pause_s:
            await asyncio.sleep(draw(0, 2 * job.pause_s))
        if turn:
            messages.append(message("user", f"{turn} {text}"[: job.user]))
        body, begin = body_of(job, messages), time.perf_counter()
        try:
            async with asyncio.timeout(job.timeout_s):
                answer, first = await client.post(body)
        except TimeoutError:
            result.timeouts += 1
            return
        result.requests += 1
        firsts.append(1e3 * (first - begin))
        if not job.ids and not job.stream:
            content = msgspec.json.decode(answer)["choices"][0]["message"]["content"]
            messages.append(message("assistant", content))
    client.writer.close()


async def work(job: Job) -> Result:
    """Run all clients of a job."""
    result, firsts = Result(), list[float]()
    begin = time.perf_counter()
    lanes = [lane(job, number, result, firsts) for number in range(len(job.keys))]
    for error in await asyncio.gather(*lanes, return_exceptions=True):
        if error is not None and len(result.errors) < 3:
            result.errors.append(repr(error))
    result.seconds = time.perf_counter() - begin
    result.first_ms = statistics.median(firsts or [0.0])
    return result


async def main() -> None:
    """Serve jobs until stdin closes."""
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader(limit=2**24)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        result = await work(msgspec.json.decode(line, type=Job))
        print(msgspec.json.encode(result).decode(), flush=True)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        uvloop.run(main())
