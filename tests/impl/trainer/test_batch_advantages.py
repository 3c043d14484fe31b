"""Compare advantages of batches with numbers computed by hand, and two ranks with one rank."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from arealite.api.algorithm import AdvantageConfig, KLConfig, LossConfig, ShapingConfig
from arealite.api.collector_config import CollectorConfig
from arealite.api.engine import Sequence
from arealite.api.llm import SamplingConfig
from arealite.api.trainer import PPOConfig
from arealite.api.trajectory import Segment, TrajectoryHeader
from arealite.impl.trainer.batch import Minibatch, TrainBatch, make_train_batch
from arealite.impl.trainer.batch_advantages import compute_advantages
from arealite.impl.trainer.rank_group import World
from tests.impl.trainer.trajectories import batch, group, header, segment

Trajectories = list[tuple[TrajectoryHeader, list[Segment]]]
COLLECTOR = CollectorConfig(sampling=SamplingConfig(max_new_tokens=4))


def config(kind: str = "dr_grpo", **changes: Any) -> PPOConfig:
    advantage = AdvantageConfig(type=kind, **changes.pop("advantage", {}))
    return PPOConfig(advantage=advantage, collector=COLLECTOR, **changes)


def forward(made: TrainBatch) -> None:
    """Fill the outputs of all models with values that depend only on the token."""

    def said(rows: list[Sequence], scale: float, offset: float) -> list[np.ndarray]:
        found = [row.loss_mask * (row.tokens % 5 * scale + offset) for row in rows]
        return [array.astype(np.float32) for array in found]

    made.fill("prox_logprobs", said(made.rows, 0.1, -1.25))
    made.fill("ref_logprobs", said(made.rows, 0.2, -1.5))
    made.store_values(said(made.critic_rows(), 0.5, 0.25))


def estimated(
    trajectories: Trajectories, ppo: PPOConfig, **layout: Any
) -> tuple[TrainBatch, list[Minibatch]]:
    made = make_train_batch(*batch(trajectories, **layout), ppo, rank=0, world_size=1)
    forward(made)
    return made, compute_advantages(made, ppo, World())


def advantages(trajectories: Trajectories, ppo: PPOConfig) -> list[list[float]]:
    """Return the advantages of each trajectory's sampled tokens."""
    made, _ = estimated(trajectories, ppo)
    return [own.gather("advantages").tolist() for own in made.local]


def episode(name: str, *parts: Segment, **changes: Any) -> tuple[TrajectoryHeader, list[Segment]]:
    reward = sum(float(np.frombuffer(part.rewards, "<f4").sum()) for part in parts)
    return header(name, parts, reward=reward, **changes), list(parts)


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [("grpo", 0.5**0.5, -(0.5**0.5)), ("dr_grpo", 0.5, -0.5), ("rloo", 1.0, -1.0)],
)
def test_group_relative_advantage_applies_to_every_sampled_token(
    kind: str, first: float, second: float
) -> None:
    got = advantages(group("g", [1.0, 0.0]), config(kind))
    assert got[0] == pytest.approx([first], rel=1e-5)
    assert got[1] == pytest.approx([second] * 2, rel=1e-5)


def test_returns_span_all_segments_of_an_episode_and_skip_observations() -> None:
    parts = segment([5, 6, 7], sampled=2, reward=1.0), segment([5, 6, 9, 9], sampled=1, reward=4.0)
    ppo = config("reinforce", advantage={"gamma": 0.5})
    assert advantages([episode("g/0/agent", *parts)], ppo) == [[0.5 + 1.0, 1.0 + 2.0, 4.0]]


@pytest.mark.parametrize("truncated", [False, True])
def test_gae_bootstraps_only_truncated_episodes(truncated: bool) -> None:
    """Tokens 5, 6, 7: the states in which 6 and 7 were sampled have the values 0.75 and 1.25."""
    ppo = config("gae", advantage={"gamma": 0.5, "gae_lambda": 0.5})
    played = episode("g/0/agent", segment([5, 6, 7], sampled=2, reward=2.0), truncated=truncated)
    made, _ = estimated([played], ppo)
    # The value after 7 is that of the appended token, a copy of 7.
    after = 1.25 if truncated else 0.0
    last = 2.0 + 0.5 * after - 1.25
    first = 0.0 + 0.5 * 1.25 - 0.75 + 0.5 * 0.5 * last
    (own,) = made.local
    assert own.gather("advantages") == pytest.approx([first, last])
    assert own.gather("returns") == pytest.approx([first + 0.75, last + 1.25])


