"""The decisions of the datapipe: messages in, effects out, without input or output of its own.

`receive` and `tick` change the state, queue writes in the ledger, and leave effects in `outbox`
(`effects.py`). The process of the datapipe (`datapipe.py`) performs them, commits the ledger, and
calls `begin_training` and `filter_groups` between two commits.
"""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from arealite.api.experiment_config import ExperimentConfig
from arealite.api.rollout_messages import Ack, Drain, Lease, Progress, Result, WorkerState
from arealite.api.trainer_messages import Checkpointed, Finish, FromTrainer, Refused
from arealite.api.turns import digest
from arealite.base import log
from arealite.base.errors import InvariantError
from arealite.system.datapipe.effects import (
    AuditLedger,
    FilterGroups,
    Outbox,
    Send,
    SendBatch,
    SendLease,
)
from arealite.system.datapipe.eval_scheduler import EvalScheduler
from arealite.system.datapipe.filtered import REPORTED_FROM, FilterWait
from arealite.system.datapipe.group_store import GroupStore
from arealite.system.datapipe.message_checks import DECODE_ERRORS, Intake, ResultIds, decode
from arealite.system.datapipe.trainer_request_handler import OutOfStep, TrainerRequestHandler
from arealite.system.datapipe.workers import Worker, Workers
from arealite.system.ledger.group import too_many_failures
from arealite.system.links import wire

logger = log.get(__name__)

WAITING_S = 1.0
"""Interval of the Waiting messages for unanswered requests."""
REFUSAL_S = 5.0
"""Time for which a failed datapipe keeps running to refuse the trainer's requests."""
DRAIN_S = 15.0
"""Time for which workers may send their remaining results after a Finish."""
SAVE_S = 600.0
"""Time for a trainer that was stopped during a wait to save and to send its last Finish."""
FINAL_CHECKPOINT_S = 5.0
"""After a Finish, time to wait for the checkpoint of the last steps."""


