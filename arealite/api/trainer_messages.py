"""Messages between trainer ranks, the launcher and the datapipe, over ZeroMQ.

A request is sent again until it is answered; its step or id makes it idempotent.
"""

from __future__ import annotations

import msgspec

from arealite.api.trajectory import Count, Ranks, TrajectoryHeader


class TrainerStart(msgspec.Struct, frozen=True, tag=True):
    """Rank 0 begins at `step` (0, or a checkpoint's); later steps in the ledger are rolled back.
    Answer: TrainerReady."""

    step: Count
    world_size: Count
    ticket: Count = 0
    """0 asks for a Ticket; the request is sent again with its number. The newest ticket wins."""


class TrainerRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Any later request; the datapipe ignores a request of another ticket than the newest."""

    ticket: Count = 0
    """The ticket of the TrainerStart that the sender's job began with."""


class BatchRequest(TrainerRequest, frozen=True, tag=True):
    """A rank asks for its shard of batch `step`. Answer: Batch, until then Waiting."""

    step: Count
    rank: Count
    world_size: Ranks


class StepReport(TrainerRequest, frozen=True, tag=True):
    """Rank 0: the optimizer has applied batch `step`. Answer: Done."""

    step: Count
    trained: list[str]
    """Trajectory ids the ranks really trained on; the audit holds them against the ledger."""
    metrics: dict[str, float]
    ranks: Count = 1
    """World size that trained it."""
    fingerprint: str = ""
    """`TrainEngine.fingerprint` after the step, for replay; "" where it was not taken."""


class Published(TrainerRequest, frozen=True, tag=True):
    """Rank 0: every server in traffic has confirmed `version`. Answer: Done."""

    version: Count


class Checkpointed(TrainerRequest, frozen=True, tag=True):
    """Rank 0: a checkpoint that holds steps < `step` is durable at `path`. Answer: Done."""

    step: Count
    path: str


class Unusable(TrainerRequest, frozen=True, tag=True):
    """A rank cannot train some groups of batch `step`. Answer: Done, once they are set aside."""

    step: Count
    groups: dict[str, str]
    """By group id: what is wrong with it."""


class EvalRequest(TrainerRequest, frozen=True, tag=True):
    """Rank 0: run the held-out set beside training. Answer: EvalResult, until then Waiting."""

    eval_id: Count
    """The step it was asked at."""


class Finish(TrainerRequest, frozen=True, tag=True):
    """Rank 0: training ends; send Finished to ranks, drain the workers, exit. Answer: Done."""

    reason: str


class Ticket(msgspec.Struct, frozen=True, tag=True):
    """Answers TrainerStart without one."""

    number: Count
    """Larger than all given before."""


class TrainerReady(msgspec.Struct, frozen=True, tag=True):
    """The ledger stands at `step`. Answers TrainerStart."""

    step: Count
    rolled_back_groups: Count


class Batch(msgspec.Struct, frozen=True, tag=True):
    """Batch `step`, for one rank. The payloads of `mine` follow as frames, in that order."""

    step: Count
    headers: list[TrajectoryHeader]
    """The whole batch, in the order all ranks agree on; group statistics come from here."""
    ranks: list[Count]
    """Which rank trains each header; same length as `headers`."""
    minibatches: list[Count]
    """Which update of the step trains each header, 0 … updates - 1; same length as `headers`."""
    mine: list[Count]
    """Indices into `headers` whose payloads follow."""
    waits: dict[str, float]
    """Metrics of the datapipe while the batch was filled."""


class EvalResult(msgspec.Struct, frozen=True, tag=True):
    """Scores of evaluation `eval_id`."""

    eval_id: Count
    metrics: dict[str, float]


class Finished(msgspec.Struct, frozen=True, tag=True):
    """Answers BatchRequest after Finish: there will be no further batch; checkpoint and exit."""

    reason: str


class Waiting(msgspec.Struct, frozen=True, tag=True):
    """Sent once a second while a request cannot be answered; `detail` names what it waits for."""

    request: str
    detail: str


class Done(msgspec.Struct, frozen=True, tag=True):
    """The request named by `request` is durable."""

    request: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The request can never be answered; the receiver stops the run with `reason`."""

    request: str
    reason: str


FromRank0 = StepReport | Published | Checkpointed | EvalRequest | Finish
FromTrainer = TrainerStart | BatchRequest | Unusable | FromRank0
ToTrainer = Ticket | TrainerReady | Batch | Finished | EvalResult | Waiting | Done | Refused
