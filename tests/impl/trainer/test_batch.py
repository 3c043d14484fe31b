"""Compare the rows of a batch with tables computed by hand."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from arealite.api import trainer_messages as messages
from arealite.api.algorithm import LossConfig
from arealite.api.trainer import PPOConfig
from arealite.base.errors import InvariantError
from arealite.impl.trainer.batch import UnusableGroups, make_rows, make_train_batch
from arealite.impl.trainer.rank_group import World
from tests.impl.trainer.trajectories import batch, group, header, segment
from tests.payloads import GARBAGE

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


def test_each_segment_is_a_row_and_loss_weights_count_trajectories() -> None:
    parts = [segment([5, 6, 7], sampled=2), segment([5, 6, 8, 9], sampled=1, reward=1.0)]
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


def test_loss_weights_use_the_global_minibatch_and_lengths_of_all_ranks() -> None:
    trajectories = group("a", [1.0, 0.0]) + group("b", [0.0, 2.0])
    layout = {"ranks": [0, 1, 1, 0], "minibatches": [0, 0, 1, 1]}
    shards = [
        make_train_batch(*batch(trajectories, rank=rank, **layout), CONFIG, rank=rank, world_size=2)
        for rank in (0, 1)
    ]
    for made in shards:
        minibatches = made.minibatches(range(4))
        assert [(m.num_rows, m.num_tokens) for m in minibatches] == [(2, 7), (2, 7)]
        for rows in ([row for m in minibatches for row in m.rows], made.rows):
            assert {float(row.fields["loss_weight"][0]) for row in rows} == {np.float32(1 / 3)}
    total = sum(
        float((row.fields["loss_weight"] * row.loss_mask).sum())
        for made in shards
        for row in made.minibatches(range(4))[0].rows
    )
    assert total == pytest.approx(1.0)


def test_payloads_follow_the_order_of_the_indices() -> None:
    made, payloads = batch(group("g", [1.0, 0.0]))
    turned = msgspec.structs.replace(made, mine=[1, 0])
    rows = make_train_batch(turned, payloads[::-1], CONFIG, rank=0, world_size=1).rows
    assert [len(row.tokens) for row in rows] == [3, 4]


@pytest.mark.parametrize("policy", ["wait", "drop"])
def test_token_beyond_the_staleness_bound_raises_an_error_with_the_trajectory(policy: str) -> None:
    config = replace(CONFIG, staleness_policy=policy)
    fresh, old = group("g", [1.0, 0.0], version=3), group("h", [1.0, 0.0], version=2)
    make_train_batch(*batch(fresh, step=5), config, rank=0, world_size=1)
    with pytest.raises(InvariantError, match=r"h/0/agent has tokens of version 2 at step 5"):
        make_train_batch(*batch(fresh + old, step=5), config, rank=0, world_size=1)


def test_mask_excludes_only_tokens_beyond_the_staleness_bound() -> None:
    parts = [segment([5, 6, 7, 8], sampled=3, version=[2, 3, 5], reward=1.0)]
    other = [segment([5, 6], sampled=1, version=5)]
    whole = [
        (header("g/0/agent", parts, reward=1.0), parts),
        (header("g/1/agent", other, reward=0.0), other),
    ]
    config = replace(CONFIG, staleness_policy="mask")
    made = make_train_batch(*batch(whole, step=5), config, rank=0, world_size=1)
    assert made.rows[0].loss_mask.tolist() == [False, False, True, True]


def test_rewards_move_to_sampled_tokens_and_turns_are_runs_of_sampled_tokens() -> None:
    """Two turns in one segment, then a turn without tokens, then a turn in its own segment."""
    made = segment([5, 6, 7, 8, 9, 5, 6], sampled=2)
    mask = np.array([0, 1, 1, 0, 0, 1, 0], np.uint8)
    rewards = np.array([0, 0, 0.5, 0, 0, 1, 2], "<f4")
    versions = np.where(mask, 0, -1).astype("<i4").tobytes()
    first = msgspec.structs.replace(
        made, loss_mask=mask.tobytes(), rewards=rewards.tobytes(), versions=versions
    )
    parts = [first, segment([5, 6, 7], sampled=2, reward=-1.0)]
    whole = [(header("g/0/agent", parts, reward=2.5, trained_tokens=5), parts)]
    (own,) = make_train_batch(*batch(whole), CONFIG, rank=0, world_size=1).local
    assert own.rewards_N.tolist() == [0.0, 0.5, 3.0, 0.0, -1.0]
    assert own.turns() == [(1, 2), (2, 1), (4, 2)]
    own.scatter("advantages", np.arange(1.0, 6.0))
    assert own.rows[0].fields["advantages"].tolist() == [0, 1, 2, 0, 0, 3, 0]
    assert own.rows[1].fields["advantages"].tolist() == [0, 4, 5]
    assert own.gather("advantages").tolist() == [1, 2, 3, 4, 5]


def test_unusable_groups_are_reported_with_the_reason() -> None:
    parts, whole = [segment([5, 6, 7], sampled=1)], group("g", [1.0, 0.0])
    longer = header("a/0/agent", parts, reward=0.0, segment_lengths=[4])
    no_prefix = [segment([5, 6], sampled=2)]
    garbage = header("c/0/agent", parts, reward=0.0)
    bad = [(longer, parts), (header("b/0/agent", no_prefix, reward=0.0), no_prefix)]
    made, payloads = batch([*whole, *bad, (garbage, parts)])
    payloads[-1] = GARBAGE
    with pytest.raises(UnusableGroups) as raised:
        make_train_batch(made, payloads, CONFIG, rank=0, world_size=1)
    found = raised.value.groups
    assert found.pop("c").startswith("unreadable")
    assert found == {"a": "length", "b": "a sampled token has no prefix"}


def test_payloads_of_another_rank_raise_an_error() -> None:
    with pytest.raises(InvariantError, match=r"rank 1 .* trajectories \[0, 1\], but it owns \[\]"):
        make_train_batch(*batch(group("g", [1.0, 0.0])), CONFIG, rank=1, world_size=2)


def test_missing_payload_raises_an_error() -> None:
    made, payloads = batch(group("g", [1.0, 0.0]))
    with pytest.raises(InvariantError, match="rank 0 received 1 payloads"):
        make_train_batch(made, payloads[:1], CONFIG, rank=0, world_size=1)


def test_all_ranks_request_the_batch_again_after_one_reports_a_bad_group() -> None:
    """Two ranks in threads: rank 0 has a valid shard and must not train it alone."""
    barrier, flags, events = threading.Barrier(2, timeout=60.0), [False, False], list[str]()

    class Pair(World):
        def any(self, flag: bool) -> bool:
            flags[self.rank] = flag
            barrier.wait()
            found = any(flags)
            barrier.wait()
            return found

    class Link:
        def report(self, message: messages.Unusable) -> None:
            events.append(f"set aside {message.step}: {message.groups}")

    trajectories = group("a", [1.0, 0.0]) + group("b", [0.0, 2.0])

    def rank(number: int) -> object:
        made, payloads = batch(trajectories, step=2, rank=number, ranks=[0, 0, 1, 1])
        if number == 1:
            payloads[0] = GARBAGE
        link: Any = Link()
        found = make_rows(made, payloads, CONFIG, world=Pair(rank=number, size=2), link=link)
        events.append("asks again")
        return found

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(rank, (0, 1))) == [None, None]
    assert events[0].startswith("set aside 2: {'b': 'unreadable")
    assert events[1:] == ["asks again"] * 2