@dataclass(eq=False, kw_only=True)
class Machine:
    """Leases tasks, takes results, and composes batches of one trial."""

    config: ExperimentConfig
    store: GroupStore
    evals: EvalScheduler
    workers: Workers
    vocab_size: int
    """Number of token ids of the model."""

    def __post_init__(self) -> None:
        self.outbox = Outbox()
        self.requests = TrainerRequestHandler(
            store=self.store,
            evals=self.evals,
            config=self.config,
            outbox=self.outbox,
            workers=self.workers,
        )
        self.intake = Intake(
            store=self.store,
            evals=self.evals,
            workers=self.workers,
            rejections=self.requests.rejections,
            vocab_size=self.vocab_size,
        )
        now = time.monotonic()
        self.error: InvariantError | None = None
        """The error that stops the datapipe; None without one."""
        self._stopped_at = now
        """Time of the last Finish, or of the error that stops the datapipe."""
        self._last_result = now
        """Time at which the last result of a worker arrived."""
        self._last_waiting = now
        """Time of the last Waiting messages."""
        self._filter_wait = FilterWait()
        self._restore()

    def _restore(self) -> None:
        """Assign leases from before a restart to their workers, which may still run them."""
        for group in self.store.groups.values():
            for lease in list(group.leases.values()):
                unfinished = group.unfinished(lease)
                if not unfinished:
                    self.store.end_lease(lease)
                    continue
                active = self.workers.assign(group.owners[lease.lease_id], lease, unfinished)
                active.sent_at = -math.inf  # an earlier process sent it: it arrived or is lost

    # ------------------------------------------------------------ inputs

    def receive(self, frames: Sequence[bytes]) -> None:
        """Handle a message: the route of its sender, the message, and its payloads."""
        route = frames[0]
        try:
            message, message_error = decode(frames[1])
        except (*DECODE_ERRORS, IndexError) as error:
            self._reject(frames, error)
            return
        try:
            match message:
                case Result() | ResultIds():
                    self._take_result(frames, message, message_error)
                case WorkerState():
                    self._take_state(route, message)
                case Progress():
                    self.intake.take_progress(message, frames[2:])
                    self.outbox.after_commit(None)
                case _:
                    self._take_request(route, message)
            self._lease_and_batch()
        except InvariantError as error:
            self.stop(error)
        except Exception as error:  # noqa: BLE001  (a socket callback: no caller catches it)
            self.stop(InvariantError(f"{type(message).__name__} could not be handled: {error!r}"))

    def tick(self, now: float) -> None:
        """End late leases, check for a stall, and answer what became due.

        Args:
            now: Monotonic time.
        """
        for worker, leases in self.workers.expire():
            logger.warning(
                "worker silent",
                worker=worker.worker_id,
                leases=len(leases),
            )
            self._release(leases, is_lost=True)
        self._check_stall(now)
        if now - self._last_waiting >= WAITING_S and self.error is None:
            self._last_waiting = now
            self.requests.send_waiting()
        self._lease_and_batch()

    def begin_training(self) -> None:
        """Accept the pending start of a trainer; called between two commits of the ledger.

        Raises:
            InvariantError: The run's first start contradicts the ledger.
        """
        self.requests.begin_training()

    def filter_groups(self, effect: FilterGroups) -> None:
        """Filter the unusable groups of a batch; called between two commits of the ledger."""
        self.requests.filter_groups(effect)

    def stop(self, error: InvariantError) -> None:
        """Refuse the trainer's requests with an error from now on; the first error counts."""
        if self.error is None:
            logger.error("datapipe stops", reason=str(error))
            self.error = error
            self._stopped_at = time.monotonic()
            self.requests.refuse(str(error))

    def close(self) -> None:
        """End the wait that the run's diagnosis shows for filtered groups."""
        self._filter_wait.report("")

    def is_over(self, now: float) -> bool:
        """Return whether the run is finished, or the datapipe has refused requests long enough."""
        since_stop_s = now - self._stopped_at
        if self.error is not None:
            return since_stop_s > REFUSAL_S
        finish = self.requests.finish
        if finish is None:
            return False
        if self.workers.by_id and since_stop_s < DRAIN_S:
            return False
        if finish.reason == wire.STOP_WAITING:
            return since_stop_s > SAVE_S
        needs_checkpoint = bool(self.store.trained)
        since_request_s = now - self.requests.last_request
        return not needs_checkpoint or since_request_s > FINAL_CHECKPOINT_S

    # ------------------------------------------------------------ messages

    def _reject(self, frames: Sequence[bytes], error: Exception) -> None:
        """Count an unreadable message, and acknowledge it if its sender is a worker."""
        route = frames[0]
        self.requests.rejections.record(route.hex(), str(error))
        if any(worker.route == route for worker in self.workers.by_id.values()):
            first_frame = frames[1] if len(frames) > 1 else b""
            self.outbox.send(route, Ack(digest=digest(first_frame)))

    def _take_state(self, route: bytes, state: WorkerState) -> None:
        ended, to_resend = self.workers.update(route, state)
        self._release(ended, is_lost=state.capacity > 0)
        for active in to_resend:
            logger.warning(
                "lease sent again",
                worker=state.worker_id,
                lease=active.lease.lease_id,
            )
            worker = self.workers.by_id[state.worker_id]
            self.outbox.perform(SendLease(worker=worker, active=active))
        if self.requests.finish is not None:
            self.outbox.send(route, Drain(reason=self.requests.finish.reason))
        self.outbox.send(route, Ack(digest=b""))

    def _take_result(
        self,
        frames: Sequence[bytes],
        result: Result | ResultIds,
        message_error: str,
    ) -> None:
        if self.error is not None:
            return  # never acknowledged, so the worker keeps it
        self.intake.take(result, frames[2:], message_error)
        self._last_result = time.monotonic()
        self.requests.changed = True
        # An invalid result is acknowledged too: otherwise its worker would resend it forever.
        acknowledgement = Ack(digest=digest(frames[1]))
        self.outbox.after_commit(Send(route=frames[0], message=acknowledgement))
        failure_report = too_many_failures(
            self.store.failed_window,
            self.store.first_failure,
            share=self.config.datapipe.max_failed_share,
        )
        if failure_report:
            raise InvariantError(failure_report)

    def _take_request(self, route: bytes, request: FromTrainer) -> None:
        try:
            if self.error is not None:
                raise self.error
            if not self.requests.take(route, request):
                return
        except InvariantError as error:
            refusal = Refused(request=wire.request_name(request), reason=str(error))
            self.outbox.send(route, refusal)
            if not isinstance(error, OutOfStep):
                raise
            self.requests.rejections.record(route.hex(), str(error))
            return
        if isinstance(request, Checkpointed):
            self.outbox.after_commit(AuditLedger())
        if isinstance(request, Finish):
            self._stopped_at = time.monotonic()
            self._drain_workers(request.reason)

    def _drain_workers(self, reason: str) -> None:
        for worker in self.workers.by_id.values():
            if worker.route is not None:
                self.outbox.send(worker.route, Drain(reason=reason))

    # ------------------------------------------------------------ leases and batches

    def _lease_and_batch(self) -> None:
        """Grant leases, compose the next batch, and answer the requests that can be answered."""
        self._check_filtered()
        if self.error is not None:
            return
        self.requests.accept_pending_start()
        if self.requests.finish is None:
            self._grant_leases()
        self.requests.answer_evals()
        for route, request in self.requests.take_ready():
            self.outbox.after_commit(SendBatch(route=route, request=request), hurry=True)

    def _grant_leases(self) -> None:
        """Lease members to the most idle workers, and send each lease once it is durable."""
        while (worker := self.workers.most_idle()) is not None:
            lease = self._next_lease(worker)
            if lease is None:
                return
            active = self.workers.assign(worker.worker_id, lease, lease.members)
            self.outbox.after_commit(SendLease(worker=worker, active=active))

    def _next_lease(self, worker: Worker) -> Lease | None:
        """Return the next lease, of an evaluation if one is due; None if no lease is due."""
        version = self.store.version
        if version is None:
            return None
        credit = worker.credit
        lease = self.evals.lease(
            boot=self.store.ledger.boot,
            version=version,
            credit=credit,
        )
        if lease is not None:
            return lease
        group = self.store.next_group()
        if group is None:
            return None
        return self.store.lease(
            group,
            worker_id=worker.worker_id,
            credit=credit,
        )

    def _release(self, leases: Iterable[Lease], *, is_lost: bool) -> None:
        """End leases that workers will not finish; if `is_lost`, count a failed attempt."""
        for lease in leases:
            self.evals.release(lease, is_lost=is_lost)
            self.store.end_lease(lease, is_lost=is_lost)
            self.requests.changed = True

    # ------------------------------------------------------------ limits

    def _check_stall(self, now: float) -> None:
        """Stop if the trainer waits and no episode finished for `datapipe.stall_timeout_s`."""
        if not self.requests.is_waiting or self.error is not None:
            return
        limit_s = self.config.datapipe.stall_timeout_s
        stalled_s = now - max(self._last_result, self.requests.waiting_since)
        if stalled_s > limit_s:
            error = InvariantError(
                f"no episode finished for {limit_s:.0f} s (datapipe.stall_timeout_s): "
                f"{self.workers.describe()}"
            )
            self.stop(error)

    def _check_filtered(self) -> None:
        """Report groups that are filtered in a row; stop at `datapipe.max_filtered_groups`.

        After a resume, the count of the earlier trainer lasts until the new trainer starts.
        """
        filtered = self.store.filtered
        limit = self.config.datapipe.max_filtered_groups
        has_trainer = self.requests.has_trainer
        is_reported = has_trainer and filtered.length >= REPORTED_FROM
        self._filter_wait.report(filtered.describe() if is_reported else "")
        if has_trainer and 0 < limit <= filtered.length:
            reason = f"{filtered.describe()} (datapipe.max_filtered_groups={limit})"
            self.stop(InvariantError(reason))
