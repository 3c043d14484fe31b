"""Turns a Batch and this rank's payloads into training rows, grouped by optimizer update.

Here meet the contracts on which training rests: exact tokens, the staleness bound, and weights of
the global batch. Everything that all ranks must agree on comes from the headers, which every rank
has, so no communication is needed. Shape letters: T = tokens of one row.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from arealite.algo.advantages import group_advantages
from arealite.algo.reduction import token_weights
from arealite.api.engine import Sequence
from arealite.api.trainer import PPOConfig
from arealite.api.trainer_messages import Batch
from arealite.api.trajectory import Segment, TrajectoryHeader, decode_segments
from arealite.base.errors import InvariantError


@dataclass(frozen=True)
class Minibatch:
    """What one optimizer update needs of this rank."""

    rows: list[Sequence]
    """Rows with a gradient: a trajectory whose advantage is 0 is left out on all ranks."""
    all_lengths: list[list[int]]
    """Lengths of the rows of every rank."""


@dataclass(frozen=True)
class TrainBatch:
    """Batch `step` as this rank trains it."""

    step: int
    headers: list[TrajectoryHeader]
    rows: list[Sequence]
    """All of this rank's segments, in the headers' order."""
    versions: list[np.ndarray]
    """int32 [T] a row; which policy version sampled each token, -1 elsewhere."""
    all_lengths: list[list[int]]
    minibatches: list[Minibatch]
    waits: dict[str, float]
    entropies: list[np.ndarray]
    """float32 [T] a row, from the proximal pass; [] before it."""


def make_train_batch(
    batch: Batch, payloads: Seq[bytes], config: PPOConfig, *, rank: int, world_size: int
) -> TrainBatch:
    """Decode, check and weigh batch `batch.step` for one rank.

    Raises:
        InvariantError: a payload is missing or differs from its header, or a token is too old.
    """
    owned = [i for i, owner in enumerate(batch.ranks) if owner == rank]
    if sorted(batch.mine) != owned or len(payloads) != len(owned):
        raise InvariantError(
            f"batch {batch.step} brought rank {rank} the {len(payloads)} payloads of trajectories "
            f"{batch.mine}, but it owns {owned}"
        )
    kind, eps = config.advantage.type, config.advantage.eps
    rewards = [header.reward for header in batch.headers]
    groups = [(header.group_id, header.seat) for header in batch.headers]
    advantages = group_advantages(rewards, groups, kind=kind, eps=eps)
    weights = _token_weights(batch, config)
    rows: list[tuple[int, Sequence]] = []
    versions: list[np.ndarray] = []
    for index, payload in sorted(zip(batch.mine, payloads, strict=True)):
        header = batch.headers[index]
        for segment in _segments(header, payload):
            row = _row(segment, header, advantage=advantages[index], weight=weights[index])
            versions.append(np.frombuffer(segment.versions, "<i4"))
            _bound_staleness(row, versions[-1], header, step=batch.step, config=config)
            rows.append((index, row))
    minibatches: list[Minibatch] = []
    for update in sorted(set(batch.minibatches)):
        owners = enumerate(batch.minibatches)
        trained = {i for i, owner in owners if owner == update and advantages[i] != 0.0}
        lengths = _all_lengths(batch, trained, world_size)
        minibatches.append(Minibatch([row for i, row in rows if i in trained], lengths))
    return TrainBatch(
        step=batch.step,
        headers=batch.headers,
        rows=[row for _, row in rows],
        versions=versions,
        all_lengths=_all_lengths(batch, set(range(len(batch.headers))), world_size),
        minibatches=minibatches,
        waits=batch.waits,
        entropies=[],
    )


def _token_weights(batch: Batch, config: PPOConfig) -> list[float]:
    """Return each trajectory's weight of a token; a sequence is a trajectory of the minibatch."""
    weights = [0.0] * len(batch.headers)
    divisor = float(config.collector.sampling.max_new_tokens)
    for update in set(batch.minibatches):
        members = [i for i, owner in enumerate(batch.minibatches) if owner == update]
        lengths = [batch.headers[i].trained_tokens for i in members]
        found = token_weights(config.loss.reduction, lengths, divisor=divisor)
        for i, weight in zip(members, found, strict=True):
            weights[i] = weight
    return weights


def _all_lengths(batch: Batch, wanted: set[int], world_size: int) -> list[list[int]]:
    lengths: list[list[int]] = [[] for _ in range(world_size)]
    for i, header in enumerate(batch.headers):
        if i in wanted:
            lengths[batch.ranks[i]].extend(header.segment_lengths)
    return lengths


def _segments(header: TrajectoryHeader, payload: bytes) -> list[Segment]:
    segments = decode_segments(payload)
    lengths = [len(segment.tokens) // 4 for segment in segments]
    trained = sum(segment.loss_mask.count(1) for segment in segments)
    if lengths != header.segment_lengths or trained != header.trained_tokens:
        raise InvariantError(
            f"trajectory {header.trajectory_id}: its payload has segments of {lengths} tokens, "
            f"{trained} of them sampled; its header says {header.segment_lengths} and "
            f"{header.trained_tokens}"
        )
    return segments


def _row(
    segment: Segment, header: TrajectoryHeader, *, advantage: float, weight: float
) -> Sequence:
    tokens_T = np.frombuffer(segment.tokens, "<i4")
    mask_T = np.frombuffer(segment.loss_mask, np.uint8).astype(bool)
    behav_T = np.frombuffer(segment.logprobs, "<f4")
    if not len(tokens_T) == len(mask_T) == len(behav_T) == len(segment.versions) // 4:
        raise InvariantError(f"trajectory {header.trajectory_id}: its arrays differ in length")
    if mask_T[:1].any() or not np.isfinite(behav_T[mask_T]).all():
        raise InvariantError(
            f"trajectory {header.trajectory_id}: a sampled token has no prefix or finite logprob"
        )
    fields = {
        "behav_logprobs": behav_T,
        "advantages": np.full(len(tokens_T), advantage, np.float32),
        "loss_weight": np.full(len(tokens_T), weight, np.float32),
    }
    return Sequence(tokens_T, mask_T, segment.temperature, fields)


def _bound_staleness(
    row: Sequence, versions_T: np.ndarray, header: TrajectoryHeader, *, step: int, config: PPOConfig
) -> None:
    """Mask tokens older than `max_staleness`; under `pace` and `drop` there are none."""
    old_T = row.loss_mask & (versions_T < step - config.max_staleness)
    if not old_T.any():
        return
    if config.staleness_policy == "mask":
        row.loss_mask = row.loss_mask & ~old_T
        return
    oldest = int(versions_T[old_T].min())
    raise InvariantError(
        f"trajectory {header.trajectory_id} brought tokens of version {oldest} to step {step}: "
        f"staleness {step - oldest} is above max_staleness {config.max_staleness}, which "
        f"staleness_policy={config.staleness_policy} promised to keep"
    )
