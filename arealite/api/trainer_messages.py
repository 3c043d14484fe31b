"""What trainer ranks, the launcher and the datapipe say to each other over ZeroMQ.

Every request may be sent again until it is answered; the datapipe treats it by the step or id it
carries.
"""

from __future__ import annotations

import msgspec

from arealite.api.trajectory import TrajectoryHeader


class TrainerStart(msgspec.Struct, frozen=True, tag=True):
    """Rank 0 begins at `step` (0, or a checkpoint's); later steps in the ledger are rolled back.
    Answer: TrainerReady."""

    step: int
    world_size: int
    ticket: int = 0
    """0 asks for a Ticket; the request is sent again with its number. So of two trainers the one
    that began last is heard, however late comes what a dead one sent."""


class BatchRequest(msgspec.Struct, frozen=True, tag=True):
    """A rank wants its shard of batch `step`; it then holds policy version `step`. Answer: Batch,
    until then Waiting."""

    step: int
    rank: int
    world_size: int


class StepReport(msgspec.Struct, frozen=True, tag=True):
    """Rank 0: the optimizer has applied batch `step`. Answer: Done."""

    step: int
    trained: list[str]
    """Trajectory ids the ranks really trained on; the audit holds them against the ledger."""
    metrics: dict[str, float]
    ranks: int = 1
    """World size that trained it."""
    fingerprint: str = ""
    """Of all parameters after the step (`TrainEngine.fingerprint`); replay compares it. "" where it
    was not taken."""


class Published(msgspec.Struct, frozen=True, tag=True):
    """Rank 0: every server in traffic has confirmed `version`. Answer: Done."""

    version: int


class Checkpointed(msgspec.Struct, frozen=True, tag=True):
    """Rank 0: a checkpoint that holds steps < `step` is durable at `path`. Answer: Done."""

    step: int
    path: str


class EvalRequest(msgspec.Struct, frozen=True, tag=True):
    """Rank 0: run the held-out set beside training. Answer: EvalResult when finished, until then
    Waiting."""

    eval_id: int
    """The step it was asked at."""


class Finish(msgspec.Struct, frozen=True, tag=True):
    """Rank 0: training ends; answer every rank's BatchRequest with Finished, drain the workers,
    write the audit, exit. Answer: Done."""

    reason: str


class Ticket(msgspec.Struct, frozen=True, tag=True):
    """Answers TrainerStart without one."""

    number: int
    """Larger than all given before."""


class TrainerReady(msgspec.Struct, frozen=True, tag=True):
    """The ledger stands at `step`. Answers TrainerStart."""

    step: int
    rolled_back_groups: int


class Batch(msgspec.Struct, frozen=True, tag=True):
    """Batch `step`, for one rank. The payloads of `mine` follow as frames, in that order."""

    step: int
    headers: list[TrajectoryHeader]
    """The whole batch, in the order all ranks agree on; group statistics and token counts come
    from here."""
    ranks: list[int]
    """Which rank trains each header; same length as `headers`."""
    minibatches: list[int]
    """Which update of the step each header belongs to, 0 … updates - 1; same length as
    `headers`."""
    mine: list[int]
    """Indices into `headers` whose payloads follow."""
    waits: dict[str, float]
    """What the datapipe saw while the batch was filled: seconds by cause, buffered groups, drop
    counts."""


class EvalResult(msgspec.Struct, frozen=True, tag=True):
    """Scores of evaluation `eval_id`."""

    eval_id: int
    metrics: dict[str, float]


class Finished(msgspec.Struct, frozen=True, tag=True):
    """Answers BatchRequest after Finish: there will be no further batch; checkpoint and exit."""

    reason: str


class Waiting(msgspec.Struct, frozen=True, tag=True):
    """Sent once a second while a request cannot be answered: who is waited for."""

    request: str
    detail: str


class Done(msgspec.Struct, frozen=True, tag=True):
    """The request named by `request` is durable."""

    request: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The request breaks an invariant or cannot ever be answered; the receiver stops the run with
    `reason`."""

    request: str
    reason: str


# ---------------------------------------------------------------- launcher and audit → datapipe


FromTrainer = (
    TrainerStart | BatchRequest | StepReport | Published | Checkpointed | EvalRequest | Finish
)
ToTrainer = Ticket | TrainerReady | Batch | Finished | EvalResult | Waiting | Done | Refused
