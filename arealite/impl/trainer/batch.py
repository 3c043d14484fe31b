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

import numpy as np

from arealite.algo.reduction import token_weights
from arealite.api import trainer_messages as messages
from arealite.api.engine import Sequence
from arealite.api.payloads import decode_segments
from arealite.api.trainer import PPOConfig
from arealite.api.trainer_messages import Batch
from arealite.api.trajectory import Segment, TrajectoryHeader
from arealite.base import log
from arealite.base.errors import InvariantError
from arealite.impl.trainer.world import World
from arealite.system.ledger.payloads import find_mismatch
from arealite.system.links.trainer_link import TrainerLink

logger = log.get(__name__)


class Unusable(InvariantError):
    """Some groups of a batch cannot be trained; `groups` maps their ids to errors."""

    def __init__(self, text: str, groups: dict[str, str]) -> None:
        super().__init__(text)
        self.groups = groups


@dataclass(frozen=True)
class Minibatch:
    """The rows of one optimizer update on this rank."""

    rows: list[Sequence]
    num_rows: int
    """Number of rows on all ranks."""
    num_tokens: int
    """Number of tokens of these rows."""


@dataclass
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
    is_scored: bool = True
    """Whether its episode has a reward. Without one, no token is in the loss."""
    bootstrap: float = 0.0
    """The critic's value of the state after a truncated episode."""

    def gather(self, name: str) -> np.ndarray:
        """Return a field of all sampled tokens, float64 [N]."""
        arrays = [row.fields[name][mask] for row, mask in zip(self.rows, self.sampled, strict=True)]
        return np.concatenate(arrays).astype(np.float64)

    def scatter(self, name: str, values_N: np.ndarray | float) -> None:
        """Set a field of the rows from values of the sampled tokens, or from one value for all."""
        begin = 0
        for row, mask in zip(self.rows, self.sampled, strict=True):
            if not isinstance(values_N, np.ndarray):
                row.fields[name] = np.full(len(mask), values_N, np.float32)
                continue
            row.fields[name] = values_T = np.zeros(len(mask), np.float32)
            end = begin + np.count_nonzero(mask)
            values_T[mask] = values_N[begin:end]
            begin = end

    @property
    def rewards_N(self) -> np.ndarray:
        """The reward of each sampled token, float64.

        The reward of a turn without tokens is added to the sampled token before it.
        """
        mask = np.concatenate(self.sampled)
        place = np.maximum(np.cumsum(mask) - 1, 0)
        return np.bincount(place, np.concatenate(self.rewards), np.count_nonzero(mask))

    @property
    def trained_N(self) -> np.ndarray:
        """Whether each sampled token is in the loss, bool."""
        parts = zip(self.rows, self.sampled, strict=True)
        return np.concatenate([row.loss_mask[mask] for row, mask in parts])

    def turns(self) -> list[tuple[int, int]]:
        """List (index of its last token in N, length) of each run of sampled tokens."""
        found = list[tuple[int, int]]()
        before = 0
        for mask in self.sampled:
            edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
            for length in (edges[1::2] - edges[::2]).tolist():
                before += length
                found.append((before - 1, length))
        return found


@dataclass
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
        cut = {i for i, header in enumerate(self.headers) if header.truncated}
        rows: list[Sequence] = []
        for trajectory in self.local:
            pairs = zip(trajectory.rows, trajectory.sampled, strict=True)
            rows += [Sequence(row.tokens, mask_T, row.temperature) for row, mask_T in pairs]
            if trajectory.index in cut:
                last = rows[-1]
                last.tokens = np.append(last.tokens, last.tokens[-1:])
                last.loss_mask = np.append(last.loss_mask, True)
        return rows

    def store_values(self, values: Seq[np.ndarray]) -> None:
        """Set the field `values` of the rows from the critic's output for `critic_rows`."""
        begin = 0
        for trajectory in self.local:
            output = values[begin : begin + len(trajectory.rows)]
            for row, values_T in zip(trajectory.rows, output, strict=True):
                row.fields["values"] = values_T[: len(row.tokens)]
            if self.headers[trajectory.index].truncated:
                trajectory.bootstrap = float(output[-1][-1])
            begin += len(trajectory.rows)

    def minibatches(self, included: Collection[int]) -> list[Minibatch]:
        """Split the `included` trajectories into the minibatches of the batch's updates."""
        found = list[Minibatch]()
        for update in sorted(set(self.plan.minibatches)):
            numbered = enumerate(self.plan.minibatches)
            trained = {i: None for i, number in numbered if number == update and i in included}
            rows = [row for each in self.local if each.index in trained for row in each.rows]
            lengths = [length for i in trained for length in self.headers[i].segment_lengths]
            found.append(Minibatch(rows, len(lengths), sum(lengths)))
        return found


