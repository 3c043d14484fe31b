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

from arealite.api.config import ExperimentConfig, run_paths
from arealite.api.payloads import drop_repeated_prompts, restore_prompts
from arealite.api.rollout_messages import Ack, Drain, Lease, Progress, Result, WorkerState
from arealite.api.task import Task
from arealite.api.trainer_messages import BatchRequest, Checkpointed, Finish, FromTrainer, Refused
from arealite.base import log
from arealite.base.errors import InvariantError, UserError
from arealite.base.model_folder import read_json, vocab_size
from arealite.system.data.dataset import identity
from arealite.system.datapipe.eval_scheduler import EvalScheduler
from arealite.system.datapipe.filtered import REPORTED_FROM
from arealite.system.datapipe.group_store import GroupStore
from arealite.system.datapipe.intake import DECODE_ERRORS, Intake, ResultIds, decode
from arealite.system.datapipe.scaling import Scaling
from arealite.system.datapipe.trainer_request_handler import OutOfStep, TrainerRequestHandler
from arealite.system.datapipe.upkeep import Upkeep
from arealite.system.datapipe.workers import ActiveLease, Worker, Workers
from arealite.system.health.waits import GROUP_FILTER, Wait, table
from arealite.system.ledger.group import too_many_failures
from arealite.system.ledger.ledger import Ledger, read_payloads, read_turns
from arealite.system.ledger.writer import LedgerWriter
from arealite.system.links import wire
from arealite.system.names.registry import NameRegistry

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


