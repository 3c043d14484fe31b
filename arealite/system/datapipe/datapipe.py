"""The datapipe process: leases tasks to rollout workers, stores results, serves batches to ranks.

One event loop reacts to messages, to commits of the ledger, and to a clock (every 0.25 s). This
module sends and receives the messages; the state is in `group_store`.
"""

import asyncio
import math
import os
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import cast
from zlib import crc32

import msgspec
import zmq

from arealite.api.experiment_config import ExperimentConfig, run_paths
from arealite.api.payloads import drop_repeated_prompts, restore_prompts
from arealite.api.rollout_messages import Ack, Drain, Lease, Progress, Result, WorkerState
from arealite.api.task import Task
from arealite.api.trainer_messages import BatchRequest, Checkpointed, Finish, FromTrainer, Refused
from arealite.base import log
from arealite.base.errors import InvariantError, UserError
from arealite.base.model_folder import read_json, vocab_size
from arealite.ext.scaling.scaling import Scaling
from arealite.system.data.dataset import identity
from arealite.system.datapipe.eval_scheduler import EvalScheduler
from arealite.system.datapipe.filtered import REPORTED_FROM, FilterWait
from arealite.system.datapipe.group_store import GroupStore
from arealite.system.datapipe.ledger_upkeep import Upkeep
from arealite.system.datapipe.message_checks import DECODE_ERRORS, Intake, ResultIds, decode
from arealite.system.datapipe.trainer_request_handler import OutOfStep, TrainerRequestHandler
from arealite.system.datapipe.workers import ActiveLease, Worker, Workers
from arealite.system.ledger.group import too_many_failures
from arealite.system.ledger.ledger import Ledger, read_payloads, read_turns
from arealite.system.ledger.writer import LedgerWriter
from arealite.system.links import wire
from arealite.system.names.name_registry import NameRegistry

logger = log.get(__name__)

TICK_S = 0.25
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
LINGER_MS = 1000


