"""The trained model of a session, on all its ranks, and the publisher of its weights."""

import tempfile
from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from arealite.api.engine import (
    LossInput,
    NewAdapter,
    Sequence,
    Stats,
    TrainEngine,
)
from arealite.api.engine_config import OptimizerConfig
from arealite.api.experiment_config import ExperimentConfig
from arealite.api.publisher import PublishReport, WeightPublisher, publishers
from arealite.base.errors import RoleError
from arealite.ext.served_policy.canary import row_of
from arealite.ext.session.adapter_server import StagedAdapter
from arealite.ext.session.call_loss import Loss, weighted_rows
from arealite.ext.session.engine_rank import EngineRank, Outputs
from arealite.ext.session.ranks import SessionRanks
from arealite.impl.publisher.disk import DiskPublisher


class Policy:
    """Trains, saves and stages. All methods but `push` run in one thread, in the user's order."""

    def __init__(self) -> None:
        self._resources = ExitStack()
        self._publisher: WeightPublisher | None = None
        self._ranks: SessionRanks | None = None

    def start(self, config: ExperimentConfig) -> None:
        """Load the model and its optimizer, and open the publisher."""
        self.load_model(config)
        self.ranks.call(EngineRank.make_proof)
        publisher = publishers.get(config.trainer.ppo.publisher.type)(config, self.engine)
        self._resources.callback(publisher.close)
        self.ranks.local.open_publisher(publisher)
        self._publisher = publisher

    def load_model(self, config: ExperimentConfig) -> None:
        """Start the other ranks, and load the model and its optimizer."""
        self._config = config
        self._ranks = SessionRanks(config)
        self._resources.callback(self._ranks.close)
        self._ranks.call(EngineRank.load_model)

    @property
    def ranks(self) -> SessionRanks:
        """All ranks, once `load_model` was called."""
        assert self._ranks is not None, "load the model first"
        return self._ranks

    @property
    def engine(self) -> TrainEngine:
        """The engine of this process."""
        return self.ranks.local.engine

    def close(self) -> None:
        """Close the publisher, end the other ranks, and destroy the process group."""
        self._resources.close()

    def stop_publisher(self) -> None:
        """End a `push` that waits for servers, with an error; any thread may call this."""
        if self._publisher is not None:
            self._publisher.close()

    def logprobs(self, rows: list[Sequence], field: str) -> list[np.ndarray]:
        """Return the logprobs of each row, float32 [T]; also as a field of the rows."""
        logprobs = self._forward(rows)["logprobs"]
        for row, logprobs_T in zip(rows, logprobs, strict=True):
            if field:
                row.fields[field] = logprobs_T
        return logprobs

    def _forward(
        self,
        rows: list[Sequence],
        method: Callable[[EngineRank, list[Sequence]], Outputs] = EngineRank.forward,
    ) -> Outputs:
        """Return the outputs of all rows by a method of the ranks."""
        return concat_ranks(self.ranks.call_with_rows(method, rows))

    def forward_backward(self, rows: list[Sequence], loss: Loss) -> Stats:
        """Add the gradient of a loss; the outputs that it records become fields of the rows.

        Raises:
            UserError: Some rows lack a field that the loss or other rows have.
        """
        weighted = self._weighted("forward_backward", rows, loss)
        if loss.needs_reference:
            references = self._forward(weighted, EngineRank.forward_reference)["logprobs"]
            for row, logprobs_T in zip(weighted, references, strict=True):
                row.fields["ref_logprobs"] = logprobs_T
        recorded = loss.record_outputs or {}
        if any(field in row.fields for row in weighted for field in recorded.values()):
            recorded = {}
        results = self.ranks.call_with_rows(EngineRank.forward_backward, weighted, loss, recorded)
        outputs = concat_ranks([result.recorded for result in results])
        for field in recorded.values():
            for row, values_T in zip(rows, outputs[field], strict=True):
                row.fields[field] = values_T
        return results[0].stats

    def evaluate(self, rows: list[Sequence], loss: Loss) -> Stats:
        """Compute a loss without gradient; recorded outputs become fields of the rows.

        Raises:
            UserError: See `forward_backward`.
        """
        weighted = self._weighted("evaluate", rows, loss)
        outputs_by_row = self._forward(weighted)
        for name, field in (loss.record_outputs or {}).items():
            for row, copy, values_T in zip(rows, weighted, outputs_by_row[name], strict=True):
                row.fields[field] = values_T
                copy.fields[field] = values_T
        masks = [row.loss_mask for row in weighted]
        names = weighted[0].fields.keys()
        batch = LossInput(
            outputs={name: _loss_tokens(values, masks) for name, values in outputs_by_row.items()},
            rows_N=torch.from_numpy(np.repeat(np.arange(len(rows)), [*map(np.sum, masks)])),
            fields={
                name: _loss_tokens([row.fields[name] for row in weighted], masks) for name in names
            },
        )
        _, stats = loss.function(batch)
        return {name: float(value) for name, value in stats.items()}

    def _weighted(self, call: str, rows: list[Sequence], loss: Loss) -> list[Sequence]:
        """Return copies of rows with all fields of a loss; see `weighted_rows`."""
        max_tokens = self._config.trainer.ppo.collector.sampling.max_new_tokens
        return weighted_rows(call, rows, loss, max_tokens=max_tokens)

    def drop_gradient(self, adapters: Collection[str]) -> None:
        """Drop the gradient of adapters since their last update."""
        if self._ranks is not None and not self._ranks.is_lost:
            self._ranks.call(EngineRank.drop_gradient, adapters)

    def optim_step(
        self,
        adapter: str,
        lr: float | None,
        optimizer: OptimizerConfig,
    ) -> Stats:
        """Apply the gradient of an adapter."""
        return self.ranks.call(EngineRank.optim_step, adapter, lr, optimizer)

    def add_adapter(self, adapter: NewAdapter) -> None:
        """Add an adapter to the engine."""
        self.ranks.call(EngineRank.add_adapter, adapter)

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter from the engine, if it has been added."""
        self.ranks.call(EngineRank.remove_adapter, name)

    def stage_adapter(self, name: str, version: int) -> StagedAdapter:
        """Write an adapter for the servers, and score the canary's row with it."""
        assert isinstance(self._publisher, DiskPublisher), "start first"
        folder = self._publisher.folder / "adapters" / name / str(version)
        self.ranks.local.trained[name].export(folder)  # if it fails, no other rank waits
        row = row_of(Path(self._config.model.path), None)
        scores_T = self.ranks.call(EngineRank.score, name, row)
        return StagedAdapter(
            name=name,
            version=version,
            folder=folder,
            row=row,
            scores_T=scores_T[1:].astype(np.float64),
        )

    def stage(self, version: int) -> None:
        """Copy the weights for the servers."""
        self.ranks.call(EngineRank.stage, version)

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

    def _write(self, path: Path, adapter: str, extra: dict[str, Any]) -> None:
        """Write a checkpoint, with `extra` beside the weights."""
        _check_writable(path.parent)
        self.ranks.call(EngineRank.write, path, adapter, extra)

    def load(self, path: Path, adapter: str) -> None:
        """Read a checkpoint."""
        self.ranks.call(EngineRank.read, path, adapter)

    def export(self, path: Path, adapter: str) -> None:
        """Write a Hugging Face folder, or that of an adapter."""
        _check_writable(path.parent)
        if adapter:
            self.ranks.local.trained[adapter].export(path)
        else:
            self.ranks.call(EngineRank.export, path)

    def fingerprint(self) -> str:
        """Return the fingerprint of the parameters; see TrainEngine."""
        return self.ranks.call(EngineRank.fingerprint)


def _check_writable(folder: Path) -> None:
    """Raise OSError if no file can be written: rank 0 would fail while the others wait for it."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder):
        pass


def concat_ranks(parts: Seq[Outputs]) -> Outputs:
    """Return the outputs of the ranks' rows, one rank after the other.

    A rank without rows may lack names.
    """
    names = dict.fromkeys(name for outputs in parts for name in outputs)
    return {
        name: [values for outputs in parts for values in outputs.get(name, [])] for name in names
    }


def _loss_tokens(values: Seq[np.ndarray], masks: Seq[np.ndarray]) -> torch.Tensor:
    """Return the values of all rows' loss tokens, one row after the other."""
    parts = [row_values[mask] for row_values, mask in zip(values, masks, strict=True)]
    return torch.from_numpy(np.concatenate(parts))