def make_rows(
    batch: Batch, payloads: list[bytes], config: PPOConfig, *, world: World, link: TrainerLink
) -> TrainBatch | None:
    """Return this rank's rows, or None on all ranks if any rank has a group that it cannot train.

    In that case the datapipe has removed these groups from the batch: request the batch again.
    """
    made = None
    groups = dict[str, str]()
    try:
        made = make_train_batch(batch, payloads, config, rank=world.rank, world_size=world.size)
    except Unusable as error:
        groups = error.groups
        logger.error("batch cannot be trained", step=batch.step, error=str(error))
    if not world.any(made is None):
        return made
    if groups:
        link.report(messages.Unusable(batch.step, groups))
    world.barrier()  # all ranks report to the datapipe before any rank requests the batch again
    return None


def make_train_batch(
    batch: Batch, payloads: Seq[bytes], config: PPOConfig, *, rank: int, world_size: int
) -> TrainBatch:
    """Decode and check the trajectories of one rank, and compute their token weights.

    Raises:
        Unusable: payloads differ from their headers.
        InvariantError: a payload is missing, or a token is too old.
    """
    owned = [i for i, owner in enumerate(batch.ranks) if owner == rank]
    if sorted(batch.mine) != owned or len(payloads) != len(owned):
        what = f"rank {rank} received {len(payloads)} payloads for trajectories {batch.mine}"
        raise InvariantError(f"batch {batch.step}: {what}, but it owns {owned}")
    wrong = {
        header.group_id: what
        for index, payload in zip(batch.mine, payloads, strict=True)
        if (what := find_mismatch(header := batch.headers[index], payload))
    }
    if wrong:
        raise Unusable(f"batch {batch.step}: payloads differ from their headers: {wrong}", wrong)
    weights = _token_weights(batch, config)
    made = TrainBatch(batch, [], world_size)
    for index, payload in sorted(zip(batch.mine, payloads, strict=True)):
        header = batch.headers[index]
        trajectory = Trajectory(index, [], [], [], [], is_scored=header.reward is not None)
        for segment in decode_segments(payload):
            row = _make_row(segment, weight=weights[index])
            trajectory.rows.append(row)
            trajectory.sampled.append(row.loss_mask)
            trajectory.versions.append(np.frombuffer(segment.versions, "<i4"))
            trajectory.rewards.append(np.frombuffer(segment.rewards, "<f4"))
            _enforce_staleness(row, trajectory.versions[-1], header, step=batch.step, config=config)
            if not trajectory.is_scored:
                row.loss_mask = np.zeros_like(row.loss_mask)
        made.local.append(trajectory)
    return made


def _token_weights(batch: Batch, config: PPOConfig) -> list[float]:
    """Return the weight of each trajectory's tokens within its minibatch.

    Unscored trajectories have the weight 0, and do not count.
    """
    weights = [0.0] * len(batch.headers)
    divisor = float(config.collector.sampling.max_new_tokens)
    for update in set(batch.minibatches):
        members = [i for i, owner in enumerate(batch.minibatches) if owner == update]
        headers = [batch.headers[i] for i in members]
        lengths = [0 if h.reward is None else h.trained_tokens for h in headers]
        found = token_weights(config.loss.reduction, lengths, divisor=divisor)
        for i, weight in zip(members, found, strict=True):
            weights[i] = weight
    return weights


def _make_row(segment: Segment, *, weight: float) -> Sequence:
    tokens_T = np.frombuffer(segment.tokens, "<i4")
    mask_T = np.frombuffer(segment.loss_mask, np.uint8).astype(bool)
    behav_T = np.frombuffer(segment.logprobs, "<f4")
    weight_T = np.full(len(tokens_T), weight, np.float32)
    fields = {"behav_logprobs": behav_T, "loss_weight": weight_T}
    routing = np.frombuffer(segment.routing, np.uint8).reshape(len(tokens_T), -1)
    experts = routing if routing.size else None
    return Sequence(tokens_T, mask_T, segment.temperature, fields, experts)


def _enforce_staleness(
    row: Sequence, versions_T: np.ndarray, header: TrajectoryHeader, *, step: int, config: PPOConfig
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
    what = f"trajectory {header.trajectory_id} has tokens of version {oldest} at step {step}"
    bound = f"staleness {step - oldest} is above max_staleness {config.max_staleness}"
    policy = f"staleness_policy={config.staleness_policy}"
    raise InvariantError(f"{what}: {bound}, which {policy} must prevent")
