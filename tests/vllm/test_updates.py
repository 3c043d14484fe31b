"""Weights are published to a real vLLM server while the client generates: each token's version."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from arealite.api.experiment_config import ExperimentConfig
from arealite.api.llm import LLMClientConfig, LLMRequest, LLMResponse, SamplingConfig
from arealite.api.publisher import DiskPublisherConfig
from arealite.ext.distributed.distributed_publisher import DistributedPublisher
from arealite.impl.client.servers_client import ServersClient
from arealite.impl.publisher.disk import DiskPublisher
from arealite.impl.publisher.servers import ServersPublisher
from arealite.system.names.name_registry import NameRegistry
from tests.impl.publisher.sites import publishing
from tests.vllm.inside_server import InsideServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1000)]
UPDATES = 10
TOKENS = 2000
LANES = 8
TEMPERATURE = 0.8
TOLERANCE = 1e-4
"""Largest difference of a log-probability from that of transformers in float32."""
Tensors = dict[str, torch.Tensor]


class Versions:
    """The weights of each version: steps from the server's first model to its second."""

    def __init__(self, server: InsideServer) -> None:
        self.first, self.last = (load_file(f / "model.safetensors") for f in server.folders)
        from transformers import AutoModelForCausalLM

        folder = server.folders[0]
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._loaded = 0

    def weights(self, version: int) -> Tensors:
        share = version / UPDATES
        return {name: torch.lerp(self.first[name], self.last[name], share) for name in self.first}

    @torch.no_grad()
    def logprobs(self, version: int, ids: list[int], temperature: float) -> torch.Tensor:
        """Return the log-probability of each token but the first, [T − 1]."""
        if version != self._loaded:
            self._model.load_state_dict(self.weights(version), strict=False)
            self._loaded = version
        row = torch.tensor([ids])
        logits = self._model(row).logits[0, :-1] / temperature
        return logits.log_softmax(-1).gather(1, row[0, 1:, None])[:, 0]


def config_of(server: InsideServer, folder: Path, **publisher: Any) -> ExperimentConfig:
    """Return the config of a trial that has the server's secret and lists the server."""
    disk = DiskPublisherConfig(dir=str(folder / "staged"))
    config = publishing(folder, server.folders[0], timeout_s=60.0, disk=disk, **publisher)
    config = replace(config, cluster=replace(config.cluster, security=True), server_wait_s=60.0)
    names = NameRegistry.of(config)
    names.root.mkdir(parents=True)
    secret = Path(server.real.log).parent / "names" / "secret"
    shutil.copy(secret, names.root / "secret")
    entry = {
        "address": server.real.address,
        "dtype": "float32",
        "type": "vllm",
        "protocol": "vllm",
        "pid": server.real.process.pid,
        "model_path": str(server.folders[0]),
        "vocab_size": 64,
        "context_length": 512,
        "version": "default",
    }
    names.put("llm_server", "s", entry)
    return config


@asynccontextmanager
async def started(config: ExperimentConfig) -> AsyncIterator[ServersClient]:
    client = ServersClient(config, LLMClientConfig())
    await client.start()
    try:
        yield client
    finally:
        await client.close()


@pytest.fixture
def versions(server: InsideServer) -> Iterator[Versions]:
    yield Versions(server)


class Traffic:
    """Generations one after the other, in LANES tasks, until the last version is published."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []
        self.responses: list[LLMResponse] = []
        self.finished: asyncio.Queue[LLMResponse] = asyncio.Queue()
        self.is_last_version = False
        self._num_started = 0

    @property
    def num_tokens(self) -> int:
        return sum(len(response.output_ids) for response in self.responses)

    async def generate(self, client: ServersClient) -> None:
        while not self.is_last_version or self.num_tokens < TOKENS:
            self._num_started += 1
            request = LLMRequest(
                request_id=f"r{self._num_started}",
                group_id=f"g{self._num_started}",
                input_ids=[5, 6, 7 + self._num_started % 40],
                sampling=SamplingConfig(max_new_tokens=200, temperature=TEMPERATURE),
            )
            response = await client.generate(request)
            self.prompts.append(request.input_ids)
            self.responses.append(response)
            self.finished.put_nowait(response)

    async def sample_under_new_version(self) -> None:
        """Wait until each lane has finished a generation since this call."""
        while not self.finished.empty():
            self.finished.get_nowait()
        for _ in range(LANES):
            await self.finished.get()


def publish(publisher: ServersPublisher, versions: Versions, version: int) -> None:
    while publisher.stage(version, iter(versions.weights(version).items())):
        pass
    report = publisher.push(version)
    assert (report.servers, report.quarantined) == (1, [])


@pytest.mark.parametrize("way", [DiskPublisher, DistributedPublisher])
@pytest.mark.parametrize(
    "mode", ["abort", pytest.param("retract", marks=pytest.mark.vllm_short), "in_place"]
)
async def test_every_token_through_ten_updates_has_its_version(
    server: InsideServer,
    versions: Versions,
    tmp_path: Path,
    way: type[ServersPublisher],
    mode: str,
) -> None:
    await check_ten_updates(server, versions, tmp_path, way, mode)


async def check_ten_updates(
    server: InsideServer,
    versions: Versions,
    folder: Path,
    way: type[ServersPublisher],
    mode: str,
) -> None:
    """With in_place, old keys and values stay by design, so only the versions are checked."""
    config = config_of(server, folder, pause_mode=mode)
    engine: Any = None
    publisher = await asyncio.to_thread(way, config, engine)
    traffic = Traffic()
    try:
        async with started(config) as client, asyncio.TaskGroup() as tasks:
            for _ in range(LANES):
                tasks.create_task(traffic.generate(client))
            for version in range(1, UPDATES + 1):
                await asyncio.to_thread(publish, publisher, versions, version)
                await traffic.sample_under_new_version()
            traffic.is_last_version = True
    finally:
        await asyncio.to_thread(publisher.close)
    assert traffic.num_tokens >= TOKENS
    sampled_versions = {v for response in traffic.responses for v in response.versions}
    assert sampled_versions >= {*range(1, UPDATES + 1)}
    assert any(len({*response.versions}) > 1 for response in traffic.responses)
    for prompt, response in zip(traffic.prompts, traffic.responses, strict=True):
        assert response.versions == sorted(response.versions)
        assert len(response.output_ids) == len(response.logprobs) == len(response.versions)
        if mode != "in_place":
            assert largest_difference(versions, prompt, response) <= TOLERANCE


def largest_difference(versions: Versions, prompt: list[int], response: LLMResponse) -> float:
    """Return the largest difference of a token's logprob from that of its version's model."""
    ids = prompt + response.output_ids
    largest = 0.0
    for version in {*response.versions}:
        raw = versions.logprobs(version, ids, TEMPERATURE)[len(prompt) - 1 :]
        of_version = torch.tensor(response.versions) == version
        difference = (raw - torch.tensor(response.logprobs))[of_version].abs().max()
        largest = max(largest, float(difference))
    return largest
