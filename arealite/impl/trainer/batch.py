"""Turns a Batch and this rank's payloads into training rows, and rows into minibatches.

Here meet the contracts on which training rests: exact tokens, the staleness bound, and weights of
the global batch. Everything that all ranks must agree on comes from the headers, which every rank
has, so no communication is needed. Shape letters: T = tokens of one row, N = tokens that the policy
sampled in one trajectory, over all its rows.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from arealite.algo.reduction import token_weights
from arealite.api.engine import Sequence
from arealite.api.trainer import PPOConfig
from arealite.api.trainer_messages import Batch
from arealite.api.trajectory import Segment, TrajectoryHeader, decode_segments
from arealite.base import log
from arealite.base.errors import InvariantError
from arealite.impl.trainer.world import World
from arealite.system.ledger.payloads import unlike
from arealite.system.links.trainer_link import TrainerLink

logger = log.get(__name__)


class Unusable(InvariantError):
    """Groups of a batch cannot be trained; `groups` has the error of each, by id."""

    def __init__(self, text: str, groups: dict[str, str]) -> None:
        super().__init__(text)
        self.groups = groups


@dataclass(frozen=True)
class Minibatch:
    """What one optimizer update needs of this rank."""

    rows: list[Sequence]
    all_lengths: list[list[int]]
    """Lengths of the rows of every rank."""


@dataclass
class Owned:
    """A trajectory whose payload is here: a row for each of its segments, in their order."""

    index: int
    """In the batch's headers."""
    rows: list[Sequence]
    sampled: list[np.ndarray]
    """bool [T] a row: tokens of the policy. The loss mask is that, less what is too old."""
    versions: list[np.ndarray]
    """int32 [T] a row; which policy version sampled each token, -1 elsewhere."""
    rewards: list[np.ndarray]
    """float32 [T] a row, as they were received."""
    bootstrap: float = 0.0
    """The critic's value of the state after a truncated episode."""

    def pick(self, name: str) -> np.ndarray:
        """Return a field of the sampled tokens, float64 [N]."""
        arrays = [row.fields[name][mask] for row, mask in zip(self.rows, self.sampled, strict=True)]
        return np.concatenate(arrays).astype(np.float64)

    def lay(self, name: str, values_N: np.ndarray | float) -> None:
        """Make a value of each sampled token, or one of all tokens, a field of the rows."""
        begin = 0
        for row, mask in zip(self.rows, self.sampled, strict=True):
            if not isinstance(values_N, np.ndarray):
                row.fields[name] = np.full(len(mask), values_N, np.float32)
                continue
            row.fields[name] = laid = np.zeros(len(mask), np.float32)
            end = begin + np.count_nonzero(mask)
            laid[mask] = values_N[begin:end]
            begin = end

    @property
    def rewards_N(self) -> np.ndarray:
        """Return what each sampled token received, float64; a turn's without tokens goes before."""
        mask = np.concatenate(self.sampled)
        place = np.maximum(np.cumsum(mask) - 1, 0)
        return np.bincount(place, np.concatenate(self.rewards), np.count_nonzero(mask))

    @property
    def trained_N(self) -> np.ndarray:
        """Which sampled tokens are in the loss."""
        parts = zip(self.rows, self.sampled, strict=True)
        return np.concatenate([row.loss_mask[mask] for row, mask in parts])

    def turns(self) -> list[tuple[int, int]]:
        """List (index of its last token in N, length) of each run of sampled tokens."""
        found, before = list[tuple[int, int]](), 0
        for mask in self.sampled:
            edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
            for length in (edges[1::2] - edges[::2]).tolist():
                before += length
                found.append((before - 1, length))
        return found


