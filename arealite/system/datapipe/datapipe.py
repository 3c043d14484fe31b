"""The datapipe process: leases tasks to rollout workers, stores results, serves batches to ranks.

One event loop reacts to messages, to commits of the ledger, and to a clock (every 0.25 s). This
module has all input and output; `machine.py` decides, and `group_store.py` has the state.
"""

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import cast

import msgspec
import zmq

from arealite.api.experiment_config import ExperimentConfig, run_paths
from arealite.api.hooks import DatapipeControl, DatapipeControlMaker
from arealite.api.payloads import to_frames
from arealite.api.rollout_messages import Lease
from arealite.api.task import Task
from arealite.api.trainer_messages import BatchRequest
from arealite.base import entries, log
from arealite.base.errors import InvariantError, UserError
from arealite.base.model_folder import read_json, vocab_size
from arealite.system.data.dataset import identity, make_sampler
from arealite.system.datapipe.effects import (
    AfterCommit,
    AuditLedger,
    BeginTraining,
    Effect,
    FilterGroups,
    Send,
    SendBatch,
    SendLease,
)
from arealite.system.datapipe.eval_scheduler import EvalScheduler
from arealite.system.datapipe.group_store import GroupStore
from arealite.system.datapipe.machine import Machine
from arealite.system.datapipe.workers import ActiveLease, Worker, Workers
from arealite.system.ledger.ledger import Ledger, read_payloads, read_turns
from arealite.system.ledger.writer import LedgerWriter, Upkeep
from arealite.system.links import wire
from arealite.system.names.name_registry import NameRegistry

logger = log.get(__name__)

