"""Messages between trainer ranks, the launcher and the datapipe, over ZeroMQ.

A sender repeats a request until it is answered. Its step or id makes it idempotent.
"""

import msgspec

from arealite.api.trajectory import Count, Ranks, TrajectoryHeader


class TrainerStart(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Rank 0 begins at `step` (0 or a checkpoint's); the datapipe rolls back later steps.
    Answer: TrainerReady."""

    step: Count
    world_size: Count
    ticket: Count = 0
    """0 requests a Ticket, whose number the sender then uses. The newest ticket wins."""


class TrainerRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Base of later requests. The datapipe ignores a request without the newest ticket."""

    ticket: Count = 0
    """Ticket of the TrainerStart of the sender's job."""


class BatchRequest(TrainerRequest, frozen=True, tag=True, kw_only=True):
    """A rank requests its shard of batch `step`. Answer: Batch, until then Waiting."""

    step: Count
    rank: Count
    world_size: Ranks


class StepReport(TrainerRequest, frozen=True, tag=True, kw_only=True):
    """Rank 0: the ranks have trained batch `step`. Answer: Done."""

    step: Count
    trained: list[str]
    """Ids of the trained trajectories; the audit compares them with the ledger."""
    metrics: dict[str, float]
    ranks: Count = 1
    """World size of the trainer."""
    fingerprint: str = ""
    """`TrainEngine.fingerprint` after the step, for replay; "" if it was not computed."""


class Published(TrainerRequest, frozen=True, tag=True, kw_only=True):
    """Rank 0: every server that gets requests has confirmed `version`. Answer: Done."""

    version: Count
    proof: str = ""
    """`PolicyProof.record`: which weights were sent, for the ledger; "" without one."""


class Checkpointed(TrainerRequest, frozen=True, tag=True, kw_only=True):
    """Rank 0: a checkpoint with all steps below `step` is durable at `path`. Answer: Done."""

    step: Count
    path: str


class Unusable(TrainerRequest, frozen=True, tag=True, kw_only=True):
    """A rank cannot train some groups of batch `step`. Answer: Done, after their removal."""

    step: Count
    groups: dict[str, str]
    """The error of each group, by group id."""


class EvalRequest(TrainerRequest, frozen=True, tag=True, kw_only=True):
    """Rank 0: evaluate the held-out set during training. Answer: EvalResult, until then Waiting."""

    eval_id: Count
    """The step of the request."""


class Finish(TrainerRequest, frozen=True, tag=True, kw_only=True):
    """Rank 0: training ends; the datapipe drains the workers and exits. Answer: Done."""

    reason: str


class Ticket(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Answers a TrainerStart with ticket 0."""

    number: Count
    """Larger than every earlier ticket."""


class TrainerReady(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The ledger is at `step`. Answers TrainerStart."""

    step: Count
    rolled_back_groups: Count


class Batch(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Batch `step`, for one rank. The payloads of `mine` follow (`payloads.to_frames`)."""

    step: Count
    headers: list[TrajectoryHeader]
    """The whole batch, in the same order for all ranks; for group statistics."""
    ranks: list[Count]
    """The rank that trains each trajectory; same length as `headers`."""
    minibatches: list[Count]
    """The update (0 … updates - 1) that trains each trajectory; same length as `headers`."""
    mine: list[Count]
    """Indices into `headers` of the receiving rank's trajectories."""
    waits: dict[str, float]
    """Metrics of the datapipe while it composed the batch."""
    prompts: list[Count] = []
    """For each item of `mine`: the index of its prompt among the frames."""


class EvalResult(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Scores of evaluation `eval_id`."""

    eval_id: Count
    metrics: dict[str, float]


class Finished(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Answers BatchRequest after Finish: there is no further batch; checkpoint and exit."""

    reason: str


class Waiting(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Sent once a second until a request is answered; `detail` names the missing event."""

    request: str
    detail: str


class Done(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The effect of the request of type `request` is durable."""

    request: str


class Refused(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The request is invalid; the receiver stops the run with `reason`."""

    request: str
    reason: str


FromRank0 = StepReport | Published | Checkpointed | EvalRequest | Finish
FromTrainer = TrainerStart | BatchRequest | Unusable | FromRank0
ToTrainer = Ticket | TrainerReady | Batch | Finished | EvalResult | Waiting | Done | Refused
