"""Handles the requests of trainer ranks: records each in the ledger, then answers it.

A request may arrive several times, also after a restart of the datapipe. Its answer is the same
each time.
"""

import math
import os
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from arealite.algo.partition import batch_for_rank
from arealite.api import trainer_messages as messages
from arealite.api.experiment_config import ExperimentConfig, run_paths
from arealite.api.trainer_messages import BatchRequest, EvalRequest, FromTrainer, TrainerStart
from arealite.api.trajectory import TrajectoryHeader
from arealite.base import log
from arealite.base.errors import InvariantError
from arealite.system.datapipe.effects import BeginTraining, FilterGroups, Outbox, Send
from arealite.system.datapipe.eval_scheduler import EvalScheduler
from arealite.system.datapipe.group_store import GroupStore
from arealite.system.datapipe.idle_time import SHARE_WINDOW_S, IdleClock, slow_episodes
from arealite.system.datapipe.message_checks import Rejections
from arealite.system.datapipe.workers import Workers
from arealite.system.health import vitals
from arealite.system.ledger.group import Group
from arealite.system.ledger.ledger import meta_number
from arealite.system.links.wire import STOP_WAITING, request_name

logger = log.get(__name__)

TRAINER_ALIVE_S = 7.0
"""A trainer is alive if it sent a request within this time; it repeats a pending one every 5 s."""
TRAINER_GONE_S = 15.0
"""A trainer that sent no request for this long does not wait; its pending start is dropped."""
MAX_REASON = 50
"""Maximum length of the error in the reason of an unusable group, in characters."""
REPORT_SHARE = 0.2
"""Slow episodes are logged if the trainer waits for them for a larger share of the time."""


class OutOfStep(InvariantError):
    """A request does not match the ledger; its sender is faulty or stale, and only it must stop."""


