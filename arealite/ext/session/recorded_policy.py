"""The trained model of a session with a ledger: each of its updates is recorded."""

from collections.abc import Collection
from pathlib import Path

import msgspec

from arealite.api.engine import Sequence, Stats
from arealite.api.engine_config import OptimizerConfig
from arealite.api.experiment_config import ExperimentConfig
from arealite.api.publisher import PublishReport
from arealite.ext.session.call_loss import Loss
from arealite.ext.session.policy import Policy
from arealite.ext.session.sample_ledger import SampleLedger


class RecordedPolicy(Policy):
    """A Policy that trains samples of a ledger."""

    def __init__(self, ledger: SampleLedger) -> None:
        super().__init__()
        self._ledger = ledger
        self._version = ledger.start.step
        """The version that is trained: the newest one that was staged."""

    def load_model(self, config: ExperimentConfig) -> None:
        """Load the model and its optimizer, at the newest state of the ledger."""
        super().load_model(config)
        if self._ledger.state is not None:
            super().load(self._ledger.state, "")

    def close(self) -> None:
        """End the step, and release everything."""
        try:
            self._end_step()
        finally:
            super().close()

    def _end_step(self) -> None:
        # Without updates, there may be no engine.
        self._ledger.end_step(self._version, self.fingerprint)

    def _filter_stale(self) -> None:
        """Filter the samples that are too old for the next step."""
        next_step = self._ledger.position(self._version).step
        self._ledger.filter_stale(next_step - self._config.trainer.ppo.max_staleness)

    def forward_backward(self, rows: list[Sequence], loss: Loss) -> Stats:
        """Add the gradient of a loss; see Policy.

        Raises:
            UserError: A row is of no sample that may be trained.
        """
        backward = self._ledger.record_backward(rows, loss)
        stats = super().forward_backward(rows, loss)
        self._ledger.add_backward(backward, stats)
        return stats

    def drop_gradient(self, adapters: Collection[str]) -> None:
        """Drop the gradient since the last update."""
        self._ledger.drop_gradient()
        super().drop_gradient(adapters)

    def optim_step(
        self,
        adapter: str,
        lr: float | None,
        optimizer: OptimizerConfig,
    ) -> Stats:
        """Apply the gradient.

        Raises:
            UserError: A sample of the gradient was trained by a step that has ended, or is stale.
        """
        self._ledger.check_gradient()
        stats = super().optim_step(adapter, lr, optimizer)
        self._ledger.add_update(lr, optimizer, stats)
        return stats

    def stage(self, version: int) -> None:
        """End the step, and copy the weights for the servers."""
        self._end_step()
        self._version = version
        self._filter_stale()
        super().stage(version)

    def push(self, version: int) -> PublishReport:
        """Update all servers to a staged version, and record it."""
        report = super().push(version)
        assert self._publisher is not None, "start first"
        proof = self._publisher.proof
        self._ledger.add_version(version, proof.record(version) if proof else "")
        return report

    def save(self, path: Path, adapter: str) -> Path:
        """End the step, and write a checkpoint; return its folder."""
        self._end_step()
        self._filter_stale()
        position = self._ledger.position(self._version)
        self._write(path, adapter, msgspec.structs.asdict(position))
        self._ledger.add_state(position, path)
        return path

    def load(self, path: Path, adapter: str) -> None:
        """Read a checkpoint, and undo the steps that it does not contain.

        Raises:
            UserError: There is no such state, or the ledger does not have its steps.
        """
        position = self._ledger.check_state(path)
        super().load(path, adapter)
        self._ledger.roll_back(position)
