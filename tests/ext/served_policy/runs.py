"""A trainer that publishes to embedded servers, with faults that a test plants into a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from arealite.api.engine_config import FSDPConfig, TrainEngineConfig
from arealite.api.experiment_config import ExperimentConfig, ModelConfig, run_paths
from arealite.api.launcher import LauncherConfig
from arealite.api.publisher import DiskPublisherConfig, PublisherConfig, PublishReport
from arealite.api.trainer import PPOConfig, TrainerConfig
from arealite.ext.embedded.embedded_server import EmbeddedServer
from arealite.ext.served_policy.canary import Canary
from arealite.ext.served_policy.proof_file import ProofFile, ServerProof
from arealite.impl.publisher.disk import DiskPublisher
from arealite.impl.trainer.rank_group import World
from tests.ext.served_policy.plants import Fault, Plant, copied
from tests.fakes.embedded import running, server_config
from tests.impl.engine.helpers import make_engine
from tests.waiting import eventually


class Run:
    """A trainer, its publisher with a canary, and embedded servers of the same model."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: str = "float32",
        served_dtype: str | None = None,
        num_servers: int = 1,
        **publisher: Any,
    ) -> None:
        self.folder = folder
        self.engine = make_engine(folder, dtype=dtype)
        served = server_config(folder, folder.parent / "names")
        served_model = replace(served.model, dtype=served_dtype or dtype)
        self.served = replace(served, model=served_model)
        staged = DiskPublisherConfig(dir=str(folder.parent / "staged"))
        ppo = PPOConfig(
            engine=TrainEngineConfig(fsdp=FSDPConfig(dtype=dtype)),  # type: ignore[arg-type]
            publisher=PublisherConfig(timeout_s=60.0, disk=staged, **publisher),
        )
        self.config = ExperimentConfig(
            cluster=replace(served.cluster, run_root=str(folder.parent / "runs")),
            model=ModelConfig(path=str(folder), dtype=dtype),
            trainer=TrainerConfig(ppo=ppo),
            launcher=LauncherConfig(llm_servers=num_servers),
        )
        self.num_servers = num_servers
        self.servers: list[EmbeddedServer] = []
        self.publisher: DiskPublisher
        self.canary: Canary
        self.file = ProofFile(run_paths(self.config).root)
        self.records = dict[int, str]()
        """The ledger's record of each version."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Run]:
        """Start the servers and the publisher."""
        async with AsyncExitStack() as stack:
            for _ in range(self.num_servers):
                self.servers.append(await stack.enter_async_context(running(self.served)))
            self.first = copied(self.servers[0].engine.decoder.model)
            self.publisher = DiskPublisher(self.config, self.engine)
            self.canary = Canary(self.config, self.engine, World())
            self.publisher.proof = self.canary
            try:
                yield self
            finally:
                await asyncio.to_thread(self.publisher.close)

    async def publish(self, version: int) -> PublishReport:
        """Publish the trainer's parameters as a version."""
        return await asyncio.to_thread(self._publish, version)

    def _publish(self, version: int) -> PublishReport:
        self.canary.expect(version)
        weights = self.canary.fingerprinted(self.engine.stream_weights())
        self.publisher.stage(version, weights)
        report = self.publisher.push(version)
        self.records[version] = self.canary.record(version)
        return report

    @torch.no_grad()
    def train(self, size: float = 0.02, seed: int = 0) -> None:
        """Change all parameters by random numbers."""
        torch.manual_seed(seed)
        for parameter in self.engine.module.parameters():
            parameter += size * torch.randn_like(parameter)

    def proofs(self) -> list[ServerProof]:
        """Return the results in the run's file."""
        return [line for line in self.file.lines() if isinstance(line, ServerProof)]

    async def until_proven(self, version: int, count: int) -> None:
        """Wait until some servers are proven at a version."""

        def is_proven() -> bool:
            proven = [proof for proof in self.proofs() if proof.is_proven]
            return len([proof for proof in proven if proof.version == version]) == count

        await eventually(is_proven, f"{count} proofs of version {version}")

    async def publish_and_plant(self, fault: Fault) -> None:
        """Publish and train the versions before a fault shows; plant it after version 1."""
        for version in range(fault.first):
            await self.publish(version)
            self.train(fault.change, seed=version)
            if version == 1:
                self.plant(fault.plant)

    def plant(self, plant: Plant, number: int = 0) -> Callable[[], None]:
        """Change a server after each further update; return what ends that."""
        server = self.servers[number]
        model = server.engine.decoder.model
        first = self.first
        update = server.engine.update

        def update_wrongly(*arguments: Any) -> bool:
            before = copied(model)
            is_flushed = update(*arguments)
            plant(server, before, first)
            return is_flushed

        server.engine.update = update_wrongly  # type: ignore[method-assign]

        def unplant() -> None:
            server.engine.update = update  # type: ignore[method-assign]

        return unplant
