"""A trial with real SGLang or vLLM servers: names, servers, client, publisher.

bench_servers.py has the measurements.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from safetensors.torch import load_file

from arealite.api.collector_config import CollectorConfig
from arealite.api.env_config import EnvConfig
from arealite.api.experiment_config import ExperimentConfig, ModelConfig
from arealite.api.llm import SamplingConfig
from arealite.api.publisher import PublishReport, publishers
from arealite.api.publisher_config import PublisherConfig
from arealite.api.rollout_messages import Lease
from arealite.api.task import Task
from arealite.api.trainer import PPOConfig, TrainerConfig
from arealite.api.trial import ClusterConfig
from arealite.impl.client.servers_client import ServersClient
from arealite.impl.rollout.collector import Collector
from arealite.system.names.name_registry import NameRegistry
from tests.models import tiny_tokenizer
from tests.sglang.real import free_port
from tools import bench_rollout  # registers its environment

ROOT = Path(__file__).resolve().parents[1]
PYTHON = os.environ.get("SGLANG_PYTHON", str(ROOT / ".venv-sglang" / "bin" / "python"))
VLLM_PYTHON = os.environ.get("VLLM_PYTHON", str(ROOT / ".venv-vllm" / "bin" / "python"))
TOKENS, GROUP = 64, 8
START_S = 300.0


class SGLang:
    """Options and requests of SGLang servers, without AReaLite's client and publisher."""

    name = "sglang"
    python = PYTHON
    generate_path = "/generate"

    def body(self, prompt_ids: list[int]) -> dict[str, Any]:
        """Return the request of a generation of TOKENS tokens."""
        sampling = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "temperature": 1.0}
        return {"input_ids": prompt_ids, "return_logprob": True, "sampling_params": sampling}

    def output_ids(self, answer: Any) -> list[int]:
        """Return the sampled tokens of an answer."""
        return answer["output_ids"]

    async def update(
        self, http: aiohttp.ClientSession, url: str, folder: Path, version: int
    ) -> float:
        """Update a server from a folder by its own routes; return the seconds of the loading."""
        body = {"model_path": str(folder), "flush_cache": True, "weight_version": str(version)}
        await post(http, f"{url}/pause_generation", {"mode": "retract"})
        seconds = await post(http, f"{url}/update_weights_from_disk", body)
        await post(http, f"{url}/continue_generation", {})
        return seconds


class VLLM:
    """Options and requests of vLLM servers, without AReaLite's client and publisher."""

    name = "vllm"
    python = VLLM_PYTHON
    generate_path = "/inference/v1/generate"

    def body(self, prompt_ids: list[int]) -> dict[str, Any]:
        """Return the request of a generation of TOKENS tokens."""
        sampling = {"max_tokens": TOKENS, "min_tokens": TOKENS, "temperature": 1.0}
        sampling |= {"logprobs": 0, "detokenize": False}
        return {"token_ids": prompt_ids, "sampling_params": sampling}

    def output_ids(self, answer: Any) -> list[int]:
        """Return the sampled tokens of an answer."""
        return answer["choices"][0]["token_ids"]

    async def update(
        self, http: aiohttp.ClientSession, url: str, folder: Path, version: int
    ) -> float:
        """Update a server from a folder by its own routes; return the seconds of the loading."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await post(http, f"{url}/pause?mode=keep", {})
        seconds = await post(http, f"{url}/collective_rpc", body)
        seconds += await post(http, f"{url}/reset_prefix_cache", {})
        await post(http, f"{url}/update_weight_version", {"new_version": str(version)})
        await post(http, f"{url}/resume", {})
        return seconds


Kind = SGLang | VLLM
KINDS: dict[str, Kind] = {"sglang": SGLang(), "vllm": VLLM()}


class Site:
    """The names, the model and the config of one trial."""

    def __init__(self, folder: Path, model: Path, kind: Kind = KINDS["sglang"]) -> None:
        sampling = SamplingConfig(max_new_tokens=TOKENS, min_new_tokens=TOKENS)
        collector = CollectorConfig(
            env=EnvConfig(type="instant"), sampling=sampling, group_size=GROUP, concurrency=256
        )
        self.folder, self.model, self.kind = folder, model, kind
        self.config = ExperimentConfig(
            cluster=ClusterConfig(name_root=str(folder / "names"), run_root=str(folder / "runs")),
            model=ModelConfig(path=str(model)),
            trainer=TrainerConfig(ppo=PPOConfig(collector=collector)),
        )
        self.names = NameRegistry.of(self.config)

    @contextmanager
    def served(self) -> Iterator[int]:
        """Run launch_llm_server with one server on the CPU; give its port once healthy."""
        port = free_port()
        words = {
            "llm_server.type": self.kind.name,
            "llm_server.port": port,
            f"llm_server.{self.kind.name}.device": "cpu",
            f"llm_server.{self.kind.name}.python": self.kind.python,
            "model.path": self.model,
            "cluster.name_root": self.folder / "names",
            "cluster.run_root": self.folder / "runs",
        }
        command = [sys.executable, str(ROOT / "arealite" / "launch_llm_server.py")]
        command += [f"{key}={value}" for key, value in words.items()]
        with (self.folder / f"server-{port}.log").open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            end = time.monotonic() + START_S
            while not healthy(port):
                if process.poll() is not None or time.monotonic() > end:
                    raise SystemExit((self.folder / f"server-{port}.log").read_text())
                time.sleep(0.02)
            yield port
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)

    @asynccontextmanager
    async def client(self) -> AsyncIterator[tuple[ServersClient, Collector]]:
        """Run a client and a collector."""
        client = ServersClient(self.config, self.config.trainer.ppo.collector.client)
        await client.start()
        try:
            yield client, Collector(self.config, client, tiny_tokenizer())
        finally:
            await client.close()

    @contextmanager
    def publisher(self, kind: str, mode: str = "retract") -> Iterator[Publisher]:
        """Run a weight publisher."""
        made: Any = publishers.get(kind)
        options = PublisherConfig(type=kind, pause_mode=mode)  # type: ignore[arg-type]
        ppo = replace(self.config.trainer.ppo, publisher=options)
        publisher = made(replace(self.config, trainer=TrainerConfig(ppo=ppo)), None)
        try:
            yield Publisher(publisher, self.model)
        finally:
            publisher.close()


class Publisher:
    """Publishes the model's own weights, again and again, as the next version."""

    version = 0

    def __init__(self, publisher: Any, model: Path) -> None:
        self.publisher = publisher
        self.weights = load_file(model / "model.safetensors")
        self.seconds = 0.0

    async def publish(self) -> PublishReport:
        """Publish the next version; return the report."""
        Publisher.version += 1
        return await asyncio.to_thread(self._publish, Publisher.version)

    def _publish(self, version: int) -> PublishReport:
        begin = time.perf_counter()
        while self.publisher.stage(version, iter(self.weights.items())):
            pass
        report = self.publisher.push(version)
        self.seconds = time.perf_counter() - begin
        return report