TICK_S = 0.25
MAX_VOCAB_SIZE = 1 << 31
"""Accepts all token ids, for a model whose config names no size."""
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
        ppo = config.trainer.ppo
        self.ready = asyncio.Event()
        """Set once `address` accepts connections."""
        self.ledger = Ledger(run_paths(config).ledger, fingerprint=identity(config, self.train))
        evals = EvalScheduler(
            list(self.eval)[: ppo.eval.num_prompts or None],
            samples=ppo.eval.samples,
            max_attempts=ppo.max_attempts,
        )
        for eval_id, metrics in self.ledger.connection.execute("SELECT * FROM evals"):
            evals.results[eval_id] = msgspec.json.decode(metrics)
        sampler = make_sampler(config, self.train)
        self.machine = Machine(
            config=config,
            store=GroupStore(self.ledger, self.train, ppo=ppo, sampler=sampler),
            evals=evals,
            workers=Workers(ttl_s=config.datapipe.lease_ttl_s),
            vocab_size=vocab_size(read_json(config.model.path)) or MAX_VOCAB_SIZE,
        )
        self.controls = self._make_controls(self.registry) if self.registry is not None else []
        self._refusals = 0
        """Connections refused because of another secret."""
        self._done = asyncio.Event()

    def _make_controls(self, registry: NameRegistry) -> list[DatapipeControl]:
        """Return what adapts this datapipe while it runs, such as the number of workers."""
        makers: list[DatapipeControlMaker] = entries.hooks("datapipe_control")
        machine = self.machine
        return entries.results(makers, self.config, registry, machine.store, machine.workers)

    # ------------------------------------------------------------ lifecycle

    async def run(self) -> None:
        """Serve until the run is finished and the workers have sent their remaining results.

        Raises:
            InvariantError: a guarantee is broken or the ledger cannot be written; the trainer's
                requests were refused with this error.
        """
        server = self._bind()
        options = self.config.datapipe
        self.writer = LedgerWriter(self.ledger, interval_s=options.commit_interval_s)
        self.upkeep = Upkeep(self.writer, self._done, keep_payloads=options.keep_payloads)
        self._channel = wire.Channel(server, self._receive)
        try:
            async with self._registered(), asyncio.TaskGroup() as self._tasks:
                self._tasks.create_task(self._stop_on_error(self.writer.run), name="ledger writer")
                self._tasks.create_task(self._tick_forever(), name="clock")
                for control in self.controls:
                    self._tasks.create_task(control.run(self._done), name="control")
                logger.info(
                    "datapipe ready",
                    address=self.address,
                    step=self.machine.store.next_step,
                )
                self.ready.set()
                await self._done.wait()
                self.writer.close()
        finally:
            self.machine.close()
            self._channel.close(linger_ms=LINGER_MS)
            self.ledger.close()
        if self.machine.error is not None:
            raise self.machine.error
        logger.info(
            "datapipe ends",
            **dict(self.machine.store.counts),
            rejected_messages=self.machine.requests.rejections.total(),
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
            values = dict(identity)
            for control in self.controls:
                values.update(control.entry())
            return values

        return self.registry.registered("datapipe", "0", entry)

    def _start_task(self, body: Callable[[], Awaitable[None]]) -> None:
        """Run `body` beside the other tasks; an InvariantError stops the datapipe."""
        self._tasks.create_task(self._stop_on_error(body))

    async def _stop_on_error(self, body: Callable[[], Awaitable[None]]) -> None:
        """Run `body`; on an InvariantError, refuse the trainer's requests before the exit."""
        try:
            await body()
        except InvariantError as error:
            self.machine.stop(error)
            self._perform_all()

    # ------------------------------------------------------------ inputs

    def _receive(self, frames: list[bytes]) -> None:
        self.machine.receive(frames)
        self._perform_all()

    async def _tick_forever(self) -> None:
        while not self._done.is_set():
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            self.machine.tick(now)
            self._perform_all()
            self._count_refusals()
            if self.machine.is_over(now):
                self._done.set()

    def _count_refusals(self) -> None:
        """Count connections refused because of another secret; log the first."""
        num_refused = wire.count_refused(self._channel.socket)
        if num_refused and not self._refusals:
            logger.warning("connection refused", why=wire.MISMATCH)
        self._refusals += num_refused

    # ------------------------------------------------------------ effects

    def _perform_all(self) -> None:
        """Perform the effects that the machine has left."""
        for control in self.controls:
            control.take_batch()
        for effect in self.machine.outbox.take():
            if not isinstance(effect, AfterCommit):
                self._perform(effect)
            elif effect.effect is None:
                self.writer.request_commit()
            else:
                durable = partial(self._perform_durable, effect.effect)
                self.writer.after_commit(durable, hurry=effect.hurry)

    def _perform_durable(self, effect: Effect) -> None:
        """Perform an effect between two commits, and what follows from it."""
        self._perform(effect)
        self._perform_all()

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Send():
                self._send(effect.route, effect.message, effect.payloads)
            case SendLease():
                self._send_lease(effect.worker, effect.active)
            case SendBatch():
                self._start_task(partial(self._send_batch, effect.route, effect.request))
            case AuditLedger():
                self._start_task(self.upkeep.run)
            case BeginTraining():
                self.machine.begin_training()
            case FilterGroups():
                self.machine.filter_groups(effect)

    def _send(
        self,
        route: bytes,
        message: msgspec.Struct,
        payloads: Sequence[bytes] = (),
    ) -> None:
        self._channel.send([route, wire.encode(message), *payloads])

    def _send_lease(self, worker: Worker, active: ActiveLease) -> None:
        """Send a lease at once, or if it has stored turns, in a task that reads them."""
        group = self.machine.store.groups.get(active.lease.group_id)
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

    async def _send_batch(self, route: bytes, request: BatchRequest) -> None:
        """Send a rank its shard of a batch, unless the batch was rolled back meanwhile."""
        if request.step not in self.machine.store.batches:
            return
        batch = self.machine.requests.shard(request)
        trajectory_ids = [batch.headers[index].trajectory_id for index in batch.mine]
        payloads = await asyncio.to_thread(read_payloads, self.ledger.path, trajectory_ids)
        prompts, frames = to_frames(payloads)
        self._send(route, msgspec.structs.replace(batch, prompts=prompts), frames)
