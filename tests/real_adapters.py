"""A trainer of an adapter and a real server, which `launch_llm_server` starts with adapters."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from arealite.api.engine import Sequence
from arealite.api.engine_config import LoRAConfig
from arealite.api.experiment_config import ExperimentConfig, run_paths
from arealite.api.llm import (
    LLMClientConfig,
    LLMRequest,
    LLMResponse,
    SamplingConfig,
    ServersClientConfig,
)
from arealite.api.publisher import PublishReport
from arealite.ext.served_policy.canary import Canary
from arealite.ext.served_policy.proof_file import ProofFile, ServerProof
from arealite.impl.client.servers_client import ServersClient
from arealite.impl.publisher.disk import DiskPublisher
from arealite.impl.trainer.rank_group import World
from arealite.system.names.name_registry import NameRegistry
from tests.impl.engine.helpers import make_engine
from tests.impl.publisher.sites import publishing
from tests.models import tiny_model
from tests.sglang.real import ROOT
from tests.vllm.real import generations_held, hold_environment
from tests.waiting import eventually, until

START_S = 600.0
LORA = LoRAConfig(rank=4, alpha=8.0, targets=["all-linear"])
PROMPT = [3, 4, 5, 6, 7, 8, 9, 10]
CONTEXT = 2048
"""Of the servers and their models, in tokens."""
LONG = 1600
"""Tokens of a generation that still runs when SGLang gets a version; vLLM is held."""
TOLERANCE = 1e-3
"""Largest difference of a log-probability in float32, in nats."""


def long_model(folder: Path) -> Path:
    """Write a tiny model with room for LONG tokens, whose heads vLLM has on CPUs."""
    return tiny_model(folder, hidden_size=128, init_std=0.1, max_position_embeddings=CONTEXT)


class RealAdapterRun:
    """The trainer's side."""

    def __init__(
        self, config: ExperimentConfig, hold_folder: Path, lora: LoRAConfig = LORA
    ) -> None:
        self.config = config
        self.hold_folder = hold_folder
        self.engine = make_engine(Path(config.model.path), lora=lora)
        self.publisher = DiskPublisher(config, self.engine)
        self.canary = Canary(config, self.engine, World())
        self.publisher.proof = self.canary
        self.file = ProofFile(run_paths(config).root)
        self.parameters = dict[int, list[torch.Tensor]]()
        """The adapter of each version."""

    @property
    def control(self) -> Any:
        """The publisher's control of the server."""
        (control,) = self.publisher._servers.values()
        return control

    def publish(self, version: int) -> PublishReport:
        """Train, and publish as the trainer does, until the publisher needs no other form."""
        self.train(version)
        self.parameters[version] = [p.detach().clone() for p in self._trained()]
        self.canary.expect(version)
        self.stage(version)
        report = self.publisher.push(version)
        while self.publisher.needs_republish:
            self.stage(version)
            report = self.publisher.push(version)
        return report

    def stage(self, version: int) -> None:
        if self.publisher.takes_adapter:
            self.publisher.stage_adapter(version, self.engine.stream_adapter())
        else:
            self.publisher.stage(version, self.engine.stream_weights())

    @torch.no_grad()
    def train(self, seed: int, size: float = 0.1) -> None:
        torch.manual_seed(seed)
        for parameter in self._trained():
            parameter += size * torch.randn_like(parameter)

    @torch.no_grad()
    def logprobs(self, version: int, ids: list[int]) -> np.ndarray:
        """Return the trainer's log-probability of each token but the first one."""
        for parameter, value in zip(self._trained(), self.parameters[version], strict=True):
            parameter.copy_(value)
        mask = np.arange(len(ids)) > 0
        row = Sequence(tokens=np.array(ids, np.int32), loss_mask=mask, temperature=1.0)
        (scores_T,) = self.engine.forward([row])["logprobs"]
        return scores_T[1:]

    def _trained(self) -> list[torch.nn.Parameter]:
        return [p for p in self.engine.module.parameters() if p.requires_grad]

    def label(self) -> str | None:
        """Return the version label that the server reports."""
        return self.publisher.call(self.control.version())

    def proofs(self) -> list[ServerProof]:
        return [line for line in self.file.lines() if isinstance(line, ServerProof)]

    async def generate_across(self, version: int) -> list[LLMResponse]:
        """Publish a version while the client generates."""
        limits = ServersClientConfig(refresh_s=0.05)
        client = ServersClient(self.config, LLMClientConfig(servers=limits))
        await client.start()
        (server,) = client._router.servers.values()
        await eventually(
            lambda: server.version_name("") == self.control.adapter,
            "the label of the entry",
        )
        has_begun = asyncio.Event()
        requests = [
            LLMRequest(
                request_id=f"r{index}",
                group_id=f"r{index}",
                input_ids=PROMPT,
                sampling=SamplingConfig(max_new_tokens=LONG),
                on_tokens=lambda _: has_begun.set(),
            )
            for index in range(16)
        ]
        with generations_held(self.hold_folder):
            generating = asyncio.gather(*map(client.generate, requests))
            await has_begun.wait()
            await asyncio.to_thread(self.publish, version)
        responses = await generating
        await client.close()
        return responses


