"""Advantage and logprob difference of each sampled token, in a file for each step and rank."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from arealite.api.engine import Stats
from arealite.api.experiment_config import ExperimentConfig, run_paths
from arealite.api.trajectory import TrajectoryHeader
from arealite.base import log
from arealite.ext.step_metrics import token_stats_store as stats_files
from arealite.ext.step_metrics.token_metrics import joined
from arealite.ext.step_metrics.token_stats_store import TokenStats
from arealite.impl.trainer.batch import TrainBatch
from arealite.impl.trainer.metrics import Metrics
from arealite.impl.trainer.rank_group import World

logger = log.get(__name__)


def token_stats_files(config: ExperimentConfig, world: World) -> "TokenStatsFiles | None":
    """Return what writes the files of a rank; None without the option (hook `step_metrics`)."""
    if not config.trainer.ppo.token_stats:
        return None
    folder = run_paths(config).token_stats
    return TokenStatsFiles(folder, rank=world.rank)


class TokenStatsFiles:
    """Writes the files of one rank until the disk fails."""

    def __init__(self, folder: Path, *, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self._has_failed = False

    def __call__(self, batch: TrainBatch, _: Sequence[Stats]) -> Metrics:
        """Write the file of a batch; return no metric."""
        if self._has_failed:
            return {}
        stats = token_stats(batch)
        try:
            stats_files.write(self._folder, batch.step, self._rank, stats)
        except OSError as error:
            self._has_failed = True
            reason = str(error)
            logger.warning("token stats end", step=batch.step, error=reason)
        return {}


def token_stats(batch: TrainBatch) -> TokenStats:
    """Return advantages and logprob differences of this rank's sampled tokens."""
    rows = batch.rows
    sampled = list[np.ndarray]()
    headers = list[TrajectoryHeader]()
    for trajectory in batch.local:
        sampled += trajectory.sampled
        headers.append(batch.headers[trajectory.index])
    is_sampled = joined(sampled).astype(bool)
    loss_masks = [row.loss_mask for row in rows]
    is_in_loss = joined(loss_masks).astype(bool)

    def field(name: str) -> np.ndarray:
        """Return a field of all tokens; NaN for rows without it, which no update trained."""
        values = [row.fields.get(name, row.loss_mask * np.nan) for row in rows]
        return joined(values)

    def packed(values: np.ndarray) -> bytes:
        """Return values of the sampled tokens in 16 bits, NaN outside the loss."""
        loss_values = np.where(is_in_loss, values, np.nan)
        with np.errstate(over="ignore"):  # beyond float16: infinite
            return loss_values[is_sampled].astype("<f2").tobytes()

    differences = field("prox_logprobs") - field("behav_logprobs")
    return TokenStats(
        trajectory_ids=[header.trajectory_id for header in headers],
        counts=[header.trained_tokens for header in headers],
        advantages=packed(field("advantages")),
        differences=packed(differences),
    )
