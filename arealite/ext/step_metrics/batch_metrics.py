"""All metrics of a batch (hook `step_metrics`)."""

from collections.abc import Sequence
from functools import partial

from arealite.api.engine import Stats
from arealite.api.experiment_config import ExperimentConfig
from arealite.api.hooks import StepMetrics
from arealite.ext.step_metrics.token_metrics import token_metrics, token_sums
from arealite.ext.step_metrics.trajectory_metrics import trajectory_metrics
from arealite.ext.step_metrics.update_metrics import update_metrics
from arealite.impl.trainer.batch import TrainBatch
from arealite.impl.trainer.metrics import Metrics
from arealite.impl.trainer.rank_group import World


def batch_metrics(_: ExperimentConfig, world: World) -> StepMetrics:
    """Return what measures the batches of a trainer."""
    return partial(measure, world)


def measure(world: World, batch: TrainBatch, stats: Sequence[Stats]) -> Metrics:
    """Return the metrics of a batch from trajectories, tokens and updates; {} except on rank 0."""
    local_sums, local_maxima = token_sums(batch)
    sums = world.sum(local_sums)
    maxima = world.max(local_maxima)
    if not world.is_rank0:
        return {}
    return {
        **trajectory_metrics(batch.headers, step=batch.step),
        **token_metrics(sums, maxima),
        **update_metrics(stats),
    }
