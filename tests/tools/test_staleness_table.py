"""The policy wait trains all offered groups for any distribution of lengths; drop prefers short."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from tools.staleness_table import COLUMNS, Trial, distance, length_of, row

STEPS = 60


def play(folder: Path, policy: str, eta: int) -> Trial:
    return Trial(folder, policy, eta, STEPS, num_groups=4, free=32).run()


@pytest.mark.parametrize("eta", [0, 1, 4])
def test_wait_trains_all_offered_groups(tmp_path: Path, eta: int) -> None:
    trial = play(tmp_path, "wait", eta)
    store = trial.store
    assert not [reason for reason in store.counts if reason.startswith("filtered")]
    trained = [sample.group_id for sample in trial.samples]
    still_open = [*store.groups, *(g.group_id for s in store.batches for g in store.batches[s]
                                  if s >= trial.step)]  # fmt: skip
    everything = [f"g{seq}" for seq in range(store.offered)]
    assert sorted({*trained, *still_open}) == sorted(everything)
    assert len(trained) == trial.group_size * len(set(trained)) == STEPS * 4 * trial.group_size
    assert not set(trained) & set(still_open)
    assert len(still_open) <= (eta + 1) * 4
    assert all(sample.tokens == sample.with_loss for sample in trial.samples)
    assert max(sample.age for sample in trial.samples) <= eta
    lengths = [sample.tokens for sample in trial.samples]
    assert distance(lengths, trial.offered()) < 0.02
    expected = [length_of(1, group_id, m) for group_id in set(trained) for m in range(4)]
    assert sorted(lengths) == sorted(expected), "the same episodes, each once"


@pytest.mark.parametrize("eta", [1, 4])
def test_drop_prefers_short_trajectories(tmp_path: Path, eta: int) -> None:
    trial = play(tmp_path, "drop", eta)
    lengths, offered = [s.tokens for s in trial.samples], trial.offered()
    assert trial.store.counts["filtered:stale"] > STEPS * 4 * 0.1
    assert statistics.mean(lengths) < 0.9 * statistics.mean(offered)
    assert distance(lengths, offered) > 0.03
    assert max(sample.age for sample in trial.samples) <= eta


@pytest.mark.parametrize("eta", [1, 4])
def test_mask_excludes_tokens_of_long_trajectories(tmp_path: Path, eta: int) -> None:
    trial = play(tmp_path, "mask", eta)
    cut = [s.tokens for s in trial.samples if s.with_loss < s.tokens]
    whole = [s.tokens for s in trial.samples if s.with_loss == s.tokens]
    assert not trial.store.counts["filtered:stale"]
    assert statistics.mean(cut) > 2 * statistics.mean(whole)
    assert max(sample.age for sample in trial.samples) <= eta


def test_all_policies_are_equal_with_eta_0(tmp_path: Path) -> None:
    rows = []
    for policy in ("wait", "mask", "drop"):
        folder = tmp_path / policy
        folder.mkdir()
        rows.append(row(play(folder, policy, 0))[1:-1])
    assert rows[0] == rows[1] == rows[2]
    assert len(rows[0]) == len(COLUMNS) - 2


def test_distance_between_length_distributions() -> None:
    assert distance([1, 2, 3], [1, 2, 3]) == 0.0
    assert distance([1, 1], [2, 2]) == 1.0
    assert distance([1, 2, 3, 4], [3, 4]) == 0.5