@dataclass(eq=False, kw_only=True)
class Datapipe:
    """Owns the position in the dataset, the leases, the ledger and the batches of one trial."""

    config: ExperimentConfig
    train: Sequence[Task]
    """Tasks to train on; at least one."""
    eval: Sequence[Task]
    """Held-out tasks; may be empty."""
    registry: NameRegistry | None
    """Where the datapipe registers its address; None: it does not register."""
    address: str = "tcp://127.0.0.1:0"
    """ZeroMQ endpoint to bind; port 0 chooses a free port."""
    context: wire.Context | None = None
    """ZeroMQ context; None: the process's shared context."""

    def __post_init__(self) -> None:
        """Open the trial's ledger.

        Raises:
            UserError: `train` is empty, or the ledger cannot be written or was created with another
                dataset, seed or group size.
        """
        if not self.train:
            raise UserError("dataset.train has no rows: there is nothing to train on.")
        config = self.config
        ppo = self.config.trainer.ppo
        self.ready = asyncio.Event()
        """Set once `address` accepts connections."""
        self.ledger = Ledger(run_paths(config).ledger, fingerprint=identity(config, self.train))
        self.store = GroupStore(
            self.ledger,
            self.train,
            ppo=ppo,
            seed=config.seed,
            shuffle=config.dataset.shuffle,
            curriculum=config.datapipe.curriculum,
        )
        self.evals = EvalScheduler(
            list(self.eval)[: ppo.eval.num_prompts or None],
            samples=ppo.eval.samples,
            max_attempts=ppo.max_attempts,
        )
        for eval_id, metrics in self.ledger.connection.execute("SELECT * FROM evals"):
            self.evals.results[eval_id] = msgspec.json.decode(metrics)
        self.workers = Workers(ttl_s=config.datapipe.lease_ttl_s)
        self.scaling = None
        if self.registry is not None and ppo.collector.autoscale.enabled:
            self.scaling = Scaling(
                config=config,
                registry=self.registry,
                store=self.store,
                workers=self.workers,
            )
        now = time.monotonic()
        self._stopped_at = now
        """Time of the last Finish, or of the error that stops the datapipe."""
        self._last_result = now
        """Time at which the last result of a worker arrived."""
        self._last_waiting = now
        """Time of the last Waiting messages."""
        self._fatal: InvariantError | None = None
        """The error that stops the datapipe; None without one."""
        self._filter_wait = FilterWait()
        self._refusals = 0
        """Connections refused because of another secret."""
        self._done = asyncio.Event()

    # ------------------------------------------------------------ lifecycle

    async def run(self) -> None:
        """Serve until the run is finished and the workers have sent their remaining results.

        Raises:
            InvariantError: a guarantee is broken or the ledger cannot be written; the trainer's
                requests were refused with this error.
        """
        server = self._bind()
        self._create_parts()
        self._restore()
        self._channel = wire.Channel(server, self._receive)
        try:
            async with self._registered(), asyncio.TaskGroup() as self._tasks:
                self._tasks.create_task(self._stop_on_error(self.writer.run), name="ledger writer")
                self._tasks.create_task(self._tick_forever(), name="clock")
                if self.scaling:
                    self._tasks.create_task(self.scaling.run(self._done), name="scaling")
                logger.info(
                    "datapipe ready",
                    address=self.address,
                    step=self.store.next_step,
                )
                self.ready.set()
                await self._done.wait()
                self.writer.close()
        finally:
            self._filter_wait.report("")
            self._channel.close(linger_ms=LINGER_MS)
            self.ledger.close()
        if self._fatal is not None:
            raise self._fatal
        logger.info(
            "datapipe ends",
            **dict(self.store.counts),
            rejected_messages=self.requests.rejections.total(),
        )

    def _bind(self) -> zmq.Socket[bytes]:
        """Open the socket for workers and ranks, and set `address` to its endpoint."""
        server = wire.open_socket(
            self.context,
            zmq.ROUTER,
            self.registry.secret if self.registry is not None else None,
            max_mb=self.config.datapipe.max_frame_mb,
        )
        server.bind(self.address)
        endpoint = cast(bytes, server.getsockopt(zmq.LAST_ENDPOINT))
        self.address = endpoint.decode().rstrip("\0")
        return server

    def _create_parts(self) -> None:
        """Create the parts that need the running event loop."""
        options = self.config.datapipe
        self.writer = LedgerWriter(self.ledger, interval_s=options.commit_interval_s)
        self.requests = TrainerRequestHandler(
            store=self.store,
            evals=self.evals,
            config=self.config,
            send=self._send,
            workers=self.workers,
            writer=self.writer,
        )
        self.intake = Intake(
            store=self.store,
            evals=self.evals,
            workers=self.workers,
            rejections=self.requests.rejections,
            vocab_size=vocab_size(read_json(self.config.model.path)) or 1 << 31,
        )
        self.upkeep = Upkeep(self.writer, self._done, keep_payloads=options.keep_payloads)

    def _registered(self) -> AbstractAsyncContextManager[None]:
        """Return a context in which the datapipe has a name in the registry."""
        if self.registry is None:
            return nullcontext()
        identity: dict[str, object] = {
            "address": self.address,
            "pid": os.getpid(),
            "host": socket.gethostname(),
        }

        def entry() -> dict[str, object]:
            return identity | self.scaling.desired_workers() if self.scaling else identity

        return self.registry.registered("datapipe", "0", entry)

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

    def _start_task(self, body: Callable[[], Awaitable[None]]) -> None:
        """Run `body` beside the other tasks; an InvariantError stops the datapipe."""
        self._tasks.create_task(self._stop_on_error(body))

    async def _stop_on_error(self, body: Callable[[], Awaitable[None]]) -> None:
        """Run `body`; on an InvariantError, refuse the trainer's requests before the exit."""
        try:
            await body()
        except InvariantError as error:
            self._stop(error)

    def _stop(self, error: InvariantError) -> None:
        if self._fatal is None:
            logger.error("datapipe stops", reason=str(error))
            self._fatal = error
            self._stopped_at = time.monotonic()
            self.requests.refuse(str(error))

    # ------------------------------------------------------------ messages

    def _send(
        self,
        route: bytes,
        message: msgspec.Struct,
        payloads: Sequence[bytes] = (),
    ) -> None:
        self._channel.send([route, wire.encode(message), *payloads])

    def _receive(self, frames: list[bytes]) -> None:
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
                    self.writer.request_commit()
                case _:
                    self._take_request(route, message)
            self._lease_and_batch()
        except InvariantError as error:
            self._stop(error)
        except Exception as error:  # noqa: BLE001  (a socket callback: no caller catches it)
            self._stop(InvariantError(f"{type(message).__name__} could not be handled: {error!r}"))

    def _reject(self, frames: list[bytes], error: Exception) -> None:
        """Count an unreadable message, and acknowledge it if its sender is a worker."""
        route = frames[0]
        self.requests.rejections.record(route.hex(), str(error))
        if any(worker.route == route for worker in self.workers.by_id.values()):
            first_frame = frames[1] if len(frames) > 1 else b""
            self._send(route, Ack(checksum=crc32(first_frame)))

    def _take_state(self, route: bytes, state: WorkerState) -> None:
        ended, to_resend = self.workers.update(route, state)
        self._release(ended, is_lost=state.capacity > 0)
        for active in to_resend:
            logger.warning(
                "lease sent again",
                worker=state.worker_id,
                lease=active.lease.lease_id,
            )
            self._send_lease(self.workers.by_id[state.worker_id], active)
        if self.requests.finish is not None:
            self._send(route, Drain(reason=self.requests.finish.reason))
        self._send(route, Ack(checksum=0))

    def _take_result(
        self,
        frames: list[bytes],
        result: Result | ResultIds,
        message_error: str,
    ) -> None:
        if self._fatal is not None:
            return  # never acknowledged, so the worker keeps it
        self.intake.take(result, restore_prompts(frames[2:]), message_error)
        self._last_result = time.monotonic()
        self.requests.changed = True
        # An invalid result is acknowledged too: otherwise its worker would resend it forever.
        route = frames[0]
        acknowledgement = Ack(checksum=crc32(frames[1]))
        self.writer.after_commit(partial(self._send, route, acknowledgement))
        failure_report = too_many_failures(
            self.store.failed_window,
            self.store.first_failure,
            share=self.config.datapipe.max_failed_share,
        )
        if failure_report:
            raise InvariantError(failure_report)

    def _take_request(self, route: bytes, request: FromTrainer) -> None:
        try:
            if self._fatal is not None:
                raise self._fatal
            if not self.requests.take(route, request):
                return
        except InvariantError as error:
            self._send(route, Refused(request=wire.request_name(request), reason=str(error)))
            if not isinstance(error, OutOfStep):
                raise
            self.requests.rejections.record(route.hex(), str(error))
            return
        if isinstance(request, Checkpointed):
            self._audit_after_commit()
        if isinstance(request, Finish):
            self._stopped_at = time.monotonic()
            self._drain_workers(request.reason)

    def _audit_after_commit(self) -> None:
        """Once the queued writes are durable, start a task that audits the new records."""

        def start_audit() -> None:
            self._start_task(self.upkeep.run)

        self.writer.after_commit(start_audit)

    def _drain_workers(self, reason: str) -> None:
        for worker in self.workers.by_id.values():
            if worker.route is not None:
                self._send(worker.route, Drain(reason=reason))

    # ------------------------------------------------------------ leases and batches

    def _lease_and_batch(self) -> None:
        """Grant leases, compose the next batch, and answer the requests that can be answered."""
        self._check_filtered()
        if self._fatal is not None:
            return
        self.requests.accept_pending_start()
        if self.requests.finish is None:
            self._send_leases()
        self.requests.answer_evals()
        ready = self.requests.take_ready()
        if self.scaling:
            self.scaling.take_batch()
        for route, request in ready:
            self._send_batch_after_commit(route, request)

    def _send_leases(self) -> None:
        """Lease members to the most idle workers, and send each lease once it is durable."""
        while (worker := self.workers.most_idle()) is not None:
            lease = self._next_lease(worker)
            if lease is None:
                return
            active = self.workers.assign(worker.worker_id, lease, lease.members)
            self.writer.after_commit(partial(self._send_lease, worker, active))

    def _next_lease(self, worker: Worker) -> Lease | None:
        """Return the next lease, of an evaluation if one is due; None if no lease is due."""
        version = self.store.version
        if version is None:
            return None
        credit = worker.credit
        lease = self.evals.lease(
            boot=self.ledger.boot,
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

    def _send_lease(self, worker: Worker, active: ActiveLease) -> None:
        """Send a lease at once, or if it has stored turns, in a task that reads them."""
        group = self.store.groups.get(active.lease.group_id)
        has_turns = group is not None and not active.unfinished.isdisjoint(group.turns)
        if has_turns:
            self._start_task(partial(self._send_turns, worker, active))
        else:
            self._deliver(worker, active, active.remaining(), [])

    async def _send_turns(self, worker: Worker, active: ActiveLease) -> None:
        """Send a lease with the stored turns of its unfinished members, read from the ledger."""
        lease = active.remaining()
        turns, payloads = await asyncio.to_thread(read_turns, self.ledger.path, lease)
        lease = msgspec.structs.replace(lease, turns=turns)
        self._deliver(worker, active, lease, payloads)

    def _deliver(
        self,
        to: Worker,
        active: ActiveLease,
        lease: Lease,
        turns: list[bytes],
    ) -> None:
        active.sent_at = time.monotonic()
        if to.route is not None:
            self._send(to.route, lease, turns)

    def _send_batch_after_commit(self, route: bytes, request: BatchRequest) -> None:
        """Once the queued writes are durable, start a task that sends a rank its shard."""

        def start_sending() -> None:
            self._start_task(partial(self._send_batch, route, request))

        self.writer.after_commit(start_sending, hurry=True)

    async def _send_batch(self, route: bytes, request: BatchRequest) -> None:
        """Send a rank its shard of a batch, unless the batch was rolled back meanwhile."""
        if request.step not in self.store.batches:
            return
        batch = self.requests.shard(request)
        trajectory_ids = [batch.headers[index].trajectory_id for index in batch.mine]
        payloads = await asyncio.to_thread(read_payloads, self.ledger.path, trajectory_ids)
        self._send(route, batch, drop_repeated_prompts(payloads))

    def _release(self, leases: Sequence[Lease], *, is_lost: bool) -> None:
        """End leases that workers will not finish; if `is_lost`, count a failed attempt."""
        for lease in leases:
            self.evals.release(lease, is_lost=is_lost)
            self.store.end_lease(lease, is_lost=is_lost)
            self.requests.changed = True

    # ------------------------------------------------------------ the clock

    async def _tick_forever(self) -> None:
        while not self._done.is_set():
            await asyncio.sleep(TICK_S)
            self._tick(time.monotonic())

    def _tick(self, now: float) -> None:
        for worker, leases in self.workers.expire():
            logger.warning(
                "worker silent",
                worker=worker.worker_id,
                leases=len(leases),
            )
            self._release(leases, is_lost=True)
        self._check_stall(now)
        self._count_refusals()
        if now - self._last_waiting >= WAITING_S and self._fatal is None:
            self._last_waiting = now
            self.requests.send_waiting()
        self._lease_and_batch()
        if self._is_over(now):
            self._done.set()

    def _count_refusals(self) -> None:
        """Count connections refused because of another secret; log the first."""
        num_refused = wire.count_refused(self._channel.socket)
        if num_refused and not self._refusals:
            logger.warning("connection refused", why=wire.MISMATCH)
        self._refusals += num_refused

    def _check_stall(self, now: float) -> None:
        """Stop if the trainer waits and no episode finished for `datapipe.stall_timeout_s`."""
        if not self.requests.is_waiting or self._fatal is not None:
            return
        limit_s = self.config.datapipe.stall_timeout_s
        stalled_s = now - max(self._last_result, self.requests.waiting_since)
        if stalled_s > limit_s:
            error = InvariantError(
                f"no episode finished for {limit_s:.0f} s (datapipe.stall_timeout_s): "
                f"{self.workers.describe()}"
            )
            self._stop(error)

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
            self._stop(InvariantError(reason))

    def _is_over(self, now: float) -> bool:
        """Return whether the run is finished, or the datapipe has refused requests long enough."""
        since_stop_s = now - self._stopped_at
        if self._fatal is not None:
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
