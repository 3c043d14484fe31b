"""Makes training rows from a Batch and this rank's payloads, and minibatches from rows.

This module checks that payloads match their headers and that tokens keep the staleness bound. Token
weights are computed from the headers of the whole batch, which every rank has, so ranks need no
communication for them.
Shape letters: T = tokens of one row, N = tokens that the policy sampled in one trajectory, over all
its rows.
"""

from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from arealite.algo.reduction import token_weights
from arealite.api import trainer_messages as messages
from arealite.api.engine import Sequence
from arealite.api.payloads import Payload
from arealite.api.trainer import PPOConfig
from arealite.api.trainer_messages import Batch
from arealite.api.trajectory import Segment, TrajectoryHeader
from arealite.api.trajectory_tree import TrajectoryTree
from arealite.base import log
from arealite.base.errors import InvariantError
from arealite.impl.trainer.rank_group import World
from arealite.impl.trainer.top_token_rows import add_top_tokens, num_recorded
from arealite.system.ledger.payload_checks import decode_checked
from arealite.system.links.trainer_link import TrainerLink

logger = log.get(__name__)


class UnusableGroups(InvariantError):
    """Some groups of a batch cannot be trained; `groups` maps their ids to errors."""

    def __init__(self, message: str, groups: dict[str, str]) -> None:
        super().__init__(message)
        self.groups = groups


@dataclass(frozen=True, kw_only=True)
class Minibatch:
    """The rows of one optimizer update on this rank."""

    rows: list[Sequence]
    num_rows: int
    """Number of rows on all ranks."""
    num_tokens: int
    """Number of tokens of these rows."""


@dataclass(kw_only=True)
class Trajectory:
    """A trajectory that this rank trains: a row for each of its segments, in their order."""

    index: int
    """Position of its header in the batch."""
    rows: list[Sequence]
    sampled: list[np.ndarray]
    """bool [T] for each row: sampled tokens. The loss mask also excludes too old tokens, and those
    of unscored episodes."""
    versions: list[np.ndarray]
    """int32 [T] for each row: the policy version that sampled each token, -1 elsewhere."""
    rewards: list[np.ndarray]
    """float32 [T] for each row, as received."""
    segments: Seq[Segment] = ()
    """The segment of each row."""
    num_truncated: int = 0
    """Sampled tokens at which top_p, top_k, min_p or min_new_tokens excluded other tokens."""
    num_unknown: int = 0
    """Those of them whose set is not known, so that they are not in the loss."""
    is_scored: bool = True
    """Whether its episode has a reward. Without one, no token is in the loss."""
    bootstrap: float = 0.0
    """The critic's value of the state after a truncated episode."""

    def gather(self, name: str) -> np.ndarray:
        """Return a field of all sampled tokens, float64 [N]."""
        pairs = zip(self.rows, self.sampled, strict=True)
        sampled_parts = [row.fields[name][mask_T] for row, mask_T in pairs]
        return np.concatenate(sampled_parts).astype(np.float64)

    def scatter(self, name: str, values_N: np.ndarray | float) -> None:
        """Set a field of the rows from values of the sampled tokens, or from one value for all."""
        begin = 0
        for row, mask_T in zip(self.rows, self.sampled, strict=True):
            if not isinstance(values_N, np.ndarray):
                row.fields[name] = np.full(len(mask_T), values_N, np.float32)
                continue
            end = begin + np.count_nonzero(mask_T)
            values_T = np.zeros(len(mask_T), np.float32)
            values_T[mask_T] = values_N[begin:end]
            row.fields[name] = values_T
            begin = end

    @property
    def rewards_N(self) -> np.ndarray:
        """The reward of each sampled token, float64.

        The reward of a turn without tokens is added to the sampled token before it.
        """
        mask = np.concatenate(self.sampled)
        rewards = np.concatenate(self.rewards)
        sampled_before = np.cumsum(mask) - 1
        places = np.maximum(sampled_before, 0)
        return np.bincount(places, rewards, np.count_nonzero(mask))

    @property
    def trained_N(self) -> np.ndarray:
        """Whether each sampled token is in the loss, bool."""
        pairs = zip(self.rows, self.sampled, strict=True)
        return np.concatenate([row.loss_mask[mask_T] for row, mask_T in pairs])

    def turns(self) -> list[tuple[int, int]]:
        """List (index of its last token in N, length) of each run of sampled tokens."""
        turns = list[tuple[int, int]]()
        end = 0
        for mask_T in self.sampled:
            is_edge = np.diff(mask_T, prepend=False, append=False)
            edges = np.flatnonzero(is_edge)
            lengths = edges[1::2] - edges[::2]
            for length in lengths.tolist():
                end += length
                turns.append((end - 1, length))
        return turns


