"""Updates all servers to a published version: pause, send weights, continue, confirm.

This is the base class of the publishers `disk` and `distributed`, which add the transfer of
weights. An event loop in a separate thread updates servers that register late, restart or recover
while the trainer computes.
"""

import asyncio
import threading
import time
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import closing, suppress
from pathlib import Path
from typing import TypeVar

from arealite.api.engine import Named, TrainEngine
from arealite.api.experiment_config import ExperimentConfig, run_paths
from arealite.api.llm_server import UNTRUSTED
from arealite.api.publisher import PolicyProof, PublishReport, WeightPublisher
from arealite.api.server_protocol import SERVER_START_S
from arealite.base import log
from arealite.base.errors import InvariantError, RoleError, UserError
from arealite.base.model_folder import ModelTensors, Shapes, read_shapes
from arealite.impl.http_client import Pool
from arealite.impl.publisher.control import (
    CONTINUE_S,
    FAILURES,
    ServerControl,
    ServerRefusal,
    control_of,
)
from arealite.impl.publisher.loop_thread import LoopThread
from arealite.system.health.waits import cancel_all
from arealite.system.names.name_registry import NameRegistry

logger = log.get(__name__)

WATCH_S = 1.0
"""Seconds between two comparisons of the registered servers with the newest version."""
RETRY_S = 0.25
"""Pause between attempts while no server has confirmed a version."""
PROOF_ATTEMPTS = 2
"""Updates of a server to one version after which its weights must be those of the version."""
PROOF_S = 5.0
"""Longest wait for the first proof of a server, and for the first one after a failed proof."""
LATER_PROOF_S = 0.25
"""Longest wait for a later proof, or PROOF_SHARE of the time since the proof before. A server with
a long queue answers later, and gets traffic meanwhile."""
PROOF_SHARE = 0.01
GRACE_S = 1.0
"""After the first failure in a step of an update, the other servers have this many seconds to
finish the step."""

T = TypeVar("T")
Servers = Sequence[ServerControl]
ServerAction = Callable[[ServerControl], Awaitable[None]]


class PartialUpdate(Exception):
    """A server failed during an update and is quarantined; the others may have partial weights."""


class ServersUpdate:
    """One update of servers, step by step: `pause` or `begin`, `send` (once or more), `finish`.

    The caller holds the servers' locks during all steps. The whole update may take `timeout_s`.
    After a failed step, the servers that are quarantined or still have complete old weights are
    continued. A server with partial weights stays paused until the next update.
    """

    def __init__(self, publisher: "ServersPublisher", servers: Servers, version: int) -> None:
        self._publisher = publisher
        self._servers = servers
        self._version = version
        self._until = 0.0
        """Deadline of the update, in the loop's time."""

    async def pause(self) -> None:
        """Pause the servers.

        Raises:
            PartialUpdate: A server failed.
        """
        self.begin()
        await self.send(lambda server: server.pause(self._publisher.config.pause_mode))

    def begin(self) -> None:
        """Begin an update during which the servers generate."""
        timeout_s = self._publisher.config.timeout_s
        self._until = asyncio.get_running_loop().time() + timeout_s
        for server in self._servers:
            server.confirmed_version = None

    async def send(self, action: ServerAction) -> None:
        """Run an action for all servers concurrently, such as the transfer of some weights.

        Raises:
            PartialUpdate: A server failed.
        """
        try:
            await self._publisher.on_all(self._servers, self._until, action)
        except PartialUpdate:
            self._publisher.resume_complete(self._servers)
            raise

    async def finish(self) -> None:
        """Continue the servers, which have all weights now, and confirm the version."""
        finishing = [
            self._publisher.finish(server, self._version, self._until) for server in self._servers
        ]
        await asyncio.gather(*finishing)


