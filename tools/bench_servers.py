"""Measure rollout and publishers on real SGLang or vLLM servers: throughput, interruptions, stalls.

Every figure has a baseline, measured alternately in the same run: a bare aiohttp loop, the server's
own time for an update, a raw gloo broadcast of the same bytes. The script starts its servers with
launch_llm_server, requires `make sglang` or `make vllm`, and takes about five minutes on two cores.

    python tools/bench_servers.py [--kind vllm] [--repeats 5] [--only rollout interrupt stall …]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

import aiohttp  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import uvloop  # noqa: E402

from arealite.api.server_protocol import ServerAnswer  # noqa: E402
from arealite.base import log  # noqa: E402
from arealite.ext.sglang.sglang_protocol import SGLangProtocol  # noqa: E402
from arealite.ext.vllm.vllm_protocol import VLLMProtocol  # noqa: E402
from arealite.ext.weights import process_group  # noqa: E402
from arealite.impl.client.server_choice import LLMServerState  # noqa: E402
from arealite.impl.client.servers_client import ServersClient  # noqa: E402
from arealite.impl.http_client import KEEPALIVE_S  # noqa: E402
from arealite.system.names.name_registry import Entry  # noqa: E402
from tests.models import tiny_model  # noqa: E402
from tests.sglang.real import free_port  # noqa: E402
from tools import figures  # noqa: E402
from tools.bench_rollout import rate  # noqa: E402
from tools.bench_server import LARGE  # noqa: E402
from tools.server_site import (  # noqa: E402
    KINDS,
    TOKENS,
    Episodes,
    Kind,
    Publisher,
    Site,
    bare,
    traffic,
    until,
)

PROTOCOLS = {"sglang": SGLangProtocol, "vllm": VLLMProtocol}
SMALL = {"vocab": 320, "hidden_size": 128, "intermediate_size": 256}
Note = Callable[[str, float], None]


async def rollout(site: Site, port: int, note: Note, repeats: int) -> None:
    """Compare the tokens per second of the rollout path and of a bare aiohttp loop, alternately."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
    headers = {"Content-Type": "application/json"} | site.names.headers()
    async with (
        site.client() as (_, collector),
        aiohttp.ClientSession(connector=connector, headers=headers) as http,
    ):
        episodes = Episodes(collector)
        ways = {"bare": bare(f"http://127.0.0.1:{port}", http, site.kind), "ours": episodes.one}
        for lanes in (8, 32, 128):
            rates: dict[str, list[float]] = {name: [] for name in ways}
            for turn in range(-1, repeats):
                order = list(ways) if turn % 2 else list(ways)[::-1]
                for name in order:
                    per_s, _ = await rate(ways[name], max(96, 2 * lanes), lanes)
                    if turn >= 0:  # the first round is a warm-up
                        rates[name].append(per_s * TOKENS)
            for name, values in rates.items():
                note(f"rollout.{name}_tok_s.{lanes}", statistics.median(values))
            ratios = [o / b for o, b in zip(rates["ours"], rates["bare"], strict=True)]
            note(f"rollout.ours_over_bare.{lanes}", statistics.median(ratios))
        note("rollout.lost", episodes.lost)


async def interrupt(site: Site, note: Note, *, times: int = 5) -> None:
    """Publish while 64 generations run, by retract and by abort; count interrupted generations."""
    protocol_type: Any = PROTOCOLS[site.kind.name]
    decode = protocol_type.decode_answer
    answered = 0

    def count(protocol: Any, raw: bytes, num_before: int | None = None) -> ServerAnswer:
        nonlocal answered
        answer = decode(protocol, raw, num_before)
        answered += len(answer.output_ids)
        return answer

    protocol_type.decode_answer = count
    for mode in ("retract", "abort"):
        answered = 0
        with site.publisher("disk", mode) as publisher:
            await publisher.publish()
            async with site.client() as (client, collector), traffic(collector, 64) as episodes:
                for _ in range(times):
                    await publisher.publish()
                    await asyncio.sleep(0.5)
        stats = client.stats()
        note(f"interrupt.{mode}.episodes", episodes.count)
        note(f"interrupt.{mode}.lost", episodes.lost)
        note(f"interrupt.{mode}.interrupted", stats["interruptions"])
        note(f"interrupt.{mode}.resubmitted", stats["resubmissions"])
        note(f"interrupt.{mode}.failovers", stats["failovers"])
        note(f"interrupt.{mode}.tokens_kept_share", episodes.tokens / answered)
    protocol_type.decode_answer = decode