def test_last_row_of_a_truncated_episode_has_one_more_token_for_the_critic_only() -> None:
    cut = episode(
        "g/0/agent", segment([5, 6], sampled=1), segment([5, 6, 7], sampled=1), truncated=True
    )
    whole = episode("g/1/agent", segment([5, 6, 7, 8], sampled=2))
    sent = batch([cut, whole], ranks=[0, 1])
    made = make_train_batch(*sent, config("gae"), rank=0, world_size=2)
    rows = made.critic_rows()
    assert [row.tokens.tolist() for row in rows] == [[5, 6], [5, 6, 7, 7]]
    assert rows[1].loss_mask.tolist() == [False, False, True, True]
    assert [row.tokens.tolist() for row in made.rows] == [[5, 6], [5, 6, 7]]


def test_masked_stale_token_still_has_a_value_for_returns() -> None:
    ppo = replace(config("gae"), staleness_policy="mask", max_staleness=1)
    parts = segment([5, 6, 7], sampled=2, version=[0, 2], reward=1.0)
    made = make_train_batch(
        *batch([episode("g/0/agent", parts)], step=2), ppo, rank=0, world_size=1
    )
    assert made.rows[0].loss_mask.tolist() == [False, False, True]
    assert made.critic_rows()[0].loss_mask.tolist() == [False, True, True]
    forward(made)
    compute_advantages(made, ppo, World())
    assert made.local[0].gather("values") == pytest.approx([0.75, 1.25])


def test_overlong_penalty_applies_at_the_end_of_the_turn() -> None:
    """At most 4 tokens, of which the last 2 are penalised."""
    shaping = ShapingConfig(overlong_buffer=2, overlong_penalty=0.5)
    tokens = [9, 3, 3, 3, 3]
    played = [
        episode("g/0/agent", segment(tokens[:3], sampled=2, reward=1.0)),
        episode("g/1/agent", segment(tokens, sampled=4, reward=1.0)),
    ]
    assert advantages(played, config(reward=shaping)) == [[0.25] * 2, [-0.25] * 4]
    assert advantages(played, config()) == [[0.0] * 2, [0.0] * 4]
    assert advantages(played, config("reinforce", reward=shaping)) == [[1.0] * 2, [0.5] * 4]
    turns = [episode("g/0/agent", segment(tokens[:4], sampled=3), segment(tokens, sampled=4))]
    assert advantages(turns, config("reinforce", reward=shaping)) == [[-0.75] * 3 + [-0.5] * 4]


def test_rewards_are_scaled_clipped_and_biased() -> None:
    shaping = ShapingConfig(scale=2.0, clip=1.5, bias=-1.0)
    played = [episode("g/0/agent", segment([5, 6], sampled=1, reward=3.0))]
    made, _ = estimated(played, config("reinforce", reward=shaping))
    assert made.local[0].gather("advantages").tolist() == [0.5]
    assert made.scores == [0.5]


@pytest.mark.parametrize("kind", ["reinforce", "dr_grpo"])
def test_kl_to_the_reference_lowers_the_reward_of_each_token(kind: str) -> None:
    kl = KLConfig(coef=0.5, place="reward", estimator="k1", reference="initial")
    played = [
        episode("g/0/agent", segment([5, 6, 7], sampled=2, reward=1.0)),
        episode("g/1/agent", segment([5, 9], sampled=1, reward=1.0)),
    ]
    # log π − log π_ref of tokens 6, 7 and 9: -1.15 + 1.3, -1.05 + 1.1 and -0.85 + 0.7.
    first, second = 1.0 - 0.5 * (0.15 + 0.05), 1.0 - 0.5 * -0.15
    got = advantages(played, config(kind, kl=kl))
    if kind == "reinforce":
        assert got[0] == pytest.approx([first, 1.0 - 0.5 * 0.05], abs=1e-6)
        assert got[1] == pytest.approx([second], abs=1e-6)
    else:
        assert got[0] == pytest.approx([(first - second) / 2] * 2, abs=1e-6)