@dataclass(kw_only=True)
class TrainBatch:
    """Batch `step` on this rank."""

    plan: Batch
    local: list[Trajectory]
    """The trajectories that this rank trains, in the headers' order."""
    world_size: int
    scores: list[float] = field(default_factory=list)
    """Shaped reward of each scored local trajectory; [] where rewards are not shaped."""

    @property
    def step(self) -> int:
        """Index of the batch, which is also the policy version that is trained."""
        return self.plan.step

    @property
    def headers(self) -> list[TrajectoryHeader]:
        """Headers of the whole batch."""
        return self.plan.headers

    @property
    def rows(self) -> list[Sequence]:
        """All rows of this rank."""
        return [row for trajectory in self.local for row in trajectory.rows]

    def fill(self, name: str, arrays: Seq[np.ndarray]) -> None:
        """Set a field of the rows to an engine's output."""
        for row, values_T in zip(self.rows, arrays, strict=True):
            row.fields[name] = values_T

    def critic_rows(self) -> list[Sequence]:
        """Return the critic's rows, over all sampled tokens.

        The last row of a truncated episode has an additional token. Its value is the value of the
        state in which the episode was truncated.
        """
        rows: list[Sequence] = []
        for trajectory in self.local:
            for row, mask_T in zip(trajectory.rows, trajectory.sampled, strict=True):
                rows.append(
                    Sequence(tokens=row.tokens, loss_mask=mask_T, temperature=row.temperature)
                )
            if self.headers[trajectory.index].truncated:
                last = rows[-1]
                last.tokens = np.append(last.tokens, last.tokens[-1:])
                last.loss_mask = np.append(last.loss_mask, True)
        return rows

    def store_values(self, values: Seq[np.ndarray]) -> None:
        """Set the field `values` of the rows from the critic's output for `critic_rows`."""
        begin = 0
        for trajectory in self.local:
            end = begin + len(trajectory.rows)
            values_of_rows = values[begin:end]
            for row, values_T in zip(trajectory.rows, values_of_rows, strict=True):
                row.fields["values"] = values_T[: len(row.tokens)]
            if self.headers[trajectory.index].truncated:
                last_row_values = values_of_rows[-1]
                trajectory.bootstrap = float(last_row_values[-1])
            begin = end

    def minibatches(self, included: Collection[int]) -> list[Minibatch]:
        """Split the `included` trajectories into the minibatches of the batch's updates."""
        minibatches = list[Minibatch]()
        for update in sorted(set(self.plan.minibatches)):
            lengths = [
                length
                for index, header in enumerate(self.headers)
                if self.plan.minibatches[index] == update and index in included
                for length in header.segment_lengths
            ]
            rows = list[Sequence]()
            for trajectory in self.local:
                is_in_update = self.plan.minibatches[trajectory.index] == update
                if is_in_update and trajectory.index in included:
                    rows += trajectory.rows
            minibatch = Minibatch(
                rows=rows,
                num_rows=len(lengths),
                num_tokens=sum(lengths),
            )
            minibatches.append(minibatch)
        return minibatches


def make_rows(
    batch: Batch,
    payloads: list[Payload],
    config: PPOConfig,
    *,
    world: World,
    link: TrainerLink,
) -> TrainBatch | None:
    """Return this rank's rows, or None on all ranks if any rank has a group that it cannot train.

    In that case the datapipe has removed these groups from the batch: request the batch again.
    """
    train_batch = None
    groups = dict[str, str]()
    try:
        train_batch = make_train_batch(
            batch,
            payloads,
            config,
            rank=world.rank,
            world_size=world.size,
        )
    except UnusableGroups as error:
        groups = error.groups
        logger.error("batch cannot be trained", step=batch.step, error=str(error))
    if not world.any(train_batch is None):
        return train_batch
    if groups:
        link.report(messages.Unusable(step=batch.step, groups=groups))
    world.barrier()  # all ranks report to the datapipe before any rank requests the batch again
    return None


