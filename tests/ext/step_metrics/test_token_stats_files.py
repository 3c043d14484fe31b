"""Token statistics that ranks write for reports; a failed write does not stop a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from arealite.api.experiment_config import ExperimentConfig, run_paths
from arealite.api.trainer import PPOConfig, TrainerConfig
from arealite.api.trial import ClusterConfig
from arealite.ext.step_metrics.token_stats_files import token_stats
from arealite.ext.step_metrics.token_stats_store import read
from arealite.impl.trainer.batch import TrainBatch, make_train_batch
from arealite.impl.trainer.ppo import PPOTrainer
from tests.impl.trainer.scripted import Stage
from tests.impl.trainer.trajectories import batch, header, segment


def experiment(root: Path, **ppo: object) -> ExperimentConfig:
    settings = PPOConfig(total_steps=3, max_staleness=0, **ppo)  # type: ignore[arg-type]
    return ExperimentConfig(
        cluster=ClusterConfig(run_root=str(root)), trainer=TrainerConfig(ppo=settings)
    )


def rows(rank: int = 0) -> TrainBatch:
    """Return two trajectories at step 3 under `mask`; the first has a token that is too old."""
    one = [segment([1, 2, 3, 4], sampled=3, version=[0, 2, 3], reward=1.0)]
    two = [segment([1, 2], sampled=1, version=3), segment([1, 2, 3], sampled=1, version=3)]
    made = [
        (header("a/0/agent", one, reward=1.0), one),
        (header("a/1/agent", two, reward=0.0), two),
    ]
    plan, payloads = batch(made, step=3, rank=rank)
    config = PPOConfig(max_staleness=1, staleness_policy="mask")
    return make_train_batch(plan, payloads, config, rank=rank, world_size=2)


def test_token_stats_have_each_sampled_token() -> None:
    own = rows()
    for number, each in enumerate(own.local):
        each.scatter("advantages", 0.5 - number)
    own.rows[0].fields["prox_logprobs"] = np.array([9.0, -1.0, -1.25, 1e6], np.float32)
    stats = token_stats(own)
    assert stats.trajectory_ids == ["a/0/agent", "a/1/agent"]
    assert stats.counts == [3, 2]
    nan = np.nan
    np.testing.assert_array_equal(
        np.frombuffer(stats.advantages, "<f2"), np.array([nan, 0.5, 0.5, -0.5, -0.5], "<f2")
    )
    np.testing.assert_array_equal(
        np.frombuffer(stats.differences, "<f2"), np.array([nan, -0.25, np.inf, nan, nan], "<f2")
    )


def test_rank_without_rows_has_no_token_stats() -> None:
    assert token_stats(rows(rank=1)).counts == []


def test_each_step_writes_a_token_stats_file(tmp_path: Path) -> None:
    config = experiment(tmp_path)
    PPOTrainer(config, Stage().components()).train()
    folder = run_paths(config).token_stats
    assert [file.name for file in sorted(folder.iterdir())] == [
        "000000-0.msgpack", "000001-0.msgpack", "000002-0.msgpack",
    ]  # fmt: skip
    found = read(folder, 2, ranks=1)
    assert set(found) == {"a/0/agent", "a/1/agent", "b/0/agent", "b/1/agent"}
    advantages, differences = found["a/1/agent"]
    assert len(advantages) == 2
    assert np.isfinite(advantages).all()
    assert np.isfinite(differences).all() or np.isnan(differences).all()


def test_disabled_token_stats_write_no_file(tmp_path: Path) -> None:
    config = experiment(tmp_path, token_stats=False)
    PPOTrainer(config, Stage().components()).train()
    assert not run_paths(config).token_stats.exists()


def test_failed_token_stats_write_is_logged_once_and_the_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = list[int]()

    def full(folder: Path, step: int, rank: int, stats: object) -> None:
        tried.append(step)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("arealite.ext.step_metrics.token_stats_store.write", full)
    stage = Stage()
    with capture_logs() as logs:
        PPOTrainer(experiment(tmp_path), stage.components()).train()
    assert [report.step for report in stage.pipe.reports] == [0, 1, 2]
    assert tried == [0]
    assert [line["error"] for line in logs if line["event"] == "token stats end"] == [
        "[Errno 28] No space left on device"
    ]
