"""Rows of a batch against tables computed by hand."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from arealite.api.trainer import LossConfig, PPOConfig
from arealite.base.errors import InvariantError
from arealite.impl.trainer.batch import make_train_batch
from tests.impl.trainer.trajectories import batch, group, header, segment

CONFIG = PPOConfig(max_staleness=2)


def test_rows_hold_tokens_masks_and_fields_of_their_own_trajectory() -> None:
    made = make_train_batch(*batch(group("g", [1.0, 0.0])), CONFIG, rank=0, world_size=1)
    first, second = made.rows
    assert first.tokens.tolist() == [3, 3, 3]
    assert second.tokens.tolist() == [4, 4, 4, 4]
    assert first.loss_mask.tolist() == [False, False, True]
    assert second.loss_mask.tolist() == [False, False, True, True]
    assert first.temperature == 0.7
    # 3 sampled tokens in the minibatch.
    assert second.fields["loss_weight"] == pytest.approx([1 / 3] * 4)
    assert second.fields["behav_logprobs"].tolist() == [0.0, 0.0, -1.0, -1.0]
    assert made.all_lengths == [[3, 4]]


def test_each_segment_is_a_row_and_a_sequence_is_a_trajectory() -> None:
    parts = [segment([5, 6, 7], sampled=2), segment([5, 6, 8, 9], sampled=1)]
    other = [segment([5, 6], sampled=1)]
    whole = [
        (header("g/0/agent", parts, reward=1.0), parts),
        (header("g/1/agent", other, reward=0.0), other),
    ]
    config = replace(CONFIG, loss=LossConfig(reduction="seq_mean_token_mean"))
    made = make_train_batch(*batch(whole), config, rank=0, world_size=1)
    assert [len(row.tokens) for row in made.rows] == [3, 4, 2]
    assert [row.fields["loss_weight"][0] for row in made.rows] == pytest.approx(
        [1 / 6, 1 / 6, 1 / 2]
    )


def test_weights_are_of_the_global_minibatch_and_lengths_of_every_rank() -> None:
    trajectories = group("a", [1.0, 0.0]) + group("b", [0.0, 2.0])
    layout = {"ranks": [0, 1, 1, 0], "minibatches": [0, 0, 1, 1]}
    shards = [
        make_train_batch(*batch(trajectories, rank=rank, **layout), CONFIG, rank=rank, world_size=2)
        for rank in (0, 1)
    ]
    for made in shards:
        assert made.all_lengths == [[3, 4], [4, 3]]
        minibatches = made.minibatches(range(4))
        assert [m.all_lengths for m in minibatches] == [[[3], [4]], [[4], [3]]]
        for rows in ([row for m in minibatches for row in m.rows], made.rows):
            assert {float(row.fields["loss_weight"][0]) for row in rows} == {np.float32(1 / 3)}
    total = sum(
        float((row.fields["loss_weight"] * row.loss_mask).sum())
        for made in shards
        for row in made.minibatches(range(4))[0].rows
    )
    assert total == pytest.approx(1.0)


def test_payloads_may_come_in_any_order_of_indices() -> None:
    made, payloads = batch(group("g", [1.0, 0.0]))
    turned = msgspec.structs.replace(made, mine=[1, 0])
    rows = make_train_batch(turned, payloads[::-1], CONFIG, rank=0, world_size=1).rows
    assert [len(row.tokens) for row in rows] == [3, 4]


@pytest.mark.parametrize("policy", ["pace", "drop"])
def test_a_token_older_than_the_bound_stops_the_run_and_names_the_trajectory(policy: str) -> None:
    config = replace(CONFIG, staleness_policy=policy)
    fresh, old = group("g", [1.0, 0.0], version=3), group("h", [1.0, 0.0], version=2)
    make_train_batch(*batch(fresh, step=5), config, rank=0, world_size=1)
    with pytest.raises(InvariantError, match=r"h/0/agent brought tokens of version 2 to step 5"):
        make_train_batch(*batch(fresh + old, step=5), config, rank=0, world_size=1)


def test_mask_takes_only_old_tokens_out_of_the_loss() -> None:
    parts = [segment([5, 6, 7, 8], sampled=3, version=[2, 3, 5])]
    other = [segment([5, 6], sampled=1, version=5)]
    whole = [
        (header("g/0/agent", parts, reward=1.0), parts),
        (header("g/1/agent", other, reward=0.0), other),
    ]
    config = replace(CONFIG, staleness_policy="mask")
    made = make_train_batch(*batch(whole, step=5), config, rank=0, world_size=1)
    assert made.rows[0].loss_mask.tolist() == [False, False, True, True]


def test_rewards_stand_at_sampled_tokens_and_turns_are_runs_of_them() -> None:
    """Two turns in one segment, then a turn without a token, then one in a segment of its own."""
    made = segment([5, 6, 7, 8, 9, 5, 6], sampled=2)
    mask = np.array([0, 1, 1, 0, 0, 1, 0], np.uint8)
    rewards = np.array([0, 0, 0.5, 0, 0, 1, 2], "<f4")
    first = msgspec.structs.replace(made, loss_mask=mask.tobytes(), rewards=rewards.tobytes())
    parts = [first, segment([5, 6, 7], sampled=2, reward=-1.0)]
    whole = [(header("g/0/agent", parts, reward=2.5, trained_tokens=5), parts)]
    (own,) = make_train_batch(*batch(whole), CONFIG, rank=0, world_size=1).owned
    assert own.rewards_N.tolist() == [0.0, 0.5, 3.0, 0.0, -1.0]
    assert own.turns() == [(1, 2), (2, 1), (4, 2)]
    own.lay("advantages", np.arange(1.0, 6.0))
    assert own.rows[0].fields["advantages"].tolist() == [0, 1, 2, 0, 0, 3, 0]
    assert own.rows[1].fields["advantages"].tolist() == [0, 4, 5]
    assert own.pick("advantages").tolist() == [1, 2, 3, 4, 5]


def test_a_payload_that_differs_from_its_header_stops_the_run() -> None:
    parts = [segment([5, 6, 7], sampled=1)]
    wrong = header("g/0/agent", parts, reward=1.0, segment_lengths=[4])
    with pytest.raises(InvariantError, match="g/0/agent: its payload"):
        make_train_batch(*batch([(wrong, parts)]), CONFIG, rank=0, world_size=1)


def test_a_sampled_token_without_a_prefix_stops_the_run() -> None:
    parts = [segment([5, 6], sampled=2)]
    with pytest.raises(InvariantError, match="no prefix"):
        whole = [(header("g/0/agent", parts, reward=1.0), parts)]
        make_train_batch(*batch(whole), CONFIG, rank=0, world_size=1)


def test_payloads_of_another_rank_stop_the_run() -> None:
    with pytest.raises(InvariantError, match=r"rank 1 .* trajectories \[0, 1\], but it owns \[\]"):
        make_train_batch(*batch(group("g", [1.0, 0.0])), CONFIG, rank=1, world_size=2)


def test_a_missing_payload_stops_the_run() -> None:
    made, payloads = batch(group("g", [1.0, 0.0]))
    with pytest.raises(InvariantError, match="rank 0 the 1 payloads"):
        make_train_batch(made, payloads[:1], CONFIG, rank=0, world_size=1)