@pytest.mark.parametrize("kind", ["grpo", "rloo", "reinforce", "gae"])
def test_normalized_advantages_have_mean_0_and_std_1_over_tokens(kind: str) -> None:
    played = group("a", [1.0, 0.0, 0.5]) + group("b", [0.0, 2.0])
    flat = np.concatenate(advantages(played, config(kind, advantage={"normalize": True})))
    assert flat.mean() == pytest.approx(0.0, abs=1e-6)
    assert flat.std() == pytest.approx(1.0, abs=1e-4)


def test_equal_advantages_normalize_to_zero() -> None:
    ppo = config("reinforce", advantage={"normalize": True, "eps": 0.0})
    assert advantages(group("a", [1.0, 1.0]), ppo) == [[0.0], [0.0, 0.0]]


def test_m2po_keeps_the_tokens_closest_to_the_behaviour_policy() -> None:
    played = [
        episode("g/0/agent", segment([5, 6, 8], sampled=2)),
        episode("g/1/agent", segment([5, 9, 9], sampled=2)),
    ]
    # log π_prox + 1 of tokens 6, 8 and 9: -0.15, 0.05 and 0.15; the threshold is of squares.
    ppo = config(loss=LossConfig(m2_threshold=0.01))
    made, _ = estimated(played, ppo)
    assert [own.gather("keep").tolist() for own in made.local] == [[0.0, 1.0], [0.0, 0.0]]
    made, _ = estimated(played, replace(ppo, loss=LossConfig(m2_threshold=0.1)))
    assert [own.gather("keep").tolist() for own in made.local] == [[1.0, 1.0], [1.0, 1.0]]
    made, _ = estimated(played, config())
    assert "keep" not in made.rows[0].fields


@pytest.mark.parametrize("kind", ["grpo", "reinforce"])
def test_trajectories_with_zero_advantage_are_excluded_from_updates_on_every_rank(
    kind: str,
) -> None:
    zero = group("a", [1.0, 1.0]) if kind == "grpo" else group("a", [0.0, 0.0])
    trajectories = zero + group("b", [-1.0, 2.0])
    sent = lambda rank: batch(trajectories, rank=rank, ranks=[0, 0, 1, 1])  # noqa: E731
    for rank, (_, (minibatch,)) in enumerate(on_two_ranks(config(kind), sent)):
        assert (minibatch.num_rows, minibatch.num_tokens) == (2, 7)
        assert len(minibatch.rows) == 2 * rank
        # The loss weight counts the excluded tokens, too.
        for row in minibatch.rows:
            assert row.fields["loss_weight"][0] == np.float32(1 / 6)


@pytest.mark.parametrize(
    "ppo",
    [
        config(loss=LossConfig(entropy_coef=0.01)),
        config(kl=KLConfig(coef=0.1, reference="initial")),
        config("gae"),
    ],
)
def test_trajectories_with_zero_advantage_stay_if_another_loss_term_has_a_gradient(
    ppo: PPOConfig,
) -> None:
    _, (minibatch,) = estimated(group("a", [1.0, 1.0]), ppo)
    assert (minibatch.num_rows, minibatch.num_tokens) == (2, 7)


def test_kl_in_the_reward_adds_no_gradient() -> None:
    kl = KLConfig(coef=0.1, place="reward", reference="initial")
    played = [episode(f"g/{i}/agent", segment([5, 6], sampled=1, reward=1.0)) for i in (0, 1)]
    _, (minibatch,) = estimated(played, config(kl=kl))
    assert minibatch.num_rows == 0


# ---------------------------------------------------------------- ranks


class TwoRanks(World):
    """One of two ranks in threads; `add` is a collective."""

    barrier = threading.Barrier(2, timeout=60.0)
    given: list[np.ndarray] = [np.zeros(0)] * 2

    def add(self, numbers: np.ndarray) -> np.ndarray:
        self.given[self.rank] = numbers
        self.barrier.wait()
        total = self.given[0] + self.given[1]
        self.barrier.wait()
        return total