def make_train_batch(
    batch: Batch,
    payloads: Seq[Payload],
    config: PPOConfig,
    *,
    rank: int,
    world_size: int,
) -> TrainBatch:
    """Decode and check the trajectories of one rank, and compute their token weights.

    Raises:
        UnusableGroups: payloads differ from their headers.
        InvariantError: a payload is missing, or a token is too old.
    """
    owned = [i for i, owner in enumerate(batch.ranks) if owner == rank]
    if sorted(batch.mine) != owned or len(payloads) != len(owned):
        raise InvariantError(
            f"batch {batch.step}: rank {rank} received {len(payloads)} payloads "
            f"for trajectories {batch.mine}, but it owns {owned}"
        )
    mismatches = dict[str, str]()
    tree_of = dict[int, TrajectoryTree]()
    for index, payload in zip(batch.mine, payloads, strict=True):
        header = batch.headers[index]
        tree_of[index], mismatch = decode_checked(header, payload)
        if mismatch:
            mismatches[header.group_id] = mismatch
    if mismatches:
        raise UnusableGroups(
            f"batch {batch.step}: payloads differ from their headers: {mismatches}", mismatches
        )
    weights = _token_weights(batch, config)
    train_batch = TrainBatch(plan=batch, local=[], world_size=world_size)
    segments_of = {index: tree.segments() for index, tree in tree_of.items()}
    # All ranks need one width, also those whose rows have no record.
    widths = map(num_recorded, chain(*segments_of.values()))
    num_top = max(config.collector.sampling.top_logprobs, *widths, 0)
    for index in sorted(tree_of):
        trajectory = _make_trajectory(
            batch,
            index,
            segments_of[index],
            config,
            weight=weights[index],
            num_top=num_top,
        )
        train_batch.local.append(trajectory)
    return train_batch


def _make_trajectory(
    batch: Batch,
    index: int,
    segments: Seq[Segment],
    config: PPOConfig,
    *,
    weight: float,
    num_top: int,
) -> Trajectory:
    """Return trajectory `index` of the batch, whose tokens have the weight `weight`.

    Raises:
        InvariantError: a token is too old.
    """
    header = batch.headers[index]
    trajectory = Trajectory(
        index=index,
        rows=[],
        sampled=[],
        versions=[],
        rewards=[],
        segments=segments,
        is_scored=header.reward is not None,
    )
    for segment in segments:
        row = _make_row(segment, weight=weight)
        versions_T = np.frombuffer(segment.versions, "<i4")
        trajectory.rows.append(row)
        trajectory.sampled.append(row.loss_mask)
        trajectory.versions.append(versions_T)
        trajectory.rewards.append(np.frombuffer(segment.rewards, "<f4"))
        _enforce_staleness(
            row,
            versions_T,
            header,
            step=batch.step,
            config=config,
        )
        if not trajectory.is_scored:
            row.loss_mask = np.zeros_like(row.loss_mask)
        sets = add_top_tokens(row, segment, num_top)
        trajectory.num_truncated += sets.num_truncated
        trajectory.num_unknown += sets.num_unknown
    return trajectory


def _token_weights(batch: Batch, config: PPOConfig) -> list[float]:
    """Return the weight of each trajectory's tokens within its minibatch.

    Unscored trajectories have the weight 0, and do not count.
    """
    weights = [0.0] * len(batch.headers)
    divisor = float(config.collector.sampling.max_new_tokens)
    for update in set(batch.minibatches):
        indices = [i for i, number in enumerate(batch.minibatches) if number == update]
        headers = [batch.headers[i] for i in indices]
        lengths = [0 if header.reward is None else header.trained_tokens for header in headers]
        weights_of_update = token_weights(config.loss.reduction, lengths, divisor=divisor)
        for index, weight in zip(indices, weights_of_update, strict=True):
            weights[index] = weight
    return weights


def _make_row(segment: Segment, *, weight: float) -> Sequence:
    tokens_T = np.frombuffer(segment.tokens, "<i4")
    mask_T = np.frombuffer(segment.loss_mask, np.uint8).astype(bool)
    fields = {
        "behav_logprobs": np.frombuffer(segment.logprobs, "<f4"),
        "loss_weight": np.full(len(tokens_T), weight, np.float32),
    }
    routing_bytes = np.frombuffer(segment.routing, np.uint8)
    routing = routing_bytes.reshape(len(tokens_T), -1)
    return Sequence(
        tokens=tokens_T,
        loss_mask=mask_T,
        temperature=segment.temperature,
        fields=fields,
        routing=routing if routing.size else None,
    )


def _enforce_staleness(
    row: Sequence,
    versions_T: np.ndarray,
    header: TrajectoryHeader,
    *,
    step: int,
    config: PPOConfig,
) -> None:
    """Mask tokens older than `max_staleness`.

    Raises:
        InvariantError: the policy is `wait` or `drop`, which release no such token.
    """
    old_T = row.loss_mask & (versions_T < step - config.max_staleness)
    if not old_T.any():
        return
    if config.staleness_policy == "mask":
        row.loss_mask = row.loss_mask & ~old_T
        return
    oldest = int(versions_T[old_T].min())
    raise InvariantError(
        f"trajectory {header.trajectory_id} has tokens of version {oldest} at step {step}: "
        f"staleness {step - oldest} is above max_staleness {config.max_staleness}, "
        f"which staleness_policy={config.staleness_policy} must prevent"
    )
