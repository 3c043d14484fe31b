"""The model that a session trains, on one of its ranks."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from arealite.api.engine import (
    NewAdapter,
    Sequence,
    Stats,
    TrainedWeights,
    TrainEngine,
    Training,
)
from arealite.api.engine_config import OptimizerConfig
from arealite.api.experiment_config import ExperimentConfig
from arealite.api.publisher import PolicyProof, WeightPublisher
from arealite.base import entries
from arealite.ext.served_policy.canary import sequence_of
from arealite.ext.session.call_loss import Loss
from arealite.impl.trainer.base import (
    make_engine,
    make_reference,
    read_engines,
    stage_weights,
    write_engines,
)
from arealite.impl.trainer.rank_group import Address, World, open_store

RENDEZVOUS_TIMEOUT = timedelta(minutes=5)
"""Limit of the rendezvous of the ranks, whose processes all run."""
Outputs = dict[str, list[np.ndarray]]
"""Outputs of an engine or fields of rows by name: values by row, float32 [T] or [T, K] each."""


@dataclass(frozen=True, kw_only=True)
class BackwardResult:
    """The result of `forward_backward` on a rank."""

    stats: Stats
    """The sums over the rows of all ranks."""
    recorded: Outputs
    """The recorded outputs of this rank's rows by field."""


class EngineRank:
    """The engine, its adapters and its reference. All ranks call the same methods in one order."""

    engine: TrainEngine

    def __init__(self, config: ExperimentConfig, world: World, address: Address | None) -> None:
        """Load no model yet.

        Args:
            config: The session's options.
            world: This rank.
            address: Of the rendezvous; None: there is one rank.
        """
        self._config = config
        self.world = world
        self._address = address
        self.trained = dict[str, TrainedWeights]()
        """The engine's own weights, "", unless they are frozen; and those of each adapter."""
        self._reference: TrainEngine | None = None
        self._publisher: WeightPublisher | None = None
        self._proof: PolicyProof | None = None

    def load_model(self) -> None:
        """Initialise the process group, and load the model and its optimizer."""
        config = self._config
        ppo = config.trainer.ppo
        store = (
            open_store(self._address, self.world.size, RENDEZVOUS_TIMEOUT)
            if self._address
            else None
        )
        self.world.init_process_group(
            store,
            device=self.world.rank,
            threads=config.launcher.trainer_threads,
            seed=config.seed,
        )
        num_updates = ppo.total_steps * ppo.updates * ppo.epochs
        training = Training(optimizer=ppo.optimizer, lr=ppo.lr, total_updates=num_updates)
        self.engine = make_engine(config, training=training)
        self.engine.replays_routing = ppo.collector.routing == "replay"
        lora = ppo.engine.fsdp.lora
        has_default = bool(lora.rank or config.model.adapter)
        if has_default or lora.only_named:  # before an update: it costs nothing
            self._reference = self._make_reference()
        if has_default or not lora.only_named:
            self.trained[""] = self.engine

    def _make_reference(self) -> TrainEngine:
        """Return the frozen policy of a KL penalty: `kl.reference`, or the initial model."""
        path = self._config.trainer.ppo.kl.reference
        folder = None if path == "initial" else path
        return make_reference(self._config, self.engine, folder)

    def make_proof(self) -> None:
        """Prepare the proof of the servers' weights."""
        makers = entries.hooks("policy_proof")
        self._proof = entries.first_result(makers, self._config, self.engine, self.world)

    def open_publisher(self, publisher: WeightPublisher) -> None:
        """Set the publisher; only on rank 0."""
        publisher.proof = self._proof
        self._publisher = publisher

    def forward(self, rows: list[Sequence]) -> Outputs:
        """Return the outputs of this rank's rows, without gradient."""
        return self.engine.forward(rows)

    def forward_reference(self, rows: list[Sequence]) -> Outputs:
        """Return the reference's outputs of this rank's rows."""
        if self._reference is None:
            self._reference = self._make_reference()
        return self._reference.forward(rows)

    def forward_backward(
        self,
        rows: list[Sequence],
        loss: Loss,
        record_outputs: Mapping[str, str],
    ) -> BackwardResult:
        """Add the gradient of a loss over the rows of all ranks."""
        stats = self.engine.forward_backward(
            rows,
            loss.function,
            record_outputs=record_outputs or None,
        )
        recorded = {field: [row.fields[field] for row in rows] for field in record_outputs.values()}
        return BackwardResult(stats=stats, recorded=recorded)

    def drop_gradient(self, adapters: Collection[str]) -> None:
        """Drop the gradient of adapters since their last update."""
        for name in self.trained.keys() & set(adapters):
            self.trained[name].drop_gradient()

    def optim_step(
        self,
        adapter: str,
        lr: float | None,
        optimizer: OptimizerConfig,
    ) -> Stats:
        """Apply the gradient of an adapter."""
        return self.trained[adapter].optim_step(lr=lr, optimizer=optimizer)

    def add_adapter(self, adapter: NewAdapter) -> None:
        """Add an adapter to the engine."""
        self.trained[adapter.name] = self.engine.add_adapter(adapter)

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter from the engine, if it has been added."""
        if self.trained.pop(name, None) is not None:
            self.engine.remove_adapter(name)

    def score(self, name: str, row: list[int]) -> np.ndarray:
        """Return an adapter's log-probabilities of a row, float32 [T]."""
        (scores_T,) = self.engine.forward([replace(sequence_of(row), adapter=name)])["logprobs"]
        return scores_T

    def stage(self, version: int) -> None:
        """Gather the weights for the servers."""
        stage_weights(self.engine, self._publisher, self._proof, self.world, version)

    def write(self, path: Path, adapter: str, extra: dict[str, Any]) -> None:
        """Write a checkpoint, with `extra` beside the weights."""
        write_engines(path, {".": self.trained[adapter]}, extra, self.world)

    def read(self, path: Path, adapter: str) -> None:
        """Read a checkpoint."""
        read_engines(path, {".": self.trained[adapter]})

    def export(self, path: Path) -> None:
        """Write a Hugging Face folder."""
        self.engine.export(path)

    def fingerprint(self) -> str:
        """Return the fingerprint of the parameters; see TrainEngine."""
        return self.engine.fingerprint()

    def close(self) -> None:
        """Destroy the process group."""
        self.world.destroy()
