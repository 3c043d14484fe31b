"""The process between rollout workers and trainer: it leases, keeps what comes back, and composes
batches.

One event loop that only reacts: to messages, to commits, and to a clock four times a second. What
it knows is in `datapipe_groups`; here is who is told what, and when.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import cast

import msgspec
import zmq

from arealite.api.config import ExperimentConfig, run_paths
from arealite.api.rollout_messages import Ack, Drain, Lease, Result, WorkerState
from arealite.api.task import Task
from arealite.api.trainer_messages import (
    BatchRequest,
    Checkpointed,
    Done,
    EvalRequest,
    EvalResult,
    Finish,
    Finished,
    Published,
    Refused,
    Status,
    StatusRequest,
    StepReport,
    TrainerReady,
    TrainerStart,
    Waiting,
)
from arealite.base import log
from arealite.base.errors import InvariantError, UserError
from arealite.system import wire
from arealite.system.datapipe_batches import Batches
from arealite.system.datapipe_evals import EvalBook
from arealite.system.datapipe_groups import GroupBook
from arealite.system.datapipe_workers import Workers
from arealite.system.ledger import Ledger, read_payloads
from arealite.system.ledger_writer import LedgerWriter
from arealite.system.name_registry import NameRegistry

logger = log.get(__name__)

TICK_S = 0.25
WAITING_S = 1.0
"""How often an unanswered request hears who is waited for."""
REFUSE_S = 5.0
"""How long a stopped datapipe goes on to tell the trainer why."""
DRAIN_S = 15.0
"""How long workers have to hand in what they hold."""
SAVE_S = 600.0
"""How long after a stopped wait the trainer has to save and finish."""
FAREWELL_S = 5.0
"""After a Finish, how long the trainer is listened to while its last steps are in no checkpoint."""
LINGER_MS = 1000


class Datapipe:
    """Owner of the dataset's cursor, the leases, the ledger and the batches of one trial."""

    def __init__(
        self,
        config: ExperimentConfig,
        *,
        train: Sequence[Task],
        eval: Sequence[Task],
        registry: NameRegistry | None,
        address: str = "tcp://127.0.0.1:0",
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        """Open the trial's ledger.

        Raises:
            UserError: it cannot be written, or was begun with another dataset, seed or group size.
        """
        if not train:
            raise UserError("dataset.train has no rows: there is nothing to train on.")
        ppo = config.trainer.ppo
        self.config = config
        self.address = address
        self.ready = asyncio.Event()
        """Set once `address` is where to connect."""
        self._registry = registry
        self._context = context or cast("zmq.Context[zmq.Socket[bytes]]", zmq.Context.instance())
        fingerprint = {
            "dataset_rows": str(len(train)),
            "seed": str(config.seed),
            "shuffle": str(config.dataset.shuffle),
            "group_size": str(ppo.collector.group_size),
        }
        self.ledger = Ledger(run_paths(config).ledger, fingerprint=fingerprint)
        self.book = GroupBook(
            self.ledger, train, ppo=ppo, seed=config.seed, shuffle=config.dataset.shuffle
        )
        rows = list(eval)[: ppo.eval.num_prompts or None]
        self.evals = EvalBook(rows, samples=ppo.eval.samples, max_attempts=ppo.max_attempts)
        for eval_id, metrics in self.ledger.connection.execute("SELECT * FROM evals"):
            self.evals.results[eval_id] = msgspec.json.decode(metrics)
        self.workers = Workers(ttl_s=config.datapipe.lease_ttl_s)
        self.batches = Batches(self.book, seed=config.seed)
        self._batch_requests: dict[int, tuple[bytes, BatchRequest]] = {}
        """By rank: what is asked for and not answered."""
        self._eval_requests: dict[int, bytes] = {}
        self._finish: Finish | None = None
        now = time.monotonic()
        self._finished_at = self._progress = self._told = self._trainer_heard = now
        self._fatal: InvariantError | None = None
        self._lag_max = 0.0
        self._done = asyncio.Event()
        self._changed = True
        """Something happened since the last attempt to compose a batch."""

    # ------------------------------------------------------------ life

    async def run(self) -> None:
        """Serve until the run is finished and the workers have handed in what they hold.

        Raises:
            InvariantError: a promise broke, or the ledger cannot be written; the trainer was told.
        """
        server = wire.open_socket(self._context, zmq.ROUTER)
        server.bind(self.address)
        self.address = cast(bytes, server.getsockopt(zmq.LAST_ENDPOINT)).decode().rstrip("\0")
        self.writer = LedgerWriter(self.ledger, interval_s=self.config.datapipe.commit_interval_s)
        self._restore()
        self._channel = wire.Channel(server, self._receive)
        try:
            async with AsyncExitStack() as stack:
                await self._register(stack)
                async with asyncio.TaskGroup() as self._tasks:
                    self._tasks.create_task(self._guard(self.writer.run), name="ledger writer")
                    self._tasks.create_task(self._tick_forever(), name="clock")
                    logger.info("datapipe ready", address=self.address, step=self.book.next_step)
                    self.ready.set()
                    await self._done.wait()
                    self.writer.close()
        finally:
            self._channel.close(linger_ms=LINGER_MS)
            self.ledger.close()
        if self._fatal is not None:
            raise self._fatal
        logger.info("datapipe ends", **dict(self.book.counts))

    async def _register(self, stack: AsyncExitStack) -> None:
        if self._registry is not None:
            value = {"address": self.address, "pid": os.getpid(), "host": socket.gethostname()}
            beat = self.config.cluster.heartbeat_s
            name = self._registry.registered("datapipe", "0", lambda: value, heartbeat_s=beat)
            await stack.enter_async_context(name)

    def _restore(self) -> None:
        """Give leases from before a restart back to their workers, which may still run them."""
        owners = dict(self.ledger.connection.execute("SELECT lease_id, worker_id FROM leases"))
        for group in self.book.groups.values():
            for lease in list(group.leases.values()):
                if due := group.due(lease):
                    self.workers.restore(owners[lease.lease_id], lease, due)
                else:
                    self.book.lose(lease)

    async def _guard(self, body: Callable[[], Awaitable[None]]) -> None:
        """A broken invariant does not cancel the rest at once: the trainer is told why first."""
        try:
            await body()
        except InvariantError as error:
            self._stop(error)

    def _stop(self, error: InvariantError) -> None:
        if self._fatal is None:
            logger.error("datapipe stops", reason=str(error))
            self._fatal, self._finished_at = error, time.monotonic()
            for route, request in self._batch_requests.values():
                self._send(route, Refused(wire.request_name(request), str(error)))
            for eval_id, route in self._eval_requests.items():
                self._send(route, Refused(f"EvalRequest {eval_id}", str(error)))

    # ------------------------------------------------------------ messages

    def _send(self, route: bytes, message: msgspec.Struct, payloads: Sequence[bytes] = ()) -> None:
        self._channel.send([route, wire.encode(message), *payloads])

    def _receive(self, frames: list[bytes]) -> None:
        try:
            message = wire.decode_to_datapipe(frames[1])
        except (msgspec.DecodeError, IndexError) as error:
            logger.warning("message of no known kind", error=str(error))
            return
        route = frames[0]
        try:
            match message:
                case Result():
                    self._take_result(route, message, frames[2:])
                case WorkerState():
                    self._take_state(route, message)
                case StatusRequest():
                    counts = {k: int(v) for k, v in self.book.counts.items()}
                    version = -1 if self.book.version is None else self.book.version
                    self._send(route, Status(self.book.next_step, version, counts))
                case _:
                    self._take_request(route, message)
        except InvariantError as error:
            self._stop(error)
        self._pump()

    def _take_state(self, route: bytes, state: WorkerState) -> None:
        again, given_up = self.workers.update(route, state)
        self._lose(given_up)
        for lease in again:
            self._send(route, lease)
        if self._finish is not None:
            self._send(route, Drain(self._finish.reason))
        self._send(route, Ack(""))

    def _take_result(self, route: bytes, result: Result, payloads: list[bytes]) -> None:
        if self._fatal is not None:
            return  # never acknowledged, so the worker keeps it
        if len(payloads) != sum(len(episode.headers) for episode in result.episodes):
            raise InvariantError(f"result {result.result_id} of {result.worker_id} lacks payloads")
        first = 0
        for episode in result.episodes:
            last = first + len(episode.headers)
            self.workers.finish(result.worker_id, episode.lease_id, episode.member)
            if self.evals.find(episode.group_id) is not None:
                self.evals.add(episode)
            else:
                self.book.add(episode, payloads[first:last])
            first = last
        self._progress = time.monotonic()
        self._changed = True
        self.writer.after_commit(lambda: self._send(route, Ack(result.result_id)))
        self._check_failures()

    def _check_failures(self) -> None:
        window, share = self.book.failed_window, self.config.datapipe.max_failed_share
        failure = self.book.first_failure
        if failure is not None and sum(window) > share * (window.maxlen or 1):
            raise InvariantError(
                f"{sum(window)} of the last {len(window)} episodes failed, more than "
                f"datapipe.max_failed_share={share} allows. The first: {failure.failure_class}: "
                f"{failure.detail}"
            )

    def _take_request(self, route: bytes, request: wire.TrainerRequest) -> None:
        self._trainer_heard = time.monotonic()
        if self._fatal is not None:
            self._send(route, Refused(wire.request_name(request), str(self._fatal)))
            return
        match request:
            case BatchRequest():
                self._take_batch_request(route, request)
            case EvalRequest():
                self._take_eval_request(route, request)
            case TrainerStart():
                self.writer.after_commit(lambda: self._begin(route, request))
            case _:
                self._note(request)
                self._changed = True
                done = Done(wire.request_name(request))
                self.writer.after_commit(lambda: self._send(route, done))

    def _note(self, request: StepReport | Published | Checkpointed | Finish) -> None:
        match request:
            case StepReport():
                self._note_step(request)
            case Published():
                self.book.version = request.version
                self.ledger.set_meta("version", str(request.version))
            case Checkpointed():
                self.book.mark_durable(request.step)
                self.ledger.checkpoint(request.step, request.path)
            case Finish():
                self._note_finish(request)

    def _note_step(self, report: StepReport) -> None:
        groups = self.book.batches.get(report.step)
        if groups is None or groups[0].state != "batched":
            if report.step in self.book.trained or report.step < self.book.next_step - 1:
                return  # the answer to the first report was lost
            raise InvariantError(
                f"step {report.step} is reported, but its batch was never composed"
            )
        expected = sorted(h.trajectory_id for group in groups for h in group.headers)
        if sorted(report.trained) != expected:
            wrong = set(report.trained) ^ set(expected)
            raise InvariantError(
                f"step {report.step}: the trainer trained {len(report.trained)} trajectories, the "
                f"batch has {len(expected)}; they differ in {sorted(wrong)[:3]}"
            )
        self.book.mark_trained(report.step)
        self.ledger.train(report)

    def _note_finish(self, finish: Finish) -> None:
        if self._finish is None:
            logger.info("finishing", reason=finish.reason)
            self._finished_at = time.monotonic()
            for worker in self.workers.by_id.values():
                if worker.route is not None:
                    self._send(worker.route, Drain(finish.reason))
        if self._finish is None or self._finish.reason == wire.STOP_WAITING:
            self._finish = finish
        for route, _ in self._batch_requests.values():
            self._send(route, Finished(finish.reason))
        self._batch_requests.clear()

    def _begin(self, route: bytes, start: TrainerStart) -> None:
        """Roll the ledger back to where the trainer begins. Between two commits, so that nobody
        else uses the connection."""
        trained = max([-1, *self.book.trained]) + 1
        (durable,) = self.ledger.connection.execute(
            "SELECT COALESCE(MAX(step), -1) + 1 FROM groups WHERE state IN ('trained', 'durable')"
        ).fetchone()
        if start.step > max(trained, durable):
            self._stop(
                InvariantError(
                    f"the trainer begins at step {start.step}, but {self.ledger.path} knows only "
                    f"{durable} trained steps: checkpoint and ledger are not of one trial"
                )
            )
            assert self._fatal is not None
            self._send(route, Refused(wire.request_name(start), str(self._fatal)))
            return
        rolled = self.book.roll_back(start.step)
        self._batch_requests.clear()
        self._eval_requests.clear()
        self.evals.forget(after=start.step)
        logger.info("training begins", step=start.step, rolled_back_groups=rolled)
        self._send(route, TrainerReady(start.step, rolled))
        self._changed = True
        self._pump()

    def _take_eval_request(self, route: bytes, request: EvalRequest) -> None:
        eval_id = request.eval_id
        if eval_id in self.evals.results:
            self._send(route, EvalResult(eval_id, self.evals.results[eval_id]))
            return
        if eval_id not in self.evals.runs:
            self._progress = time.monotonic()
            self.evals.begin(eval_id)
        self._eval_requests[eval_id] = route

    def _take_batch_request(self, route: bytes, request: BatchRequest) -> None:
        if self._finish is not None:
            self._send(route, Finished(self._finish.reason))
        elif request.step > self.book.next_step:
            raise InvariantError(
                f"rank {request.rank} asks for batch {request.step}, but the next one is "
                f"{self.book.next_step}"
            )
        elif request.step == self.book.next_step or request.step in self.book.batches:
            if not self._batch_requests:
                self._progress = time.monotonic()
            self._changed = True
            self._batch_requests[request.rank] = (route, request)

    # ------------------------------------------------------------ what follows from them

    def _pump(self) -> None:
        """Give leases, compose the next batch, answer who can be answered."""
        if self._fatal is not None:
            return
        if self._finish is None:
            self._give_leases()
        for eval_id, metrics in self.evals.take_finished():
            self.ledger.add_eval(eval_id, metrics)
            route = self._eval_requests.pop(eval_id)
            result = EvalResult(eval_id, metrics)
            self.writer.after_commit(lambda route=route, result=result: self._send(route, result))
        if self._batch_requests and self._changed:
            self._changed = False
            self._answer_batches()

    def _give_leases(self) -> None:
        while (worker := self.workers.most_idle()) is not None:
            version, boot = self.book.version, self.ledger.boot
            if version is None:
                return
            lease = self.evals.lease(boot=boot, version=version, credit=worker.credit)
            if lease is None:
                group = self.book.next_offer()
                if group is None:
                    return
                lease = self.book.lease(group, worker_id=worker.worker_id, credit=worker.credit)
            self.workers.give(worker, lease)
            route = cast(bytes, worker.route)
            self.writer.after_commit(lambda route=route, lease=lease: self._send(route, lease))

    def _answer_batches(self) -> None:
        wanted = any(r.step == self.book.next_step for _, r in self._batch_requests.values())
        if wanted:
            extra = {"loop_lag_max_s": self._lag_max, **self.workers.metrics()}
            if self.batches.compose(extra) is None:
                self.batches.mark(self.batches.cause())
            else:
                self._lag_max = 0.0
        for rank, (route, request) in list(self._batch_requests.items()):
            if request.step in self.book.batches:
                del self._batch_requests[rank]
                self.writer.after_commit(
                    lambda route=route, request=request: self._begin_sending(route, request)
                )

    def _begin_sending(self, route: bytes, request: BatchRequest) -> None:
        self._tasks.create_task(self._guard(lambda: self._send_batch(route, request)))

    async def _send_batch(self, route: bytes, request: BatchRequest) -> None:
        if request.step in self.book.batches:
            batch = self.batches.shard(request)
            ids = [batch.headers[index].trajectory_id for index in batch.mine]
            payloads = await asyncio.to_thread(read_payloads, self.ledger.path, ids)
            self._send(route, batch, payloads)

    def _lose(self, leases: Sequence[Lease]) -> None:
        for lease in leases:
            self.evals.lose(lease)
            self.book.lose(lease)
        self._changed = True

    # ------------------------------------------------------------ the clock

    async def _tick_forever(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._done.is_set():
            due = loop.time() + TICK_S
            await asyncio.sleep(TICK_S)
            self._lag_max = max(self._lag_max, loop.time() - due)
            self._tick(time.monotonic())

    def _tick(self, now: float) -> None:
        for worker, leases in self.workers.expire():
            logger.warning("worker silent", worker=worker.worker_id, leases=len(leases))
            self._lose(leases)
        self._check_stall(now)
        if now - self._told >= WAITING_S:
            self._told = now
            self._tell_waiting()
        self._pump()
        if self._is_over(now):
            self._done.set()

    def _check_stall(self, now: float) -> None:
        limit = self.config.datapipe.stall_timeout_s
        is_due = bool(self._batch_requests or self._eval_requests)
        if is_due and now - self._progress > limit and self._fatal is None:
            self._stop(
                InvariantError(
                    f"no episode finished for {limit:.0f} s (datapipe.stall_timeout_s): "
                    + self.workers.describe()
                )
            )

    def _tell_waiting(self) -> None:
        if self._fatal is not None:
            return
        flight = self.workers.describe()
        for route, request in self._batch_requests.values():
            detail = f"{self.batches.describe(request.step)}, {flight}"
            self._send(route, Waiting(wire.request_name(request), detail))
        for eval_id, route in self._eval_requests.items():
            run = self.evals.runs.get(eval_id)
            detail = f"evaluation {eval_id}: {run.left if run else 0} samples left, {flight}"
            self._send(route, Waiting(f"EvalRequest {eval_id}", detail))

    def _is_over(self, now: float) -> bool:
        waited = now - self._finished_at
        if self._fatal is not None:
            return waited > REFUSE_S
        if self._finish is None or (self.workers.by_id and waited < DRAIN_S):
            return False
        if self._finish.reason == wire.STOP_WAITING:
            return waited > SAVE_S
        return not self.book.trained or now - self._trainer_heard > FAREWELL_S
