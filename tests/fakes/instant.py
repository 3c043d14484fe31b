"""A server that answers every generation at once with little CPU, to benchmark clients.

    python -m tests.fakes.instant --port N [--tokens 8]

One asyncio Protocol without a web framework: the answer is encoded once, and only the length of a
request is read. It prints its port on the first line of stdout and runs until stdin closes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys

import uvloop


def _http(body: bytes) -> bytes:
    head = (
        f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def answers(tokens: int) -> tuple[bytes, bytes]:
    """Return the bytes of the answer to a generation and to other requests."""
    ids = [3 + i % 60 for i in range(tokens)]
    generation = {
        "text": "x" * tokens,
        "output_ids": ids,
        "meta_info": {
            "id": "instant",
            "finish_reason": {"type": "length", "length": tokens},
            "prompt_tokens": 8,
            "completion_tokens": tokens,
            "cached_tokens": 0,
            "weight_version": "0",
            "num_retractions": 0,
            "output_token_logprobs": [[-1.0, token, None] for token in ids],
            "weight_versions": [{"version": "0", "start": 0, "end": tokens}],
        },
    }
    info = {
        "model_path": "instant",
        "is_generation": True,
        "weight_version": "0",
        "vocab_size": 1 << 20,
        "context_length": 1 << 20,
        "status": "ok",
        "success": True,
    }
    return _http(json.dumps(generation).encode()), _http(json.dumps(info).encode())


class Instant(asyncio.Protocol):
    """One keep-alive connection."""

    def __init__(self, generation: bytes, info: bytes) -> None:
        self.generation, self.info = generation, info
        self.buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = self.buffer[:end].lower()
            length = 0
            if (at := head.find(b"content-length:")) >= 0:
                length = int(head[at + 15 :].split(b"\r\n", 1)[0])
            if len(self.buffer) < end + 4 + length:
                return
            self.buffer = self.buffer[end + 4 + length :]
            is_generation = head.startswith(b"post /generate")
            self.transport.write(self.generation if is_generation else self.info)


async def serve(port: int, tokens: int) -> None:
    """Serve until stdin closes."""
    generation, info = answers(tokens)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Instant(generation, info), "127.0.0.1", port)
    print(server.sockets[0].getsockname()[1], flush=True)
    closed = asyncio.Event()
    await loop.connect_read_pipe(lambda: _Stdin(closed), sys.stdin)
    await closed.wait()


class _Stdin(asyncio.Protocol):
    def __init__(self, closed: asyncio.Event) -> None:
        self.closed = closed

    def eof_received(self) -> None:
        self.closed.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()


def main() -> None:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=8)
    args = parser.parse_args()
    uvloop.run(serve(args.port, args.tokens))


if __name__ == "__main__":
    main()
