"""The trained model of a session, and the publisher of its weights; in one thread, one rank."""

from collections.abc import Collection
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from arealite.api.engine import (
    LossInput,
    NewAdapter,
    Sequence,
    Stats,
    TrainedWeights,
    TrainEngine,
    Training,
)
from arealite.api.engine_config import OptimizerConfig
from arealite.api.experiment_config import ExperimentConfig
from arealite.api.publisher import PublishReport, WeightPublisher, publishers
from arealite.base import entries
from arealite.base.errors import RoleError
from arealite.ext.served_policy.canary import row_of, sequence_of
from arealite.ext.session.adapter_publisher import StagedAdapter
from arealite.ext.session.call_loss import Loss, weighted_rows
from arealite.impl.publisher.disk import DiskPublisher
from arealite.impl.trainer.base import (
    make_engine,
    make_reference,
    read_engines,
    stage_weights,
    write_engines,
)
from arealite.impl.trainer.rank_group import World


class Policy:
    """Trains, saves and stages. All methods but `push` run in one thread, in the user's order."""

    def __init__(self) -> None:
        self._resources = ExitStack()
        self._publisher: WeightPublisher | None = None
        self._trained = dict[str, TrainedWeights]()
        """The engine's own weights, "", unless they are frozen; and those of each adapter."""

    def start(self, config: ExperimentConfig) -> None:
        """Load the model and its optimizer, and open the publisher."""
        self.load_model(config)
        publisher = publishers.get(config.trainer.ppo.publisher.type)(config, self.engine)
        self._resources.callback(publisher.close)
        makers = entries.hooks("policy_proof")
        publisher.proof = entries.first_result(makers, config, self.engine, self._world)
        self._publisher = publisher

    def load_model(self, config: ExperimentConfig) -> None:
        """Load the model and its optimizer."""
        self._config = config
        ppo = config.trainer.ppo
        self._world = World.init(
            threads=config.launcher.trainer_threads,
            seed=config.seed,
            is_alone=True,
        )
        self._resources.callback(self._world.destroy)
        num_updates = ppo.total_steps * ppo.updates * ppo.epochs
        training = Training(optimizer=ppo.optimizer, lr=ppo.lr, total_updates=num_updates)
        self.engine = make_engine(config, training=training)
        self.engine.replays_routing = ppo.collector.routing == "replay"
        self._reference: TrainEngine | None = None
        lora = ppo.engine.fsdp.lora
        has_default = bool(lora.rank or config.model.adapter)
        if has_default or lora.only_named:  # before an update: it costs nothing
            self._reference = self._make_reference()
        if has_default or not lora.only_named:
            self._trained[""] = self.engine

    def _make_reference(self) -> TrainEngine:
        """Return the frozen policy of a KL penalty: `kl.reference`, or the initial model."""
        path = self._config.trainer.ppo.kl.reference
        folder = None if path == "initial" else path
        return make_reference(self._config, self.engine, folder)

    def close(self) -> None:
        """Close the publisher, and destroy the process group."""
        self._resources.close()

    def stop_publisher(self) -> None:
        """End a `push` that waits for servers, with an error; any thread may call this."""
        if self._publisher is not None:
            self._publisher.close()

    def logprobs(self, rows: list[Sequence], field: str) -> list[np.ndarray]:
        """Return the logprobs of each row, float32 [T]; also as a field of the rows."""
        logprobs = self.engine.forward(rows)["logprobs"]
        for row, logprobs_T in zip(rows, logprobs, strict=True):
            if field:
                row.fields[field] = logprobs_T
        return logprobs

    def forward_backward(self, rows: list[Sequence], loss: Loss) -> Stats:
        """Add the gradient of a loss; the outputs that it records become fields of the rows.

        Raises:
            UserError: Some rows lack a field that the loss or other rows have.
        """
        max_tokens = self._config.trainer.ppo.collector.sampling.max_new_tokens
        weighted = weighted_rows(rows, loss, max_tokens=max_tokens)
        if loss.needs_reference:
            if self._reference is None:
                self._reference = self._make_reference()
            references = self._reference.forward(weighted)["logprobs"]
            for row, logprobs_T in zip(weighted, references, strict=True):
                row.fields["ref_logprobs"] = logprobs_T
        recorded = loss.record_outputs or {}
        if any(field in row.fields for row in weighted for field in recorded.values()):
            recorded = {}
        stats = self.engine.forward_backward(
            weighted,
            loss.function,
            record_outputs=recorded or None,
        )
        for field in recorded.values():
            for row, copy in zip(rows, weighted, strict=True):
                row.fields[field] = copy.fields[field]
        return stats

    def evaluate(self, rows: list[Sequence], loss: Loss) -> Stats:
        """Compute a loss without gradient; recorded outputs become fields of the rows."""
        outputs_by_row = self.engine.forward(rows)
        for name, field in (loss.record_outputs or {}).items():
            for row, values_T in zip(rows, outputs_by_row[name], strict=True):
                row.fields[field] = values_T
        masks = [row.loss_mask for row in rows]
        names = rows[0].fields.keys()
        batch = LossInput(
            outputs={name: _joined(values, masks) for name, values in outputs_by_row.items()},
            rows_N=torch.from_numpy(np.repeat(np.arange(len(rows)), [*map(np.sum, masks)])),
            fields={name: _joined([row.fields[name] for row in rows], masks) for name in names},
        )
        _, stats = loss.function(batch)
        return {name: float(value) for name, value in stats.items()}

    def drop_gradient(self, adapters: Collection[str]) -> None:
        """Drop the gradient of adapters since their last update."""
        for name in self._trained.keys() & set(adapters):
            self._trained[name].drop_gradient()

    def optim_step(
        self,
        adapter: str,
        lr: float | None,
        optimizer: OptimizerConfig,
    ) -> Stats:
        """Apply the gradient of an adapter."""
        return self._trained[adapter].optim_step(lr=lr, optimizer=optimizer)

    def add_adapter(self, adapter: NewAdapter) -> None:
        """Add an adapter to the engine."""
        self._trained[adapter.name] = self.engine.add_adapter(adapter)

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter from the engine, if it has been added."""
        if self._trained.pop(name, None) is not None:
            self.engine.remove_adapter(name)

    def stage_adapter(self, name: str, version: int) -> StagedAdapter:
        """Write an adapter for the servers, and score the canary's row with it."""
        assert isinstance(self._publisher, DiskPublisher), "start first"
        folder = self._publisher.folder / "adapters" / name / str(version)
        self._trained[name].export(folder)
        row = row_of(Path(self._config.model.path), None)
        sequence = replace(sequence_of(row), adapter=name)
        (scores_T,) = self.engine.forward([sequence])["logprobs"]
        return StagedAdapter(
            name=name,
            version=version,
            folder=folder,
            row=row,
            scores_T=scores_T[1:].astype(np.float64),
        )

    def stage(self, version: int) -> None:
        """Copy the weights for the servers."""
        assert self._publisher is not None, "start first"
        proof = self._publisher.proof
        stage_weights(self.engine, self._publisher, proof, self._world, version)

    def push(self, version: int) -> PublishReport:
        """Update all servers to a staged version."""
        assert self._publisher is not None, "start first"
        report = self._publisher.push(version)
        _ = self._publisher.needs_republish  # raises if no server takes the weights
        if not report.servers:
            raise RoleError("no server has confirmed it. Publish again.")
        return report

    def save(self, path: Path, adapter: str) -> Path:
        """Write a checkpoint; return its folder."""
        self._write(path, adapter, {})
        return path

    def _write(self, path: Path, adapter: str, extra: dict[str, object]) -> None:
        """Write a checkpoint, with `extra` beside the weights."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_engines(path, {".": self._trained[adapter]}, extra, self._world)

    def load(self, path: Path, adapter: str) -> None:
        """Read a checkpoint."""
        read_engines(path, {".": self._trained[adapter]})

    def export(self, path: Path, adapter: str) -> None:
        """Write a Hugging Face folder, or that of an adapter."""
        weights = self._trained[adapter] if adapter else self.engine
        weights.export(path)


def _joined(values: Seq[np.ndarray], masks: Seq[np.ndarray]) -> torch.Tensor:
    """Return the values of all rows' loss tokens, one row after the other."""
    parts = [row_values[mask] for row_values, mask in zip(values, masks, strict=True)]
    return torch.from_numpy(np.concatenate(parts))
