"""Measure the cost of a rollout worker per episode: client and collector against bare aiohttp.

Both use the same stub server, a process that replies at once. They run alternately in one run, so
other load on the machine affects both.

    python tools/bench_rollout.py [--episodes 4000] [--concurrency 256] [--rounds 5] [--profile]
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import aiohttp
import msgspec
import uvloop

from arealite.api.agent import Agent
from arealite.api.collector_config import CollectorConfig
from arealite.api.env import Env, EnvConfig, envs
from arealite.api.experiment_config import ExperimentConfig
from arealite.api.llm import SamplingConfig
from arealite.api.rollout_messages import Lease
from arealite.api.task import Task
from arealite.api.trainer import PPOConfig, TrainerConfig
from arealite.api.trial import ClusterConfig
from arealite.impl.client.servers_client import ServersClient
from arealite.impl.rollout.collector import Collector
from arealite.system.names.name_registry import NameRegistry
from tools import figures

ROOT = Path(__file__).resolve().parents[1]
TOKENS = 16
GROUP = 8
PROMPT = "what is 12 + 34? think it over.."  # 32 characters, 32 tokens


@envs.register("instant")
class InstantEnv(Env):
    """Environment of one answer, which has reward 1."""

    async def run(self, task: Task, **agents: Agent) -> None:
        """Reward every answer with 1."""
        await agents["agent"].act(task.prompt)
        agents["agent"].reward(1.0)


@contextmanager
def stub() -> Iterator[str]:
    """Start the stub server; yield its address."""
    command = [sys.executable, "-m", "tests.fakes.instant", "--tokens", str(TOKENS)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        port = int(process.stdout.readline())
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.stdin.close()


async def rate(one: Callable[[int], Awaitable[Any]], count: int, concurrency: int) -> Any:
    """Run `one` `count` times, `concurrency` at a time.

    Returns:
        Runs per second, and CPU seconds per run.
    """
    numbers = iter(range(count))

    async def lane() -> None:
        for number in numbers:
            await one(number)

    begin, cpu = time.perf_counter(), time.process_time()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(concurrency):
            tasks.create_task(lane())
    seconds = time.perf_counter() - begin
    return count / seconds, (time.process_time() - cpu) / count


def bare(address: str, session: aiohttp.ClientSession) -> Callable[[int], Awaitable[Any]]:
    """Return the baseline: a function that sends prepared bytes and reads the reply."""
    body = msgspec.json.encode(
        {
            "input_ids": list(range(3, 35)),
            "return_logprob": True,
            "sampling_params": {"max_new_tokens": TOKENS, "temperature": 1.0},
        }
    )

    async def one(number: int) -> None:
        async with session.post(f"{address}/generate", data=body) as response:
            await response.read()

    return one


def experiment(folder: str, concurrency: int) -> ExperimentConfig:
    """Return a config whose environment is the instant one."""
    collector = CollectorConfig(
        env=EnvConfig(type="instant"),
        sampling=SamplingConfig(max_new_tokens=TOKENS),
        group_size=GROUP,
        concurrency=concurrency,
    )
    return ExperimentConfig(
        cluster=ClusterConfig(name_root=folder, ttl_s=3600.0),
        trainer=TrainerConfig(ppo=PPOConfig(collector=collector)),
    )


def ours(collector: Collector) -> Callable[[int], Awaitable[Any]]:
    """Return a function that runs one episode with collector and client, up to payload bytes."""

    async def one(number: int) -> None:
        group, member = divmod(number, GROUP)
        task = Task(
            task_id=f"train-{group}",
            prompt=f"{PROMPT[:-4]}{group % 10000:04d}",
            ground_truth="46",
            extra_info={},
        )
        lease = Lease(
            lease_id=f"l{group}",
            group_id=f"g{group}",
            split="train",
            task=task,
            members=[member],
            version=0,
        )
        episode, payloads = await collector.run(lease, member)
        assert episode.failure is None, episode.failure
        assert len(payloads) == 1

    return one


@asynccontextmanager
async def collector(address: str, folder: str, concurrency: int) -> AsyncIterator[Collector]:
    """Yield a collector whose client uses the stub; set the garbage collector as workers do."""
    from tests.models import tiny_tokenizer

    config = experiment(folder, concurrency)
    entry = {"address": address, "vocab_size": 320, "context_length": 2048}
    NameRegistry.of(config).put("llm_server", "stub", entry)
    gc.freeze()
    gc.set_threshold(50_000)
    client = ServersClient(config, config.trainer.ppo.collector.client)
    await client.start()
    yield Collector(config, client, tiny_tokenizer())
    await client.close()


async def measure(options: argparse.Namespace, address: str, folder: str) -> dict[str, float]:
    """Run both alternately; return the medians."""
    connector = aiohttp.TCPConnector(limit=1024)
    results: dict[str, list[tuple[float, float]]] = {"bare": [], "ours": []}
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        collector(address, folder, options.concurrency) as own,
    ):
        ways = {"bare": bare(address, session), "ours": ours(own)}
        for way in ways.values():
            await rate(way, options.concurrency * 2, options.concurrency)
        profiler = cProfile.Profile()
        for _ in range(options.rounds):
            for name, way in ways.items():
                if options.profile and name == "ours":
                    profiler.enable()
                results[name].append(await rate(way, options.episodes, options.concurrency))
                profiler.disable()
    if options.profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(45)
    ratios = [o[0] / b[0] for o, b in zip(results["ours"], results["bare"], strict=True)]
    found = {"rollout_ratio_to_bare": statistics.median(ratios)}
    for name, pairs in results.items():
        found[f"rollout_{name}_per_s"] = statistics.median(pair[0] for pair in pairs)
        found[f"rollout_{name}_cpu_ms"] = 1e3 * statistics.median(pair[1] for pair in pairs)
    return found


def main() -> None:
    """Measure, print a table, and write out/bench/rollout.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=4000)
    parser.add_argument("--concurrency", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    with stub() as address, tempfile.TemporaryDirectory() as folder:
        found = uvloop.run(measure(options, address, folder))
    figures.show(found, digits=3)
    figures.save("rollout.json", found)


if __name__ == "__main__":
    main()
