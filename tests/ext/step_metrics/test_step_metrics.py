"""Compare metrics of a batch with numbers computed by hand."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from arealite.algo.losses import make_value_loss
from arealite.api.algorithm import CriticConfig
from arealite.api.engine import LossInput
from arealite.api.trainer import PPOConfig
from arealite.ext.step_metrics.token_metrics import token_metrics, token_sums
from arealite.ext.step_metrics.trajectory_metrics import group_counts, trajectory_metrics
from arealite.ext.step_metrics.update_metrics import (
    effective_sample_share,
    explained_variance,
    update_metrics,
)
from arealite.impl.logger.metrics_file import is_step
from arealite.impl.trainer.batch import TrainBatch, make_train_batch
from tests.impl.trainer.trajectories import batch, group, header, segment


def train_batch(*, step: int, prox: float) -> TrainBatch:
    """Return one trajectory of versions 1, 1, 2 and one of version 2; behaviour logprobs are -1."""
    first = [segment([5, 6, 7, 8], sampled=3, version=[1, 1, 2], reward=1.0)]
    second = [segment([5, 6], sampled=1, version=2)]
    whole = [
        (header("g/0/agent", first, reward=1.0), first),
        (header("g/1/agent", second, reward=0.0), second),
    ]
    made = make_train_batch(*batch(whole, step=step), PPOConfig(), rank=0, world_size=1)
    for row in made.rows:
        row.fields["prox_logprobs"] = np.where(row.loss_mask, prox, 0.0).astype(np.float32)
        row.fields["entropy"] = row.loss_mask * np.float32(0.5)
    return made


def test_token_metrics() -> None:
    got = token_metrics(*token_sums(train_batch(step=2, prox=-0.5)))
    assert got["mismatch/logprob_abs_diff_mean"] == pytest.approx(0.5)
    assert got["mismatch/logprob_abs_diff_max_current"] == pytest.approx(0.5)
    assert got["mismatch/current_tokens"] == 2
    assert got["mismatch/kl"] == pytest.approx(np.exp(0.5) - 1 - 0.5)
    assert got["mismatch/behav_weight_ess"] == pytest.approx(1.0)
    assert got["policy/entropy"] == pytest.approx(0.5)
    assert got["staleness/token_mean"] == pytest.approx(0.5)
    assert got["staleness/token_max"] == 1


def test_current_tokens_have_the_version_of_the_step() -> None:
    made = train_batch(step=2, prox=-1.0)
    old = made.local[0].versions[0] == 1
    made.rows[0].fields["prox_logprobs"][old] = -3.0
    got = token_metrics(*token_sums(made))
    assert got["mismatch/logprob_abs_diff_max"] == pytest.approx(2.0)
    assert got["mismatch/logprob_abs_diff_max_current"] == 0.0


def test_optional_metrics_exist_only_if_their_inputs_do() -> None:
    made = train_batch(step=2, prox=-1.0)
    made.scores = [0.5, -1.0]
    for row in made.rows:
        row.fields["ref_logprobs"] = np.where(row.loss_mask, -0.5, 0.0).astype(np.float32)
    got = token_metrics(*token_sums(made))
    assert got["reward/shaped_mean"] == -0.25
    assert got["policy/reference_kl"] == pytest.approx(np.exp(0.5) - 1 - 0.5)
    plain = token_metrics(*token_sums(train_batch(step=2, prox=-1.0)))
    assert got.keys() - plain.keys() == {"reward/shaped_mean", "policy/reference_kl"}


def test_rank_without_rows_adds_zero_to_metrics() -> None:
    made = replace(train_batch(step=2, prox=-1.0), local=[])
    sums, maxima = token_sums(made)
    assert set(sums.values()) == set(maxima.values()) == {0.0}
    assert all(np.isfinite(v) for v in token_metrics(sums, maxima).values())


def test_trajectory_metrics() -> None:
    parts = [segment([5, 6, 7, 8], sampled=3, version=[1, 1, 2], reward=1.0)]
    headers = [
        header("g/0/agent", parts, reward=1.0, interruptions=2, truncated=True),
        *(h for h, _ in group("h", [0.0, 0.0], version=3)),
    ]
    got = trajectory_metrics(headers, step=3)
    assert got["reward/mean"] == pytest.approx(1 / 3)
    assert (got["reward/min"], got["reward/max"]) == (0.0, 1.0)
    assert got["reward/std"] == pytest.approx(np.std([1, 0, 0]))
    assert got["reward/parts/exact"] == pytest.approx(1 / 3)
    assert got["length/trained_max"] == 3
    assert got["staleness/max"] == 2
    assert got["staleness/versions_per_trajectory_max"] == 2
    assert got["staleness/mixed_version_frac"] == pytest.approx(1 / 3)
    assert got["rollout/interruptions_in_batch"] == 2
    assert got["episode/truncated_frac"] == pytest.approx(1 / 3)
    assert got["episode/groups_zero_variance"] == 1
    assert got["episode/segments_mean"] == 1.0
    split = trajectory_metrics([header("g/0/agent", parts * 2, reward=0.0)], step=3)
    assert split["episode/segments_mean"] == 2.0


def test_metrics_are_split_by_source_and_seat() -> None:
    long, short = [segment([5, 6, 7, 8], sampled=3)], [segment([5, 6], sampled=1)]
    headers = [
        header("g/0/cop", long, reward=1.0, source="chase", truncated=True),
        header("g/0/thief", short, reward=-1.0, source="chase", turns=3),
        header("h/0/agent", short, reward=0.5, source="openai/gsm8k"),
    ]
    got = trajectory_metrics(headers, step=0)
    assert (got["reward/chase/mean"], got["reward/openai/gsm8k/mean"]) == (0.0, 0.5)
    assert (got["reward/seat/cop/mean"], got["reward/seat/thief/mean"]) == (1.0, -1.0)
    assert (got["episode/chase/trajectories"], got["episode/chase/truncated_frac"]) == (2.0, 0.5)
    assert (got["episode/chase/turns_mean"], got["length/chase/trained_mean"]) == (2.0, 2.0)
    assert got["length/openai/gsm8k/trained_mean"] == 1.0
    plain = trajectory_metrics([msgspec.structs.replace(headers[2], source="")], step=0)
    assert not [
        name
        for name in plain
        if name.count("/") > 1 and "/parts/" not in name and "/wait/" not in name
    ], "one source without a name, one seat"


def test_update_metrics_are_means_over_trained_tokens() -> None:
    update = {
        "loss": 0.1,
        "weight": 0.5,
        "ratio": 0.5,
        "behav_weight": 0.5,
        "behav_weight_sq": 0.5,
        "grad_norm": 2.0,
        "tokens": 60.0,
        "computed_tokens": 80.0,
    }
    got = update_metrics([update, {**update, "grad_norm": 4.0}, {"skipped_update": 1.0}])
    assert got["loss/ratio"] == 1.0
    assert got["loss/policy"] == pytest.approx(0.1)
    assert got["loss/behav_weight_ess"] == pytest.approx(1.0)
    assert (got["update/grad_norm"], got["update/count"]) == (3.0, 3.0)
    assert got["update/computed_frac"] == pytest.approx(80 / 60)


def test_critic_metrics_have_the_prefix_critic() -> None:
    critic = {"loss": 0.3, "weight": 0.5, "values": 1.0, "grad_norm": 3.0}
    critic |= {"returns": 1.0, "returns_sq": 4.0, "error": 0.0, "error_sq": 0.5}
    update = {"loss": 0.1, "weight": 0.5, "ratio": 0.5, "grad_norm": 1.0}
    got = update_metrics([update | {f"critic/{k}": v for k, v in critic.items()}])
    assert (got["loss/policy"], got["update/grad_norm"]) == (0.1, 1.0)
    assert (got["critic/loss"], got["critic/grad_norm"], got["critic/values"]) == (0.3, 3.0, 2.0)
    # Var R = 8 − 2², Var (R − V) = 1 − 0².
    assert got["critic/explained_variance"] == pytest.approx(0.75)


def test_agreement_of_routing_is_a_share_of_the_recorded_choices() -> None:
    updates = [
        {"loss": 1.0, "weight": 0.5, "routing_matched": 9.0, "routing_compared": 10.0},
        {"loss": 1.0, "weight": 0.5, "routing_matched": 20.0, "routing_compared": 20.0},
        {"skipped_update": 1.0},
    ]
    found = update_metrics(updates)
    assert found["routing/agreement"] == pytest.approx(29 / 30)
    assert not [name for name in found if "routing_" in name]
    assert "routing/agreement" not in update_metrics([{"loss": 1.0}])


def test_rewards_leave_out_trajectories_without_a_score() -> None:
    headers = [h for h, _ in group("g", [2.0, None, 4.0])]
    got = trajectory_metrics(headers, step=0)
    assert (got["reward/min"], got["reward/mean"], got["reward/max"]) == (2.0, 3.0, 4.0)
    assert (got["reward/unscored"], got["episode/trajectories"]) == (1.0, 3.0)
    named = [msgspec.structs.replace(h, source="a" if h.reward else "b") for h in headers]
    split = trajectory_metrics(named, step=0)
    assert split["reward/a/mean"] == 3.0
    assert "reward/b/mean" not in split and split["episode/b/trajectories"] == 1.0


def test_batch_without_any_score_has_no_mean_reward() -> None:
    headers = [h for h, _ in group("g", [None, None])]
    got = trajectory_metrics(headers, step=0)
    assert [name for name in got if name.startswith("reward/")] == [
        *("reward/unscored", "reward/unchecked")
    ]
    assert is_step(got), "readers of metrics still see a step"


CURRENT = {"mismatch/logprob_abs_diff_mean_current", "mismatch/logprob_abs_diff_max_current"}


def token_metrics_of(made: TrainBatch) -> dict[str, float]:
    return token_metrics(*token_sums(made))


def test_without_a_token_of_the_current_version_its_difference_is_absent() -> None:
    measured = token_metrics_of(train_batch(step=2, prox=-0.5))
    stale = train_batch(step=2, prox=-0.5)
    for trajectory in stale.local:
        trajectory.versions = [np.minimum(versions_T, 1) for versions_T in trajectory.versions]
    got = token_metrics_of(stale)
    assert got["mismatch/current_tokens"] == 0.0, "a count is measured"
    assert measured.keys() - got.keys() == CURRENT
    assert got["mismatch/logprob_abs_diff_mean"] == pytest.approx(0.5)


def test_without_a_trained_token_only_the_ages_are_measured() -> None:
    made = train_batch(step=2, prox=-0.5)
    for row in made.rows:
        del row.fields["prox_logprobs"]
    got = token_metrics_of(made)
    assert got.keys() == {"mismatch/current_tokens", "staleness/token_mean", "staleness/token_max"}
    for row in made.rows:
        row.loss_mask = np.zeros_like(row.loss_mask)  # as staleness_policy=mask
    assert token_metrics_of(made) == {"mismatch/current_tokens": 0.0}


def test_update_without_a_weighted_token_has_no_means() -> None:
    nothing = dict.fromkeys(("loss", "weight", "ratio", "behav_weight", "behav_weight_sq"), 0.0)
    nothing |= {f"critic/{name}": 0.0 for name in ("loss", "weight", "values", "returns")}
    engine = {"grad_norm": 0.0, "lr": 0.1, "critic/lr": 0.2}
    assert update_metrics([nothing | engine]) == {
        "update/count": 1.0,
        "update/grad_norm": 0.0,
        "update/lr": 0.1,
        "critic/lr": 0.2,
        "loss/weight": 0.0,
        "critic/weight": 0.0,
    }
    trained = {"loss": 0.1, "weight": 0.5, "ratio": 0.5}
    got = update_metrics([nothing | engine, trained])
    assert (got["loss/ratio"], got["loss/policy"]) == (1.0, 0.1), "a mean over one update"


def test_groups_of_one_and_of_equal_rewards_are_counted() -> None:
    rewards, groups = [7.0, 0.1, 0.1, 0.1], ["one", "same", "same", "same"]
    assert group_counts(rewards, groups) == {
        "groups": 2.0,
        "groups_of_one": 1.0,
        "groups_zero_variance": 1.0,
    }


def test_group_with_fewer_than_two_scores_has_no_variance() -> None:
    rewards = [None, None, None, 1.0, 1.0, 0.0, None]
    counts = group_counts(rewards, [*"aabbccc"])
    assert (counts["groups"], counts["groups_zero_variance"]) == (3.0, 2.0)


def critic(tokens: list[tuple[float, float]], weight: float = 1.0) -> dict[str, float]:
    """Return the summed stats of the critic's loss for (old value, return) tokens."""
    values, returns = (torch.tensor(column) for column in zip(*tokens, strict=True))
    weights = torch.full((len(tokens),), weight)
    fields = {"values": values, "returns": returns, "loss_weight": weights}
    rows_N = torch.zeros(len(tokens), dtype=torch.int64)
    batch = LossInput(outputs={"values": values}, rows_N=rows_N, fields=fields)
    _, stats = make_value_loss(CriticConfig())(batch)
    return {f"critic/{name}": float(total) for name, total in stats.items()}


def test_explained_variance_matches_values_by_hand() -> None:
    # Returns 0, 2, 4 have variance 8/3; errors of the old values 1, 0, 1 have 2/9.
    stats = critic([(-1.0, 0.0), (2.0, 2.0), (3.0, 4.0)], weight=0.25)
    assert explained_variance(stats) == pytest.approx(1 - (2 / 9) / (8 / 3))


def test_shares_match_values_by_hand_and_shares_of_nothing_are_none() -> None:
    equal = critic([(5.0, 1.0), (7.0, 1.0)])
    assert explained_variance(equal) is None, "equal returns have no variance to explain"
    assert explained_variance(critic([(5.0, 1.0), (7.0, 2.0)], weight=0.0)) is None
    assert explained_variance({"weight": 1.0}) is None, "no critic"
    stats = {"weight": 1.0, "behav_weight": 4.5 / 4, "behav_weight_sq": 6.25 / 4}
    assert effective_sample_share(stats) == pytest.approx(4.5**2 / (4 * 6.25))
    weights = {"weight": 2.0, "behav_weight": 0.0, "behav_weight_sq": 0.0}
    assert effective_sample_share(weights) is None, "every token is masked"
    assert effective_sample_share({"weight": 1.0}) is None, "no behaviour weights"