def on_two_ranks(ppo: PPOConfig, sent: Any) -> list[tuple[TrainBatch, list[Minibatch]]]:
    def rank(index: int) -> tuple[TrainBatch, list[Minibatch]]:
        made = make_train_batch(*sent(index), ppo, rank=index, world_size=2)
        forward(made)
        return made, compute_advantages(made, ppo, TwoRanks(rank=index, size=2))

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(rank, (0, 1)))


SHAPED = {
    "reward": ShapingConfig(scale=0.3, overlong_buffer=3),
    "kl": KLConfig(coef=0.1, place="reward", reference="initial"),
    "loss": LossConfig(m2_threshold=0.01),
}


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("shaped", [{}, SHAPED])
@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo", "reinforce", "gae"])
def test_advantages_of_two_ranks_are_bitwise_equal_to_one_rank(
    kind: str, shaped: dict[str, Any], normalize: bool
) -> None:
    draw = np.random.default_rng(7)
    played: Trajectories = []
    for name in "abcd":
        for member in range(3):
            sizes = draw.integers(3, 8, size=int(draw.integers(1, 4)))
            parts = [
                segment(draw.integers(3, 60, n).tolist(), sampled=int(n) - 2, reward=draw.normal())
                for n in sizes
            ]
            cut = bool(draw.integers(2))
            played.append(episode(f"{name}/{member}/agent", *parts, truncated=cut))
    ppo = config(kind, advantage={"normalize": normalize}, **shaped)
    updates = [0] * 6 + [1] * 6
    whole, minibatches = estimated(played, ppo, minibatches=updates)
    ranks = draw.integers(0, 2, size=12).tolist()
    sent = lambda rank: batch(played, rank=rank, ranks=ranks, minibatches=updates)  # noqa: E731
    parts = on_two_ranks(ppo, sent)
    rows = {own.index: own.rows for made, _ in parts for own in made.local}
    for own in whole.local:
        for row, other in zip(own.rows, rows[own.index], strict=True):
            assert row.fields.keys() == other.fields.keys()
            for name, array in row.fields.items():
                assert np.array_equal(array, other.fields[name]), name
    for number, minibatch in enumerate(minibatches):
        both = [found[number] for _, found in parts]
        assert {each.num_tokens for each in both} == {minibatch.num_tokens}
        assert minibatch.num_tokens == sum(len(row.tokens) for each in both for row in each.rows)


UNSCORED = [
    config("grpo"),
    config("rloo", reward=ShapingConfig(scale=2.0, bias=0.5)),
    config("dr_grpo", advantage={"normalize": True}),
    config("dr_grpo", kl=KLConfig(coef=0.1, place="reward")),
    config("grpo", kl=KLConfig(coef=0.1, place="loss")),
    config("grpo", loss=LossConfig(m2_threshold=0.01)),
    config("grpo", loss=LossConfig(reduction="seq_mean_token_mean")),
    config("reinforce", advantage={"normalize": True}),
    config("gae", advantage={"normalize": True}),
]


@pytest.mark.parametrize("ppo", UNSCORED)
def test_trajectory_without_a_score_is_not_trained_and_changes_no_other(ppo: PPOConfig) -> None:
    expected, minibatches = estimated(group("g", [1.0, -1.0]), ppo)
    made, with_unscored = estimated(group("g", [1.0, -1.0, None]), ppo)
    *scored, unscored = made.local
    for got, due in zip(scored, expected.local, strict=True):
        assert got.rows[0].fields.keys() == due.rows[0].fields.keys()
        for name, values in due.rows[0].fields.items():
            np.testing.assert_array_equal(got.rows[0].fields[name], values, err_msg=name)
    assert [len(each.rows) for each in with_unscored] == [len(each.rows) for each in minibatches]
    assert with_unscored[0].num_tokens == minibatches[0].num_tokens
    assert made.scores == expected.scores
    (row,) = unscored.rows
    assert not row.loss_mask.any()
    for name in ("loss_weight", "advantages"):
        assert not row.fields[name].any(), name


@pytest.mark.parametrize("ppo", UNSCORED)
def test_batch_without_any_score_has_no_gradient(ppo: PPOConfig) -> None:
    _, minibatches = estimated(group("g", [None, None]), ppo)
    assert [each.num_rows for each in minibatches] == [0]