async def stall(site: Site, port: int, note: Note, *, repeats: int, lanes: int) -> None:
    """Compare pause → continue of a publish with the server's own time for the same update.

    Both under the same traffic, in turns: a server ends its running step first, most of the
    time of a large model on a CPU. `idle` is the same call on a server without requests.
    """
    url, stalls, own, idle = f"http://127.0.0.1:{port}", list[float](), list[float](), list[float]()
    with site.publisher("disk") as publisher, tempfile.TemporaryDirectory(dir="/dev/shm") as shm:
        copy = Path(shm) / "model"
        shutil.copytree(site.model, copy)
        http = aiohttp.ClientSession(headers=site.names.headers())
        async with site.client() as (_, collector), http:

            async def bare_update() -> float:
                return await site.kind.update(http, url, copy, Publisher.version)

            await publisher.publish()
            for _ in range(repeats):
                async with traffic(collector, lanes):
                    stalls.append((await publisher.publish()).stall_s)
                async with traffic(collector, lanes):
                    own.append(await bare_update())
                idle.append(await bare_update())
    name = site.folder.name
    for key, values in (("publish", stalls), ("server", own), ("server_idle", idle)):
        note(f"stall.{name}.{key}_ms", 1e3 * statistics.median(values))
    note(f"stall.{name}.publish_over_server", statistics.median(stalls) / statistics.median(own))
    note(f"stall.{name}.publish_over_idle", statistics.median(stalls) / statistics.median(idle))


async def elastic(site: Site, port: int, note: Note) -> None:
    """Start a second server and kill the first one, under traffic."""
    async with AsyncExitStack() as stack:
        publisher = stack.enter_context(site.publisher("disk"))
        await publisher.publish()
        client, collector = await stack.enter_async_context(site.client())
        async with traffic(collector, 16) as episodes:
            # In a thread: it waits for health.
            late_port = await asyncio.to_thread(stack.enter_context, site.served())
            named_s = await until(lambda: named(site, late_port))
            note("elastic.answering_to_named_s", named_s)  # it has to generate a token first
            seconds = await until(lambda: finished(server(client, late_port)) > 0)
            note("elastic.named_to_first_answer_s", seconds)
            victim = server(client, port)
            assert victim is not None
            await until(lambda: victim.in_flight >= 4)
            before, (entry,) = client.stats()["failovers"], named(site, port)
            os.killpg(entry.value["pid"], signal.SIGKILL)
            note("elastic.killed_to_moved_s", await until(lambda: not victim.in_flight))
            note("elastic.moved", client.stats()["failovers"] - before)
        note("elastic.lost", episodes.lost)


def server(client: ServersClient, port: int) -> LLMServerState | None:
    """Return the client's state of a server."""
    found = (s for s in client._router.servers.values() if s.address.endswith(f":{port}"))
    return next(found, None)


def named(site: Site, port: int) -> list[Entry]:
    """Return the server's live name; None until launch_llm_server found the server healthy."""
    names = site.names.list("llm_server")
    return [entry for entry in names if entry.value["address"].endswith(f":{port}")]


def finished(known: LLMServerState | None) -> int:
    """Return the number of requests that a server has answered."""
    return 0 if known is None else known.served - known.in_flight