def healthy(port: int) -> bool:
    """Return whether a server replies."""
    with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
        return True
    return False


async def post(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> float:
    """POST a request that must succeed; return the seconds."""
    begin = time.perf_counter()
    async with session.post(url, json=body) as response:
        text = await response.text()
        assert response.status == 200, text
    return time.perf_counter() - begin


async def until(condition: Callable[[], object], seconds: float = 60.0) -> float:
    """Wait for a condition of this process; return the seconds."""
    begin = time.perf_counter()
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  (what is measured has no event)
            await asyncio.sleep(0.005)
    return time.perf_counter() - begin


def lease(number: int) -> Lease:
    """Return a lease whose prompt has 32 tokens, one for each of its group's members."""
    row, member = divmod(number, GROUP)
    prompt = f"{bench_rollout.PROMPT[:-4]}{row % 10000:04d}"
    return Lease(
        lease_id=f"l{number}",
        group_id=f"g{row}",
        split="train",
        task=Task(task_id=f"t{row}", prompt=prompt, ground_truth="46", extra_info={}),
        members=[member],
        version=0,
    )


class Episodes:
    """Runs episodes through collector, agent and client, and counts."""

    numbers = iter(range(10**9))

    def __init__(self, collector: Collector) -> None:
        self.collector, self.count, self.lost, self.tokens = collector, 0, 0, 0

    async def one(self, _: int = 0) -> None:
        """Run one episode."""
        given = lease(next(Episodes.numbers))
        episode, _payloads = await self.collector.run(given, given.members[0])
        self.count += 1
        self.lost += episode.failure is not None
        self.tokens += sum(header.trained_tokens for header in episode.headers)


@asynccontextmanager
async def traffic(collector: Collector, lanes: int) -> AsyncIterator[Episodes]:
    """Keep `lanes` episodes running, from before the body begins to after it ends."""
    episodes, over = Episodes(collector), asyncio.Event()

    async def lane() -> None:
        while not over.is_set():
            await episodes.one()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(lanes):
            tasks.create_task(lane())
        await asyncio.sleep(0.3)  # until they generate
        yield episodes
        over.set()


def bare(url: str, session: aiohttp.ClientSession, kind: Kind) -> Callable[[int], Awaitable[Any]]:
    """Return the baseline: a function that sends the same request and reads the reply."""
    tokenizer = tiny_tokenizer()

    async def one(number: int) -> None:
        task = lease(next(Episodes.numbers)).task
        data = msgspec.json.encode(kind.body(tokenizer(task.prompt)["input_ids"]))
        async with session.post(url + kind.generate_path, data=data) as response:
            answer = msgspec.json.decode(await response.read())
        assert len(kind.output_ids(answer)) == TOKENS, answer

    return one