@dataclass
class TrainBatch:
    """Batch `step` as this rank trains it."""

    plan: Batch
    owned: list[Owned]
    """In the headers' order."""
    world_size: int
    scores: list[float] = field(default_factory=list)
    """Shaped reward of each owned trajectory; [] where rewards count as they came."""

    @property
    def step(self) -> int:
        """Also the version that is trained."""
        return self.plan.step

    @property
    def headers(self) -> list[TrajectoryHeader]:
        """Of the whole batch."""
        return self.plan.headers

    @property
    def rows(self) -> list[Sequence]:
        """All rows of this rank."""
        return [row for own in self.owned for row in own.rows]

    @property
    def all_lengths(self) -> list[list[int]]:
        """Lengths of all rows of every rank."""
        return self.lengths(range(len(self.headers)))

    def lengths(self, wanted: Collection[int], *, longer: Collection[int] = ()) -> list[list[int]]:
        """Return row lengths of the `wanted` trajectories of every rank.

        The last rows of the `longer` ones count one token more.
        """
        lengths: list[list[int]] = [[] for _ in range(self.world_size)]
        for i in wanted:
            mine = lengths[self.plan.ranks[i]]
            mine.extend(self.headers[i].segment_lengths)
            mine[-1] += i in longer
        return lengths

    def fill(self, name: str, arrays: Seq[np.ndarray]) -> None:
        """Make an engine's output a field of the rows."""
        for row, values_T in zip(self.rows, arrays, strict=True):
            row.fields[name] = values_T

    def minibatches(self, moving: Collection[int]) -> list[Minibatch]:
        """Cut the batch into its updates, of the `moving` trajectories alone."""
        found = list[Minibatch]()
        for update in sorted(set(self.plan.minibatches)):
            owners = enumerate(self.plan.minibatches)
            trained = {i: None for i, owner in owners if owner == update and i in moving}
            rows = [row for own in self.owned if own.index in trained for row in own.rows]
            found.append(Minibatch(rows, self.lengths(trained)))
        return found


def make_rows(
    batch: Batch, payloads: list[bytes], config: PPOConfig, *, world: World, link: TrainerLink
) -> TrainBatch | None:
    """Return this rank's rows; None on every rank if any rank has a group that it cannot train.

    After None, the datapipe has set the groups aside: ask for the batch again.
    """
    made, groups = None, dict[str, str]()
    try:
        made = make_train_batch(batch, payloads, config, rank=world.rank, world_size=world.size)
    except Unusable as error:
        groups = error.groups
        logger.error("batch cannot be trained", step=batch.step, error=str(error))
    if not world.any(made is None):
        return made
    if groups:
        link.set_aside(batch.step, groups)
    world.any(True)  # all ranks have told the datapipe before one asks again
    return None


def make_train_batch(
    batch: Batch, payloads: Seq[bytes], config: PPOConfig, *, rank: int, world_size: int
) -> TrainBatch:
    """Decode, check and weigh batch `batch.step` for one rank.

    Raises:
        Unusable: payloads differ from their headers.
        InvariantError: a payload is missing, or a token is too old.
    """
    owned = [i for i, owner in enumerate(batch.ranks) if owner == rank]
    if sorted(batch.mine) != owned or len(payloads) != len(owned):
        raise InvariantError(
            f"batch {batch.step} brought rank {rank} the {len(payloads)} payloads of trajectories "
            f"{batch.mine}, but it owns {owned}"
        )
    wrong = {
        header.group_id: what
        for index, payload in zip(batch.mine, payloads, strict=True)
        if (what := unlike(header := batch.headers[index], payload))
    }
    if wrong:
        raise Unusable(f"batch {batch.step}: groups unlike their headers: {wrong}", wrong)
    weights = _token_weights(batch, config)
    made = TrainBatch(batch, [], world_size)
    for index, payload in sorted(zip(batch.mine, payloads, strict=True)):
        header, own = batch.headers[index], Owned(index, [], [], [], [])
        for segment in decode_segments(payload):
            row = _row(segment, weight=weights[index])
            own.rows.append(row)
            own.sampled.append(row.loss_mask)
            own.versions.append(np.frombuffer(segment.versions, "<i4"))
            own.rewards.append(np.frombuffer(segment.rewards, "<f4"))
            _bound_staleness(row, own.versions[-1], header, step=batch.step, config=config)
        made.owned.append(own)
    return made


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


def _row(segment: Segment, *, weight: float) -> Sequence:
    tokens_T = np.frombuffer(segment.tokens, "<i4")
    mask_T = np.frombuffer(segment.loss_mask, np.uint8).astype(bool)
    behav_T = np.frombuffer(segment.logprobs, "<f4")
    weight_T = np.full(len(tokens_T), weight, np.float32)
    fields = {"behav_logprobs": behav_T, "loss_weight": weight_T}
    return Sequence(tokens_T, mask_T, segment.temperature, fields)


def _bound_staleness(
    row: Sequence, versions_T: np.ndarray, header: TrajectoryHeader, *, step: int, config: PPOConfig
) -> None:
    """Mask tokens older than `max_staleness`; under `wait` and `drop` there are none."""
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