@dataclass(eq=False)
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
            self.ledger, self.train, ppo=ppo, seed=config.seed, shuffle=config.dataset.shuffle,
            curriculum=config.datapipe.curriculum,
        )  # fmt: skip
        rows = list(self.eval)[: ppo.eval.num_prompts or None]
        self.evals = EvalScheduler(rows, samples=ppo.eval.samples, max_attempts=ppo.max_attempts)
        for eval_id, metrics in self.ledger.connection.execute("SELECT * FROM evals"):
            self.evals.results[eval_id] = msgspec.json.decode(metrics)
        self.workers = Workers(ttl_s=config.datapipe.lease_ttl_s)
        self.scaling = None
        if self.registry is not None and ppo.collector.autoscale.enabled:
            self.scaling = Scaling(config, self.registry, store=self.store, workers=self.workers)
        self._stopped_at = self._progress = self._last_waiting = time.monotonic()
        self._fatal: InvariantError | None = None
        self._filtering = Wait("an unfiltered group", owner=GROUP_FILTER, on="datapipe-0")
        """It is in the table of waits while the groups in a row are reported."""
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
        secret = self.registry.secret if self.registry is not None else None
        limit = self.config.datapipe.max_frame_mb
        server = wire.open_socket(self.context, zmq.ROUTER, secret, max_mb=limit)
        server.bind(self.address)
        self.address = cast(bytes, server.getsockopt(zmq.LAST_ENDPOINT)).decode().rstrip("\0")
        self.writer = LedgerWriter(self.ledger, interval_s=self.config.datapipe.commit_interval_s)
        self.requests = TrainerRequestHandler(
            self.store, self.evals, self.config, self._send, self.workers, self.writer
        )
        size = vocab_size(read_json(self.config.model.path)) or 1 << 31
        self.intake = Intake(self.store, self.evals, self.workers, self.requests.rejections, size)
        kept = self.config.datapipe.keep_payloads
        self.upkeep = Upkeep(self.writer, self._done, keep_payloads=kept)
        self._restore()
        self._channel = wire.Channel(server, self._receive)
        try:
            async with self._registered(), asyncio.TaskGroup() as self._tasks:
                self._tasks.create_task(self._stop_on_error(self.writer.run), name="ledger writer")
                self._tasks.create_task(self._tick_forever(), name="clock")
                if self.scaling:
                    self._tasks.create_task(self.scaling.run(self._done), name="scaling")
                logger.info("datapipe ready", address=self.address, step=self.store.next_step)
                self.ready.set()
                await self._done.wait()
                self.writer.close()
        finally:
            self._report_filtered("")
            self._channel.close(linger_ms=LINGER_MS)
            self.ledger.close()
        if self._fatal is not None:
            raise self._fatal
        rejected = self.requests.rejections.total()
        logger.info("datapipe ends", **dict(self.store.counts), rejected_messages=rejected)

    def _registered(self) -> AbstractAsyncContextManager[None]:
        if self.registry is None:
            return nullcontext()
        own = {"address": self.address, "pid": os.getpid(), "host": socket.gethostname()}
        desired_workers = self.scaling.desired_workers if self.scaling else dict[str, int]
        return self.registry.registered("datapipe", "0", lambda: own | desired_workers())

    def _restore(self) -> None:
        """Assign leases from before a restart to their workers, which may still run them."""
        for group in self.store.groups.values():
            for lease in list(group.leases.values()):
                if due := group.unfinished(lease):
                    active = self.workers.assign(group.owners[lease.lease_id], lease, due)
                    active.sent_at = -math.inf  # an earlier process sent it: it arrived or is lost
                else:
                    self.store.end_lease(lease)

    def _begin(self, body: Callable[[], Awaitable[None]]) -> None:
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

    def _send(self, route: bytes, message: msgspec.Struct, payloads: Sequence[bytes] = ()) -> None:
        self._channel.send([route, wire.encode(message), *payloads])

    def _receive(self, frames: list[bytes]) -> None:
        route = frames[0]
        try:
            message, wrong = decode(frames[1])
        except (*DECODE_ERRORS, IndexError) as error:
            self.requests.rejections.record(route.hex(), str(error))
            if any(worker.route == route for worker in self.workers.by_id.values()):
                self._send(route, Ack(crc32(b"".join(frames[1:2]))))
            return
        try:
            match message:
                case Result() | ResultIds():
                    self._take_result(frames, message, wrong)
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

    def _take_state(self, route: bytes, state: WorkerState) -> None:
        ended, to_resend = self.workers.update(route, state)
        self._release(ended, is_lost=state.capacity > 0)
        for active in to_resend:
            logger.warning("lease sent again", worker=state.worker_id, lease=active.lease.lease_id)
            self._send_lease(self.workers.by_id[state.worker_id], active)
        if self.requests.finish is not None:
            self._send(route, Drain(self.requests.finish.reason))
        self._send(route, Ack(0))

    def _take_result(self, frames: list[bytes], result: Result | ResultIds, wrong: str) -> None:
        if self._fatal is not None:
            return  # never acknowledged, so the worker keeps it
        self.intake.take(result, restore_prompts(frames[2:]), wrong)
        self._progress = time.monotonic()
        self.requests.changed = True
        # An invalid result is acknowledged too: otherwise its worker would resend it forever.
        self.writer.after_commit(partial(self._send, frames[0], Ack(crc32(frames[1]))))
        share = self.config.datapipe.max_failed_share
        store = self.store
        if why := too_many_failures(store.failed_window, store.first_failure, share=share):
            raise InvariantError(why)

    def _take_request(self, route: bytes, request: FromTrainer) -> None:
        try:
            if self._fatal is not None:
                raise self._fatal
            if not self.requests.take(route, request):
                return
        except InvariantError as error:
            self._send(route, Refused(wire.request_name(request), str(error)))
            if not isinstance(error, OutOfStep):
                raise
            self.requests.rejections.record(route.hex(), str(error))
            return
        if isinstance(request, Checkpointed):
            self.writer.after_commit(partial(self._begin, self.upkeep.run))
        if isinstance(request, Finish):
            self._stopped_at = time.monotonic()
            for worker in self.workers.by_id.values():
                if worker.route is not None:
                    self._send(worker.route, Drain(request.reason))

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
            send = partial(self._send_batch, route, request)
            self.writer.after_commit(partial(self._begin, send), hurry=True)

    def _send_leases(self) -> None:
        version = self.store.version
        while version is not None and (worker := self.workers.most_idle()) is not None:
            boot = self.ledger.boot
            credit = worker.credit
            if (lease := self.evals.lease(boot=boot, version=version, credit=credit)) is None:
                if (group := self.store.next_group()) is None:
                    return
                lease = self.store.lease(group, worker_id=worker.worker_id, credit=credit)
            active = self.workers.assign(worker.worker_id, lease, lease.members)
            self.writer.after_commit(partial(self._send_lease, worker, active))

    def _send_lease(self, worker: Worker, active: ActiveLease) -> None:
        group = self.store.groups.get(active.lease.group_id)
        if group is not None and any(member in group.turns for member in active.unfinished):
            self._begin(partial(self._send_turns, worker, active))
        else:
            self._deliver(worker, active, active.remaining(), [])

    async def _send_turns(self, worker: Worker, active: ActiveLease) -> None:
        """Send a lease with the stored turns of its unfinished members, read from the ledger."""
        lease = active.remaining()
        turns, payloads = await asyncio.to_thread(read_turns, self.ledger.path, lease)
        lease = msgspec.structs.replace(lease, turns=turns)
        self._deliver(worker, active, lease, payloads)

    def _deliver(self, to: Worker, active: ActiveLease, lease: Lease, turns: list[bytes]) -> None:
        active.sent_at = time.monotonic()
        if to.route is not None:
            self._send(to.route, lease, turns)

    async def _send_batch(self, route: bytes, request: BatchRequest) -> None:
        if request.step in self.store.batches:
            batch = self.requests.shard(request)
            ids = [batch.headers[index].trajectory_id for index in batch.mine]
            payloads = await asyncio.to_thread(read_payloads, self.ledger.path, ids)
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
            logger.warning("worker silent", worker=worker.worker_id, leases=len(leases))
            self._release(leases, is_lost=True)
        self._check_stall(now)
        if (refused := wire.count_refused(self._channel.socket)) and not self._refusals:
            logger.warning("connection refused", why=wire.MISMATCH)
        self._refusals += refused
        if now - self._last_waiting >= WAITING_S and self._fatal is None:
            self._last_waiting = now
            self.requests.send_waiting()
        self._lease_and_batch()
        if self._is_over(now):
            self._done.set()

    def _check_stall(self, now: float) -> None:
        limit = self.config.datapipe.stall_timeout_s
        since = max(self._progress, self.requests.waiting_since)
        if self.requests.is_waiting and now - since > limit and self._fatal is None:
            what = f"no episode finished for {limit:.0f} s (datapipe.stall_timeout_s): "
            self._stop(InvariantError(what + self.workers.describe()))

    def _check_filtered(self) -> None:
        """Report groups that are filtered in a row; stop at `datapipe.max_filtered_groups`.

        After a resume, the count of the earlier trainer lasts until the new trainer starts.
        """
        filtered = self.store.filtered
        limit = self.config.datapipe.max_filtered_groups
        has_trainer = self.requests.has_trainer
        is_reported = has_trainer and filtered.length >= REPORTED_FROM
        self._report_filtered(filtered.describe() if is_reported else "")
        if has_trainer and 0 < limit <= filtered.length:
            option = f"datapipe.max_filtered_groups={limit}"
            self._stop(InvariantError(f"{filtered.describe()} ({option})"))

    def _report_filtered(self, detail: str) -> None:
        """Publish `detail` as a wait that `diagnosis` reports; remove the wait if it is ""."""
        report = self._filtering
        report.detail = detail
        if not detail:
            table.discard(report)
        elif report not in table:
            report.since = time.monotonic()
            table.add(report)

    def _is_over(self, now: float) -> bool:
        if self._fatal is not None:
            return now - self._stopped_at > REFUSAL_S
        since_s = now - self._stopped_at
        finish = self.requests.finish
        if finish is None or (self.workers.by_id and since_s < DRAIN_S):
            return False
        if finish.reason == wire.STOP_WAITING:
            return since_s > SAVE_S
        return not self.store.trained or now - self.requests.last_request > FINAL_CHECKPOINT_S