@dataclass(eq=False, kw_only=True)
class TrainerRequestHandler:
    """Handles requests of the trainer, and stores requests that cannot be answered yet.

    The newest ticket wins. Each trainer begins with a TrainerStart and gets a ticket, which all its
    later requests carry; requests with an older ticket are refused. A start waits while the
    previous trainer is alive, so it cannot roll back a running trainer. A start that contradicts
    the ledger is refused; if it is the first start, it also stops the datapipe.
    """

    store: GroupStore
    evals: EvalScheduler
    config: ExperimentConfig
    outbox: Outbox
    workers: Workers

    def __post_init__(self) -> None:
        self.finish: messages.Finish | None = None
        self.last_request = -math.inf
        """Monotonic time of the trainer's last request; -inf before the first."""
        self.waiting_since = time.monotonic()
        """Monotonic time at which the trainer last began to wait for episodes."""
        self.rejections = Rejections()
        self.changed = True
        """Whether the state changed since the last attempt to compose a batch."""
        self._batch_requests: dict[int, tuple[bytes, BatchRequest]] = {}
        """By rank: ZeroMQ route of the rank, and its request."""
        self._eval_requests: dict[int, tuple[bytes, EvalRequest]] = {}
        self._start: tuple[bytes, TrainerStart] | None = None
        self._start_received = -math.inf
        self._ticket = meta_number(self.store.ledger.connection, "ticket")
        """Ticket of the current trainer."""
        self._issued = max(self.store.ledger.boot << 20, self._ticket)
        """The newest ticket issued to any trainer."""
        self._idle = IdleClock()
        self._reported = -math.inf
        """Monotonic time of the last warning about slow episodes."""
        self._waits: dict[int, dict[str, float]] = {}

    @property
    def is_waiting(self) -> bool:
        """Whether the trainer waits for episodes."""
        is_pending = self.finish is None and bool(self._batch_requests or self._eval_requests)
        return is_pending and time.monotonic() - self.last_request < TRAINER_GONE_S

    @property
    def has_trainer(self) -> bool:
        """Whether a trainer has sent a request to this process, and has not finished."""
        return self.finish is None and self.last_request > -math.inf

    def take(self, route: bytes, request: FromTrainer) -> bool:
        """Handle a request. Its answer is sent once its changes are durable.

        Args:
            route: ZeroMQ route of the sender.
            request: The request.

        Returns:
            False if the request was ignored, because its ticket was never issued.

        Raises:
            OutOfStep: it does not match the ledger, or its sender was replaced.
            InvariantError: it breaks a guarantee of the run.
        """
        if isinstance(request, TrainerStart):
            self._take_start(route, request)
            return True
        if 0 < request.ticket < self._ticket:
            raise OutOfStep("this trainer was replaced by a trainer that began later")
        has_current_ticket = request.ticket > 0 and request.ticket == self._ticket
        if not has_current_ticket:
            self.rejections.record(route.hex(), f"{request_name(request)} without a valid ticket")
            return False
        self.last_request = time.monotonic()
        self.changed = True
        match request:
            case BatchRequest():
                self._take_batch_request(route, request)
            case EvalRequest():
                self._take_eval_request(route, request)
            case messages.Unusable():
                effect = FilterGroups(route=route, request=request)
                self.outbox.after_commit(effect, hurry=True)
            case _:
                self._record(request)
                self._send_after_commit(route, messages.Done(request=request_name(request)))
        return True

    def _send_after_commit(self, route: bytes, answer: msgspec.Struct) -> None:
        """Send an answer once the queued writes are durable; commit them now."""
        self.outbox.after_commit(Send(route=route, message=answer), hurry=True)

    def _take_start(self, route: bytes, start: TrainerStart) -> None:
        if start.ticket == 0:
            self._issued += 1 + secrets.randbelow(1 << 19)  # hard to guess for other peers
            self.outbox.send(route, messages.Ticket(number=self._issued))
            return
        if start.ticket == self._ticket:
            self.outbox.send(route, messages.TrainerReady(step=start.step, rolled_back_groups=0))
            return
        lowest_ticket = self._ticket + 1
        if self._start is not None:
            _, pending = self._start
            lowest_ticket = pending.ticket
        if lowest_ticket <= start.ticket <= self._issued:
            self._start = (route, start)
            self._start_received = time.monotonic()
            self.accept_pending_start()

    def accept_pending_start(self) -> None:
        """Accept the pending start once the previous trainer has finished or is silent.

        A trainer that was stopped while it waited for a batch still saves its last steps, so it
        counts as alive.
        """
        now = time.monotonic()
        if now - self._start_received > TRAINER_GONE_S:
            self._start = None
        if self._start is None:
            return
        may_send_more = self.finish is None or self.finish.reason == STOP_WAITING
        is_alive = may_send_more and now - self.last_request < TRAINER_ALIVE_S
        if not is_alive:
            self.outbox.after_commit(BeginTraining(), hurry=True)

    def answer_evals(self) -> None:
        """Send the scores of finished evaluations after they are durable."""
        for eval_id, metrics in self.evals.take_finished():
            self.store.ledger.add_eval(eval_id, metrics)
            route, _ = self._eval_requests.pop(eval_id)
            self._send_after_commit(route, messages.EvalResult(eval_id=eval_id, metrics=metrics))

    def send_waiting(self) -> None:
        """Send a Waiting message, with the reason of the wait, for each pending request."""
        in_flight = self.workers.describe()
        self._log_slow_episodes()
        for route, request in self._batch_requests.values():
            detail = f"{self._describe(request.step)}, {in_flight}"
            self.outbox.send(route, messages.Waiting(request=request_name(request), detail=detail))
        if self._start is not None:
            route, start = self._start
            silent_s = time.monotonic() - self.last_request
            detail = f"the previous trainer, last request {silent_s:.1f} s ago"
            self.outbox.send(route, messages.Waiting(request=request_name(start), detail=detail))
        for eval_id, (route, request) in self._eval_requests.items():
            groups = self.evals.runs[eval_id]
            samples_left = sum(self.evals.samples_left(group) for group in groups)
            detail = f"evaluation {eval_id}: {samples_left} samples left, {in_flight}"
            self.outbox.send(route, messages.Waiting(request=request_name(request), detail=detail))

    def refuse(self, reason: str) -> None:
        """Refuse all pending requests, because the run stops."""
        pending: list[tuple[bytes, FromTrainer]] = [
            *self._batch_requests.values(),
            *self._eval_requests.values(),
        ]
        if self._start is not None:
            pending.append(self._start)
        for route, request in pending:
            self.outbox.send(route, messages.Refused(request=request_name(request), reason=reason))

    # ------------------------------------------------------------ batches

    def take_ready(self) -> list[tuple[bytes, BatchRequest]]:
        """Return and remove the batch requests that can be answered.

        Composes the next batch if it is requested and may be released.
        """
        if not (self._batch_requests and self.changed):
            return []
        self.changed = False
        pending = list(self._batch_requests.values())
        if any(request.step == self.store.next_step for _, request in pending):
            self._compose()
        ready: list[tuple[bytes, BatchRequest]] = []
        for route, request in pending:
            if request.step in self.store.batches:
                ready.append((route, request))
                del self._batch_requests[request.rank]
        return ready

    def shard(self, request: BatchRequest) -> messages.Batch:
        """Return one rank's shard of a composed batch; equal for equal batch and world size."""
        return batch_for_rank(
            request,
            _headers(self.store.batches[request.step]),
            updates=self.store.ppo.updates,
            seed=self.config.seed,
            waits=self._waits.get(request.step, {}),
        )

    def _compose(self) -> None:
        """Compose the next batch, and measure the wait for it; or note the cause of the wait."""
        step = self.store.next_step
        groups = self.store.compose()
        if groups is None:
            self._mark_idle()
            return
        self._idle.mark(None)
        metrics = self._metrics(step, groups)
        self._waits = {step: {name: float(number) for name, number in metrics.items()}}

    def _metrics(self, step: int, groups: Sequence[Group]) -> dict[str, float]:
        """Return the metrics of a composed batch; those of time are since the last batch."""
        store = self.store
        oldest_allowed = step - store.ppo.max_staleness
        num_stale = sum(header.oldest_version < oldest_allowed for header in _headers(groups))
        filtered_counts = {
            re.sub("[: ]", "_", state): count
            for state, count in store.counts.items()
            if ":" in state  # filtered:<reason>
        }
        stale_counts = {
            f"stale_below_{num_tokens}": count
            for num_tokens, count in store.dropped_lengths.items()
        }
        return {
            **self._idle.take(),
            "slow_episodes_wait_share": self._idle.slow_share,
            "ledger_busy_s": store.ledger.take_busy_s(),
            "buffered_groups": store.counts["complete"],
            "leased_groups": store.counts["leased"],
            "late_results": store.late_results,
            "stale_trajectories": num_stale,
            "rejected_messages": self.rejections.total(),
            **filtered_counts,
            **stale_counts,
            "loop_lag_max_s": vitals.lag_max_s(),
            **self.workers.metrics(),
            **store.sampler.metrics(),
        }

    def _mark_idle(self) -> None:
        """Set the cause of the trainer's wait: groups, slow_episodes (a full batch waits), or None.

        The time in which an earlier batch is trained is not idle, even if a rank requests the next.
        """
        store = self.store
        is_idle = bool(self._batch_requests) and store.num_trained_steps() == store.next_step
        if not is_idle:
            self._idle.mark(None)
        elif store.counts["complete"] >= store.ppo.num_groups:
            self._idle.mark("slow_episodes")
        else:
            self._idle.mark("groups")

    def _describe(self, step: int) -> str:
        """Return a text with the state of the next batch, and the reason why it is not full."""
        store = self.store
        progress = f"batch {step}: {store.counts['complete']} of {store.ppo.num_groups} groups"
        if store.version is None:
            return f"{progress}, no policy version is published yet"
        if num_filtered := store.filtered.length:
            progress += f", {num_filtered:,} groups filtered in a row"
        if slow := slow_episodes(store, self.workers):
            progress += f", kept back for slow episodes: {'; '.join(slow)}"
        return progress

    def _log_slow_episodes(self) -> None:
        """Log the slow episodes if they take more of the time than REPORT_SHARE."""
        self._mark_idle()
        share = self._idle.slow_share
        now = time.monotonic()
        is_slow = self._idle.cause == "slow_episodes" and share > REPORT_SHARE
        if not is_slow or now - self._reported < SHARE_WINDOW_S:
            return
        self._reported = now
        timeout_s = self.store.ppo.collector.episode_timeout_s
        logger.warning(
            "trainer waits for slow episodes",
            share=round(share, 2),
            allowed=REPORT_SHARE,
            episodes=slow_episodes(self.store, self.workers),
            ended_by=f"collector.episode_timeout_s={timeout_s:g}",
        )

    # ------------------------------------------------------------ requests

    def _take_batch_request(self, route: bytes, request: BatchRequest) -> None:
        step = request.step
        next_step = self.store.next_step
        if self.finish is not None:
            self.outbox.send(route, messages.Finished(reason=self.finish.reason))
        elif step > next_step:
            raise OutOfStep(
                f"rank {request.rank} requests batch {step}, but the next is {next_step}"
            )
        elif step == next_step or step in self.store.batches:
            if not self.is_waiting:
                self.waiting_since = time.monotonic()
            self._batch_requests[request.rank] = (route, request)

    def _take_eval_request(self, route: bytes, request: EvalRequest) -> None:
        metrics = self.evals.results.get(request.eval_id)
        if metrics is not None:
            self.outbox.send(route, messages.EvalResult(eval_id=request.eval_id, metrics=metrics))
            return
        if not self.is_waiting:
            self.waiting_since = time.monotonic()
        self.evals.begin(request.eval_id)
        self._eval_requests[request.eval_id] = (route, request)

    def begin_training(self) -> None:
        """Roll the ledger back and answer the start; called between two commits of the ledger.

        Raises:
            InvariantError: The run's first start contradicts the ledger.
        """
        if self._start is None:
            return
        route, start = self._start
        if start_error := self._start_error(start.step):
            if self.last_request < 0:  # no trainer has started
                raise InvariantError(start_error)
            self._start = None
            refusal = messages.Refused(request=request_name(start), reason=start_error)
            self.outbox.send(route, refusal)
            return
        self.store.ledger.set_meta("ticket", str(start.ticket))
        self.store.filtered.reset()
        num_rolled_back = self.store.roll_back(start.step)
        self._batch_requests.clear()
        self._eval_requests.clear()
        self.evals.forget(after=start.step)
        self._start = None
        self._ticket = start.ticket
        self.last_request = time.monotonic()
        self.changed = True
        logger.info("training begins", step=start.step, rolled_back_groups=num_rolled_back)
        ready = messages.TrainerReady(step=start.step, rolled_back_groups=num_rolled_back)
        self.outbox.send(route, ready)

    def _start_error(self, step: int) -> str:
        """Return the reason why no trainer can start at `step`; "" if a trainer can."""
        ledger = self.store.ledger
        num_trained = self.store.num_trained_steps()
        if step > num_trained:
            return (
                f"the trainer begins at step {step}, but {ledger.path} has only "
                f"{num_trained} trained steps: checkpoint and ledger are not of one trial"
            )
        query = "SELECT IFNULL(MAX(step), 0) FROM checkpoints"
        (saved_step,) = ledger.connection.execute(query).fetchone()
        if step >= saved_step:
            return ""
        return (
            f"the trainer begins at step {step}, but the checkpoint of step {saved_step} was "
            "durable: it is missing or broken. Put it back; or start the same trial again "
            f"with resume=step-{step:06d} to go back, or resume=never to start a new run"
        )

    def filter_groups(self, effect: FilterGroups) -> None:
        """Filter unusable groups and answer; called between two commits of the ledger."""
        request = effect.request
        reasons = {
            group_id: f"unusable:{error[:MAX_REASON]}" for group_id, error in request.groups.items()
        }
        logger.warning("groups set aside", step=request.step, groups=reasons)
        self.store.filter_unusable(request.step, reasons)
        self.changed = True
        self.outbox.send(effect.route, messages.Done(request=request_name(request)))

    def _record(self, request: FromTrainer) -> None:
        match request:
            case messages.StepReport():
                self._record_step(request)
            case messages.Published():
                self._record_version(request)
            case messages.Checkpointed():
                self._record_checkpoint(request)
            case _:
                assert isinstance(request, messages.Finish)
                self._record_finish(request)

    def _record_version(self, request: messages.Published) -> None:
        """Record a confirmed version; ignore a version that is older or was rolled back."""
        version = request.version
        if (self.store.version or 0) <= version <= self.store.num_trained_steps():
            self.store.version = version
            self.store.ledger.set_meta("version", str(version))
            self.store.ledger.add_version(version, request.proof)

    def _record_checkpoint(self, checkpoint: messages.Checkpointed) -> None:
        folder = os.path.normpath(run_paths(self.config).checkpoints)
        is_inside = os.path.dirname(os.path.normpath(checkpoint.path)) == folder
        if checkpoint.step > self.store.num_trained_steps() or not is_inside:
            raise OutOfStep(
                f"impossible checkpoint: step {checkpoint.step} at {checkpoint.path} "
                f"(checkpoints are in {folder})"
            )
        self.store.mark_durable(checkpoint.step)
        self.store.ledger.checkpoint(checkpoint.step, checkpoint.path)

    def _record_step(self, report: messages.StepReport) -> None:
        num_trained = self.store.num_trained_steps()
        num_composed = self.store.next_step
        if report.step < num_trained:
            return  # a resent report: the answer to the first was lost
        if report.step > num_trained or num_trained == num_composed:
            raise OutOfStep(
                f"step {report.step} is reported, but only {num_trained} steps are trained and "
                f"{num_composed} batches composed"
            )
        headers = _headers(self.store.batches[num_trained])
        expected_ids = sorted(header.trajectory_id for header in headers)
        if sorted(report.trained) != expected_ids:
            different_ids = sorted(set(report.trained) ^ set(expected_ids))
            raise InvariantError(
                f"step {num_trained}: the trainer trained {len(report.trained)} trajectories, "
                f"the batch has {len(expected_ids)}; they differ in {different_ids[:3]}"
            )
        self.store.mark_trained(report.step)
        self.store.ledger.train(report)

    def _record_finish(self, finish: messages.Finish) -> None:
        logger.info("finishing", reason=finish.reason)
        if self.finish is None or self.finish.reason == STOP_WAITING:
            self.finish = finish
        for route, _ in self._batch_requests.values():
            self.outbox.send(route, messages.Finished(reason=finish.reason))
        self._batch_requests.clear()


def _headers(groups: Sequence[Group]) -> list[TrajectoryHeader]:
    """Return the headers of the trajectories of a batch, in the order of the batch."""
    return [header for group in groups for header in group.headers]