class ServersPublisher(WeightPublisher):
    """Keeps every registered server at the newest version; a subclass transfers the weights."""

    def __init__(self, config: ExperimentConfig, engine: TrainEngine) -> None:
        """Start watching the servers of the trial."""
        self.config = config.trainer.ppo.publisher
        self.host = config.cluster.host
        self.registry = NameRegistry.of(config)
        self.paths = run_paths(config)
        self.model_path = Path(config.model.path).expanduser()
        self.unused: frozenset[str] = getattr(engine, "unused_tensors", frozenset())
        self.newest: int | None = None
        """The version that every server should hold."""
        self.shapes: Shapes = {}
        """Shapes of the tensors that are sent; {} before the first version."""
        self.num_bytes = 0
        self.stage_s = 0.0
        self._servers: dict[tuple[str, object], ServerControl] = {}
        """The control of each server process; a key is (address, process id)."""
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """The lock of each server's id. A restarted server has a new control, and the update of
        the old one may still be running, perhaps at the new process."""
        self._stop = asyncio.Event()
        self._closed = False
        self._closing = threading.Lock()
        self._ready: Future[None] = Future()
        self._thread = LoopThread("publisher", self._main)
        wait([self._ready, self._thread.ended], return_when=FIRST_COMPLETED)

    # ------------------------------------------------------------ called by the trainer

    def push(self, version: int) -> PublishReport:
        confirmed, quarantined = self.call(self.push_all(version))
        report = PublishReport(
            version=version,
            stage_s=self.stage_s,
            pause_s=max((server.report.pause_s for server in confirmed), default=0.0),
            load_s=max((server.report.load_s for server in confirmed), default=0.0),
            continue_s=max((server.report.continue_s for server in confirmed), default=0.0),
            stall_s=max((server.report.stall_s for server in confirmed), default=0.0),
            num_bytes=self.num_bytes,
            servers=len(confirmed),
            quarantined=quarantined,
        )
        logger.info(
            "weights published",
            version=version,
            servers=report.servers,
            stall_s=report.stall_s,
        )
        return report

    @property
    def needs_republish(self) -> bool:
        """Always False; raises if every server ignores the newest version."""
        servers = [*self._servers.values()]
        if servers and all(is_refuted(server, self.newest) for server in servers):
            raise InvariantError(
                f"no server generates from version {self.newest}, which each one confirmed "
                f"{PROOF_ATTEMPTS} times. {_errors(servers)}. "
                "(Off: trainer.ppo.publisher.canary=false)"
            )
        return False

    def close(self) -> None:
        with self._closing:
            self._closed = True
        self._thread.stop(self._stop.set, self.config.timeout_s + 10.0)

    # ------------------------------------------------------------ for subclasses

    @abstractmethod
    async def update_server(self, server: ServerControl, version: int) -> None:
        """Update a connected server, or check that `stage` can; the caller holds its lock.

        Raises:
            PartialUpdate: The server failed and is quarantined.
            RoleError, OSError: This publisher cannot update the server.
        """

    def call(self, job: Coroutine[object, object, T]) -> T:
        """Run a coroutine in the publisher's thread; return its result."""
        return self.submit(job).result()

    def submit(self, job: Coroutine[object, object, T]) -> Future[T]:
        """Start a coroutine in the publisher's thread."""
        with self._closing:
            ended = self._thread.ended
            if self._closed or ended.done():
                job.close()
                thread_error = ended.exception() if ended.done() else None
                cause = f": {thread_error!r}" if thread_error else ""
                raise RoleError(
                    f"the publisher was closed before version {self.newest} was pushed{cause}"
                )
            return asyncio.run_coroutine_threadsafe(job, self._thread.loop)

    def checked(self, weights: Iterator[Named]) -> Iterator[Named]:
        """Yield the tensors; count their bytes and check their names and shapes.

        Raises:
            UserError: The tensors are not those of `model_path`, or of the version before.
            RoleError: The folder cannot be read. A restarted trainer may read it.
        """
        expected = ModelTensors(
            shapes=self.shapes or read_shapes(self.model_path),
            owner="the version before" if self.shapes else self.model_path,
            unused=self.unused,
        )
        shapes = dict[str, list[int]]()
        num_bytes = 0
        for name, tensor in weights:
            shapes[name] = list(tensor.shape)
            # Checked here, because `distributed` sends each tensor at once.
            _refuse(expected.mismatch(name, shapes[name]))
            num_bytes += tensor.nbytes
            yield name, tensor
        _refuse(expected.difference(shapes))
        self.shapes = shapes
        self.num_bytes = num_bytes

    async def on_all(self, servers: Servers, until: float, do: ServerAction) -> None:
        """Run an action for all servers concurrently, and quarantine the servers that fail.

        Args:
            servers: Their locks are held.
            until: Deadline of the action, in the loop's time.
            do: The action. If one fails, the others are cancelled after GRACE_S.

        Raises:
            PartialUpdate: A server failed.
        """

        async def run_limited(server: ServerControl) -> None:
            left_s = max(0.1, until - asyncio.get_running_loop().time())
            with server.time_limit(f"{server.id} to take weights", left_s):
                await do(server)

        tasks = {asyncio.ensure_future(run_limited(server)): server for server in servers}
        try:
            _, late = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if late:
                await asyncio.wait(late, timeout=GRACE_S)
        finally:
            await cancel_all(tasks)
        errors: dict[ServerControl, BaseException] = {}
        for task, server in tasks.items():
            error = None if task.cancelled() else task.exception()
            if error is not None:
                errors[server] = error
        # If some servers gave no answer, the refusals of the others are a consequence of that.
        no_refusals = {
            server: error
            for server, error in errors.items()
            if not isinstance(error, ServerRefusal)
        }
        blamed = no_refusals or errors
        for server, error in blamed.items():
            if not isinstance(error, FAILURES):
                raise error
            self._quarantine(server, error)
            server.failures += 1
            pause_s = min(2.0 ** min(server.failures, 10), self.config.timeout_s)
            server.retry_at = time.monotonic() + pause_s
        if blamed:
            raise PartialUpdate

    async def push_all(self, version: int) -> tuple[list[ServerControl], list[str]]:
        """Update every server in traffic to `version`; retry until one server confirms it.

        Returns:
            The servers that confirmed it, and the ids of servers that failed. The first list may be
            empty if `needs_republish`.

        Raises:
            RoleError: No server confirmed it in `timeout_s`; the message has each server's error.
                Without a registered server, the limit is SERVER_START_S: all may be starting.
            InvariantError: Every server confirmed it, but has other weights.
        """
        begin = time.monotonic()
        while True:
            servers = await self._find_servers()
            candidates = [server for server in servers if server.error is None] or servers
            await asyncio.gather(*(self._update_if_stale(server) for server in candidates))
            confirmed = [server for server in candidates if server.confirmed_version == version]
            if confirmed or self.needs_republish:
                return confirmed, [server.id for server in servers if server.error]
            limit_s = self.config.timeout_s if servers else SERVER_START_S
            if time.monotonic() - begin >= limit_s:
                errors = _errors(servers)
                if not errors:
                    errors = f"None is registered in {self.registry.root}; start one."
                raise RoleError(
                    f"no server confirmed version {version} in {limit_s:g} s "
                    f"(trainer.ppo.publisher.timeout_s). {errors}"
                )
            await asyncio.sleep(RETRY_S)

    # ------------------------------------------------------------ in the publisher's thread

    async def _main(self) -> None:
        self._pool = Pool(CONTINUE_S)
        self._tasks = asyncio.TaskGroup()
        with closing(self._pool):
            async with self._tasks:
                self._tasks.create_task(self._watch(), name="watch servers")
                self._ready.set_result(None)
                try:
                    await self._stop.wait()
                finally:
                    await cancel_all(asyncio.all_tasks() - {asyncio.current_task()})
                    servers = self._servers.values()
                    resumed = [server.resume() for server in servers if server.is_paused]
                    await asyncio.gather(*resumed, return_exceptions=True)

    async def _watch(self) -> None:
        """Update late, restarted and failed servers, every WATCH_S."""
        while True:
            await asyncio.sleep(WATCH_S)
            for server in await self._find_servers():
                if not server.lock.locked():
                    update = self._update_if_stale(server, verify=True)
                    self._tasks.create_task(update, name=f"update {server.id}")

    async def _find_servers(self) -> list[ServerControl]:
        """Return the registered servers; a restarted server gets a new object without state."""
        entries = await asyncio.to_thread(self.registry.list, "llm_server")
        entry_of_process = {
            (str(entry.value["address"]), entry.value.get("pid")): entry for entry in entries
        }
        for process in self._servers.keys() - entry_of_process.keys():
            self._servers.pop(process).clear_foreign_pause()
        for process, entry in entry_of_process.items():
            if process not in self._servers:
                self._servers[process] = control_of(
                    entry.value,
                    id=entry.id,
                    lock=self._locks[entry.id],
                    pool=self._pool,
                    unused=self.unused,
                    folder=str(entry.value.get("model_path") or ""),
                    serves_adapters="adapters" in entry.value,
                    headers=self.registry.headers(str(entry.value.get("type") or "")),
                )
            self._servers[process].listed_version = str(entry.value.get("version"))
        return [self._servers[process] for process in entry_of_process]

    async def _update_if_stale(self, server: ServerControl, *, verify: bool = False) -> None:
        """Update one server unless it holds the newest version.

        Args:
            verify: compare the version that the server reports now, and end pauses by others.
        """
        async with server.lock:
            version = self.newest
            if version is None or is_refuted(server, version):
                return
            try:
                if await server.holds(version, verify=verify):
                    if verify:
                        await server.end_foreign_pause(resume=self.config.continue_paused)
                    return
                server.confirmed_version = None
                with server.time_limit(f"{server.id} to answer", self.config.timeout_s):
                    await server.connect(self.shapes)
                await self.update_server(server, version)
            except PartialUpdate:
                return
            except FAILURES as error:
                self._quarantine(server, error)
            if verify and server.confirmed_version == version:
                logger.info("server updated", server=server.id, version=version)

    async def finish(self, server: ServerControl, version: int, until: float) -> None:
        """Continue a server that has all weights of a version; quarantine it if it fails.

        Args:
            until: Deadline, in the loop's time.
        """
        try:
            left_s = max(server.status_s, until - asyncio.get_running_loop().time())
            with server.time_limit(f"{server.id} to finish an update", left_s):
                await server.finish(version)
        except FAILURES as error:
            self._quarantine(server, error)
            return
        if self.proof is not None:
            proof = self._tasks.create_task(self._prove(self.proof, server, version))
            wait_s = PROOF_S
            if server.proven_at is not None:
                elapsed_s = time.monotonic() - server.proven_at
                wait_s = max(LATER_PROOF_S, PROOF_SHARE * elapsed_s)
            await asyncio.wait({proof}, timeout=wait_s)

    async def _prove(self, proof: PolicyProof, server: ServerControl, version: int) -> None:
        """Quarantine a server that has confirmed a version, but generates from other weights."""
        fault = await proof.fault(server.id, version, server.generate)
        if not fault:
            server.proven_at = time.monotonic()
        elif server.confirmed_version == version:
            server.proven_at = None
            server.serves_adapters &= not server.adapter  # next, it gets merged weights
            server.refuted_versions.append(version)
            self._quarantine(server, RoleError(fault))
            with suppress(*FAILURES), server.time_limit("a new label", server.status_s):
                await server.relabel(UNTRUSTED, abort=True)

    def _quarantine(self, server: ServerControl, error: Exception) -> None:
        """Note that a server's update has failed; continue the server if it may be continued."""
        message = f"{type(error).__name__}: {error}"
        if message != server.error:
            logger.warning("server quarantined", server=server.id, error=str(error))
        server.confirmed_version = None
        server.error = message
        self._tasks.create_task(self._resume(server))

    def resume_complete(self, servers: Servers) -> None:
        """Continue the servers that have complete weights, in tasks of their own."""
        for server in servers:
            if not server.broken:
                self._tasks.create_task(self._resume(server))

    async def _resume(self, server: ServerControl) -> None:
        async with server.lock:
            if server.is_paused:
                with suppress(*FAILURES):
                    await server.resume()


def _errors(servers: Servers) -> str:
    """Return the error of each server."""
    return "; ".join(f"{server.id} at {server.address}: {server.error}" for server in servers)


def is_refuted(server: ServerControl, version: int | None) -> bool:
    """Return whether further updates to a version are useless, because the server ignores them."""
    if version is None:
        return False
    return server.refuted_versions.count(version) >= PROOF_ATTEMPTS


def _refuse(difference: str) -> None:
    """Raise UserError for a difference of tensors, as a restart would fail in the same way."""
    if difference:
        raise UserError(f"tensors differ: {difference}. The model cannot be published to servers.")
