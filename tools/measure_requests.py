"""Measure the CPU time that the largest requests take at a stretch in a server's event loop.

    python tools/measure_requests.py

Starts the embedded server (with a model of 2^20 tokens of context) and an environment's server on
loopback, sends each the largest bodies that its limits allow, of several hostile shapes, and prints
for each the longest callback of the server's loop. Exits with 1 where one took more than 50 ms.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import threading
import time
from asyncio import events
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.fakes import env_hosts  # noqa: F401  (registers environments)
from tests.fakes.embedded import running, server_config
from tests.fakes.env_servers import hosted
from tests.models import tiny_model

LIMIT_S = 0.05


class Stopwatch:
    """The longest callback of the loop that runs in this thread, in CPU time of the thread."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        thread, plain = threading.get_ident(), events.Handle._run

        def run(handle: events.Handle) -> None:
            begin = time.thread_time()
            plain(handle)
            if threading.get_ident() == thread:
                self.longest_s = max(self.longest_s, time.thread_time() - begin)

        events.Handle._run = run  # type: ignore[method-assign]


def filled(head: bytes, part: bytes, tail: bytes, size: int) -> bytes:
    """Return `head`, as many `part` as fit, and `tail`."""
    return head + part * ((size - len(head) - len(tail)) // len(part)) + tail


def prompts(size: int) -> Iterator[tuple[str, bytes]]:
    """Return bodies of /generate, by name."""
    ids, sampling = b'{"input_ids": [', b'{"input_ids": [5], "sampling_params": {'
    yield "token ids of two digits", filled(ids, b"63, ", b"1]}", size)
    yield "token ids of one digit", filled(ids, b"1,", b"1]}", size)
    yield "one number", filled(ids, b"1", b"]}", size)
    yield "numbers of 4,000 digits", filled(ids, b"9" * 4000 + b",", b"1]}", size)
    yield "numbers of 40 digits", filled(ids, b"9" * 40 + b",", b"1]}", size)
    yield "stop strings", filled(sampling + b'"stop": [', b'"",', b'""]}}', size)
    yield "stop ids", filled(sampling + b'"stop_token_ids": [', b"1,", b"1]}}", size)
    yield "a request id", filled(b'{"input_ids": [5], "rid": "', b"x", b'"}', size)
    yield "escapes", filled(b'{"input_ids": [5], "rid": "', b"\\u00e9", b'"}', size)
    yield "unknown lists", filled(b'{"input_ids": [5], "x": [', b"[],", b"1]}", size)
    yield "unknown fields", filled(b'{"input_ids": [5]', b',"x":1', b"}", size)
    yield "depth", filled(b'{"x": ', b"[", b"", size)
    yield "spaces", filled(b"", b" ", b"{}", size)


def layouts(size: int) -> Iterator[tuple[str, bytes]]:
    """Return bodies of /update_weights_from_distributed, by name."""
    more = b'"dtypes": [], "shapes": []}'
    yield "names", filled(b'{"names": [', b'"a",', b'"a"], ' + more, size)
    head = b'{"names": [], "dtypes": [], "shapes": ['
    yield "shapes", filled(head, b"[1],", b"[1]]}", size)
    yield "empty shapes", filled(head, b"[],", b"[]]}", size)


def tasks(size: int) -> Iterator[tuple[str, bytes]]:
    """Return bodies of /reset, by name."""
    head = b'{"task": {"prompt": "go", "extra_info": {"a": ['
    for part in (b"[]", b"{}", b'{"":1}', b"[[[]]]", b"1", b"1.5", b'""', b'"\\u00e9"'):
        yield f"{part.decode()}, ...", filled(head, part + b",", b"1]}}}", size)
        few = head + (part + b",") * (60_000 // max(1, part.count(b"[") + part.count(b"{")))
        yield f"{part.decode()}, within the limit", filled(few, b"1,", b"1]}}}", size)
    yield "a long text", filled(b'{"task": {"prompt": "', b"x", b'"}}', size)
    yield "depth", filled(b'{"task": ', b'{"a":', b"", size)


def messages(size: int) -> Iterator[tuple[str, bytes]]:
    """Return messages over a socket, by name."""
    batch = b'{"type": "batch", "data": ['
    yield "a batch of many types", filled(batch, b'{"type":"x"},', b'{"type":"x"}]}', size)
    resets = (
        {"type": "reset", "session": str(n), "data": {"task": {"prompt": "go"}}} for n in range(900)
    )
    yield "a batch of 900 resets", json.dumps({"type": "batch", "data": [*resets]}).encode()
    for name, body in tasks(size - 100):
        yield f"reset: {name}", b'{"type": "reset", "data": ' + body + b"}"


async def elsewhere(job: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Run a client in another thread, with a loop of its own."""
    return await asyncio.to_thread(lambda: asyncio.run(job()))


async def post(url: str, body: bytes) -> int:
    """Return the status of the answer."""
    headers = {"Content-Type": "application/json"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, data=chunks(body), headers=headers) as answer,
    ):
        await answer.read()
        return answer.status


async def chunks(body: bytes) -> Any:
    for begin in range(0, len(body), 2**18):
        yield body[begin : begin + 2**18]


async def say(url: str, body: bytes) -> int:
    """Return the length of the answer to a message over a socket."""
    async with aiohttp.ClientSession() as session, session.ws_connect(url, max_msg_size=0) as ws:
        await ws.send_str(body.decode())
        return len((await ws.receive()).data or "")


async def measure(watch: Stopwatch, what: str, job: Callable[[], Coroutine[Any, Any, int]]) -> bool:
    """Send one request three times; print the best of the longest callbacks."""
    best_s, answer = 9.0, 0
    for _ in range(3):
        watch.longest_s = 0.0
        answer = await elsewhere(job)
        best_s = min(best_s, watch.longest_s)
    print(f"{1000 * best_s:7.1f} ms  {what}  -> {answer}", flush=True)
    return best_s <= LIMIT_S


async def main() -> int:
    """Return the exit code."""
    watch, good = Stopwatch(), list[bool]()
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model(Path(folder) / "model", max_position_embeddings=2**20)
        async with running(server_config(model, folder)) as server:
            from arealite.ext.embedded.server_app import App

            bodies = App(server.engine, server._model).bodies()
            for path, make in (
                ("/generate", prompts),
                ("/update_weights_from_distributed", layouts),
            ):
                for name, body in make(bodies[path]):
                    url, what = server.address + path, f"{path} {len(body):>9,} B  {name}"
                    good.append(await measure(watch, what, lambda u=url, b=body: post(u, b)))
            for path in ("/pause_generation", "/continue_generation", "/init_weights_update_group"):
                url, body = server.address + path, filled(b"{", b'"x":1,', b'"x":1}', 2**16)
                good.append(await measure(watch, path, lambda u=url, b=body: post(u, b)))
    async with hosted("host_steps") as (_, address):
        for name, body in tasks(2**20):
            url, what = f"http://{address}/reset", f"/reset {len(body):>9,} B  {name}"
            good.append(await measure(watch, what, lambda u=url, b=body: post(u, b)))
        for name, body in messages(2**20):
            url, what = f"http://{address}/ws", f"/ws {len(body):>9,} B  {name}"
            good.append(await measure(watch, what, lambda u=url, b=body: say(u, b)))
    return 0 if all(good) else 1


if __name__ == "__main__":
    raise SystemExit(asyncio.run(main()))