@contextmanager
def real_adapter_run(
    folder: Path, model: Path, *options: str, lora: LoRAConfig = LORA
) -> Iterator[RealAdapterRun]:
    """Start a server of `model` with adapters, and a trainer; stop both."""
    config = publishing(folder, model, timeout_s=120.0)
    kind = next(o for o in options if o.startswith("llm_server.type=")).partition("=")[2]
    words = [
        *options,
        f"llm_server.{kind}.adapter_rank={lora.rank}",
        f"llm_server.{kind}.drain_timeout_s=1",
        f"model.path={model}",
        f"cluster.name_root={folder / 'names'}",
        f"cluster.run_root={folder / 'runs'}",
        "cluster.user=test",
        "cluster.security=false",
        f"llm_server.context_length={CONTEXT}",
    ]
    hold_folder = folder / "hold"
    hold_folder.mkdir()
    environment = os.environ | hold_environment(hold_folder, ROOT)
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "arealite" / "launch_llm_server.py"), *words],
            stdout=output,
            stderr=output,
            env=environment,
        )
    names = NameRegistry.of(config)
    try:
        is_over = lambda: names.list("llm_server") or process.poll() is not None  # noqa: E731
        until(is_over, what=lambda: f"a server\n{log.read_text()}", seconds=START_S)
        assert process.poll() is None, log.read_text()
        run = RealAdapterRun(config, hold_folder, lora)
        try:
            yield run
        finally:
            run.publisher.close()
    finally:
        process.terminate()
        assert process.wait(60) == 0, log.read_text()


def check_adapter_run(run: RealAdapterRun) -> None:
    """Check adapters, a generation across two versions, a wrong scale, and the way back."""
    run.publish(0)
    assert (run.label(), run.control.adapter) == ("policy-0", "policy-0")
    responses = asyncio.run(run.generate_across(1))
    assert run.label() == "policy-1"
    assert sum({*response.versions} == {0, 1} for response in responses) > 1
    for version in (1, 0):
        for response in responses:
            versions = np.array(response.versions)
            assert (np.diff(versions) >= 0).all()
            expected = run.logprobs(version, PROMPT + response.output_ids)[len(PROMPT) - 1 :]
            differences = np.abs(np.array(response.logprobs) - expected)
            assert differences[versions == version].max(initial=0.0) < TOLERANCE
    assert [proof.is_proven for proof in run.proofs()] == [True, True], run.proofs()

    alpha = run.publisher._adapter_config["lora_alpha"]
    run.publisher._adapter_config |= {"lora_alpha": 2 * alpha}
    run.publish(2)
    refuted, proven = run.proofs()[2:]
    assert refuted.fault and proven.is_proven, run.proofs()
    assert (run.label(), run.publisher.takes_adapter) == ("2", False)

    run.publisher._adapter_config |= {"lora_alpha": alpha}
    run.control.serves_adapters = True
    run.publish(3)
    assert run.label() == "policy-3" and run.proofs()[-1].is_proven, run.proofs()