async def distributed(site: Site, note: Note, repeats: int) -> None:
    """Compare a distributed publish and a raw gloo broadcast of the same bytes, alternately."""
    raw, ours, whole = list[float](), list[float](), list[float]()
    with site.publisher("distributed") as publisher:
        size = sum(tensor.nbytes for tensor in publisher.weights.values())
        await publisher.publish()
        with broadcasting(size, repeats + 1) as broadcast:
            await asyncio.to_thread(broadcast)  # the first broadcast allocates the memory
            for _ in range(repeats):
                raw.append(await asyncio.to_thread(broadcast))
                ours.append((await publisher.publish()).load_s)
                whole.append(publisher.seconds)
    note("distributed.mbytes", size / 1e6)
    note("distributed.raw_gloo_mb_s", size / 1e6 / statistics.median(raw))
    note("distributed.publish_mb_s", size / 1e6 / statistics.median(ours))
    note("distributed.whole_publish_s", statistics.median(whole))
    ratios = [theirs / our for our, theirs in zip(ours, raw, strict=True)]
    note("distributed.publish_over_raw", statistics.median(ratios))
    note("distributed.best_over_best", min(raw) / min(ours))


@contextmanager
def broadcasting(size: int, times: int) -> Iterator[Callable[[], float]]:
    """Yield a function that broadcasts `size` bytes to another process and returns the seconds."""
    port = free_port()
    command = [sys.executable, __file__, "--receive", str(port), str(size), str(times)]
    with subprocess.Popen(command) as process:
        made = join(port, rank=0)
        flat = torch.ones(size, dtype=torch.uint8)

        def broadcast() -> float:
            begin = time.perf_counter()
            dist.broadcast(flat, src=0, group=made)
            dist.barrier(group=made)
            return time.perf_counter() - begin

        yield broadcast
        dist.destroy_process_group(made)
        process.wait(60)


def join(port: int, *, rank: int) -> dist.ProcessGroup:
    """Join the group of the raw broadcasts."""
    address = ("127.0.0.1", port)
    where = address if rank else socket.create_server(address)
    return process_group.join(where, "raw", rank=rank, world_size=2, backend="gloo", seconds=300.0)


def receive(port: int, size: int, times: int) -> None:
    """Run the receiving process of the raw broadcasts."""
    made = join(port, rank=1)
    flat = torch.zeros(size, dtype=torch.uint8)
    for _ in range(times):
        dist.broadcast(flat, src=0, group=made)
        dist.barrier(group=made)
    dist.destroy_process_group(made)


async def bench(folder: Path, kind: Kind, only: list[str], repeats: int, note: Note) -> None:
    """Run all measurements; at most two servers run at a time."""
    small = Site(folder / "small", tiny_model(folder / "small" / "model", **SMALL), kind)
    if set(only) - {"distributed"}:
        with small.served() as port:
            if "rollout" in only:
                await rollout(small, port, note, repeats)
            if "interrupt" in only:
                await interrupt(small, note)
            if "stall" in only:
                await stall(small, port, note, repeats=3 * repeats, lanes=32)
            if "elastic" in only:
                await elastic(small, port, note)
    if {"distributed", "stall"} & set(only):
        large = Site(folder / "large", tiny_model(folder / "large" / "model", **LARGE), kind)
        with large.served() as port:
            if "stall" in only:
                await stall(large, port, note, repeats=3, lanes=2)
            if "distributed" in only:
                await distributed(large, note, max(3, repeats))


def main() -> None:
    """Print the table and write out/bench/sglang.json, or vllm.json."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parts = ["rollout", "interrupt", "stall", "elastic", "distributed"]
    parser.add_argument("--kind", choices=KINDS, default="sglang")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--receive", nargs=3, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.receive:
        receive(*options.receive)
        return
    log.setup("bench", "warning")
    gc.freeze()
    gc.set_threshold(50_000)  # as the rollout role does
    results: dict[str, float] = {}

    def note(metric: str, value: float) -> None:
        results[metric] = round(value, 4)
        print(f"{metric:40s} {value:12.3f}", flush=True)

    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        kind = KINDS[options.kind]
        uvloop.run(bench(Path(folder), kind, options.only, options.repeats, note))
    note("seconds", time.perf_counter() - begin)
    figures.save(f"{options.kind}.json", results)


if __name__ == "__main__":
    main()
