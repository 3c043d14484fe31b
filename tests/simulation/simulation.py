"""Simulates one seed: a whole run with its launcher, injected faults, and checks of invariants.

The datapipe, its ledger on a real SQLite file, the rollout workers with their collector, and all
links are real code of the package. The language model, the environment, the trainer's computation,
the launcher and the network are simulated.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from arealite.api.experiment_config import run_paths
from arealite.base.errors import ArealiteError
from arealite.impl.rollout.worker import RolloutWorker
from arealite.system.datapipe.datapipe import Datapipe
from arealite.system.ledger.ledger import Ledger
from arealite.system.links.worker_link import WorkerLink
from tests.simulation.adversary import Adversary
from tests.simulation.checks import Checks
from tests.simulation.launch import Launch
from tests.simulation.loop import ROOT, Killed, Process, Stuck, VirtualLoop, current, end_all
from tests.simulation.network import Network, SimSocket, checksum
from tests.simulation.patches import patched
from tests.simulation.players import Servers, SimClient
from tests.simulation.scenario import Scenario
from tests.simulation.trainer import Disk

TTL_S = 5.0
"""Time for which the registry still returns the name of a dead datapipe."""
BOUND_S = 500.0
"""Virtual seconds in which a run must have ended once there are no more faults."""
_active: list[Simulation] = []


class Violation(Exception):
    """An invariant is broken."""


@dataclass
class Outcome:
    """The result of a seed."""

    seed: int
    violation: str | None
    virtual_s: float
    kills: int
    counts: Counter[str]
    checked: int
    digest: str
    trace: list[str] = field(default_factory=list[str])


def active() -> Simulation:
    """Return the running simulation."""
    return _active[-1]


class Simulation:
    """The simulation of one seed."""

    def __init__(self, scenario: Scenario, root: Path, *, keep_trace: bool = False) -> None:
        self.scenario = scenario
        self.root = root
        self.rng = random.Random(f"run {scenario.seed}")
        self.loop = VirtualLoop(random.Random(f"schedule {scenario.seed}"))
        self.loop.executor_delay = lambda: self.rng.expovariate(1 / 0.003)
        self.network = Network(self.loop, random.Random(f"network {scenario.seed}"))
        self.network.faults.latency_s = scenario.net_latency_s
        self.network.faults.jitter = scenario.net_jitter
        self.network.faults.loss = scenario.loss
        self.network.faults.duplicates = scenario.duplicates
        self.network.trace = self._trace_message
        self.network.on_send = self._on_send
        self.servers = Servers(self, scenario.servers)
        self.dead_servers: set[int] = set()
        self.disk = Disk()
        self.changed = False
        """Whether a launch has changed settings."""
        self.loosest_eta = scenario.oldest
        self.generations = 0
        self.outputs: dict[int, tuple[Any, ...]] = {}
        """By number: prompt, tokens and versions of every generation that returned."""
        self.counts: Counter[str] = Counter()
        self.checks = Checks(self)
        self.expect, self.promise = self.checks.expect, self.checks.promise
        self.check_trained_once = self.checks.check_trained_once
        self.check_views = self.checks.check_views
        self.trainer_starts = self.checks.trainer_starts
        self.adversary = Adversary(self)
        self.processes: list[Process] = []
        self.roles: dict[str, Process] = {}
        """The live process of each role."""
        self.pipe: Datapipe | None = None
        self.worker_links: dict[str, WorkerLink] = {}
        self.full_disk: int | None = None
        self.trace: list[str] | None = [] if keep_trace else None
        self.digest = 0
        self._name: tuple[str, Process] | None = None
        self._died: dict[Process, float] = {}
        self._uuids = 0
        self._ends: dict[Process, asyncio.Future[BaseException | None]] = {}
        self.over = False

    # ------------------------------------------------------------ running a seed

    def run(self) -> Outcome:
        """Simulate the seed to its end; return the result."""
        _active.append(self)
        asyncio.set_event_loop(self.loop)
        self.loop.set_exception_handler(self._on_loop_error)
        violation = None
        try:
            with patched(self):
                try:
                    self.loop.run_until_complete(self._until_failed())
                except (Violation, Stuck) as error:
                    violation = f"{type(error).__name__}: {error}"
                except ExceptionGroup:
                    if self.checks.first is None:
                        raise
                self.over = self.network.down = True
                self.note("over", violation or "ok")
                virtual = self.loop.now - 1000.0
                end_all(self.loop, [*self.processes, self.network.process])
        finally:
            _active.pop()
            asyncio.set_event_loop(None)
            self.loop.close()
        counts = self.counts + self.network.counts
        return Outcome(
            self.scenario.seed, self.checks.first or violation, virtual, counts["kills"], counts,
            self.checks.checked, f"{self.digest:08x}", self.trace or [],
        )  # fmt: skip

    async def _until_failed(self) -> None:
        """Simulate until the end or the first violation."""
        self.failed = asyncio.Event()
        playing = asyncio.ensure_future(self._play())
        failing = asyncio.ensure_future(self.failed.wait())
        await asyncio.wait((playing, failing), return_when=asyncio.FIRST_COMPLETED)
        if not failing.done():
            await playing

    async def _play(self) -> None:
        """Launch repeatedly until the run has trained all steps."""
        adversary = self.adversary.begin()
        try:
            async with asyncio.timeout(self.scenario.fault_s + BOUND_S):
                while not await self._launch():
                    self.counts["launches"] += 1
                    await asyncio.sleep(self.rng.uniform(0.5, 3.0))
                    self.adversary.changes_between_launches()
        except TimeoutError as error:
            raise Violation(f"it hangs: {self.describe_roles()}") from error
        finally:
            adversary.cancel()
        self.checks.final()

    async def _launch(self) -> bool:
        self.launch = Launch(self)
        return await self.launch.run()

    # ------------------------------------------------------------ processes

    async def live(self, name: str, body: Any, process: Process | None = None) -> Any:
        """Run one process to its end; return its error, Killed after a kill, or None."""
        process = process or Process(name)
        self.processes.append(process)
        self.roles[name] = process
        end: asyncio.Future[BaseException | None] = self.loop.create_future()
        self._ends[process] = end
        task = self.loop.spawn(process, body)

        def on_end(done: asyncio.Task[Any]) -> None:
            if not end.done() and not self.over:
                error = asyncio.CancelledError() if done.cancelled() else done.exception()
                self.note("exit", f"{name}: {error!r}"[:200])
                self._forget(process)
                end.set_result(error)

        task.add_done_callback(on_end)
        return await end

    def _forget(self, process: Process) -> None:
        """Clean up after the exit of a process."""
        process.dead, process.runs = True, False
        self.network.kill(process)
        self._died[process] = self.loop.now
        if self.roles.get(process.name) is process:
            del self.roles[process.name]

    # ------------------------------------------------------------ the roles

    async def datapipe(self) -> None:
        """Run the datapipe process."""
        scenario = self.scenario
        pipe = self.pipe = Datapipe(
            config=scenario.experiment(self.root),
            train=scenario.tasks(scenario.rows, "train"),
            eval=scenario.tasks(scenario.eval_rows, "eval"),
            registry=None,
            context=object(),  # type: ignore[arg-type]
        )
        self.checks.opened(pipe)
        naming = asyncio.create_task(self._name_it(pipe))
        try:
            await pipe.run()
        finally:
            naming.cancel()

    async def _name_it(self, pipe: Datapipe) -> None:
        await pipe.ready.wait()
        await asyncio.sleep(self.rng.expovariate(100.0))
        self._name = (pipe.address, current.get(ROOT))

    def resolve(self) -> str | None:
        """Read the datapipe's address; that of a dead datapipe remains for a while."""
        if self._name is None:
            return None
        address, process = self._name
        died = self._died.get(process)
        return None if died is not None and self.loop.now - died > TTL_S else address

    async def worker(self, name: str) -> None:
        """Run a rollout worker process."""
        await asyncio.sleep(self.rng.uniform(0.1, 0.6))  # imports
        link = WorkerLink(
            resolve=self.resolve,
            worker_id=name,
            capacity=self.scenario.concurrency,
            context=object(),  # type: ignore[arg-type]
        )
        self.worker_links[name] = link
        config = self.scenario.experiment(self.root)
        client: Any = SimClient(self)
        tokenizer: Any = object()
        await RolloutWorker(config, link=link, client=client, tokenizer=tokenizer).run()

    def latency(self) -> float:
        """Draw the duration of a piece of a generation."""
        s = self.scenario
        if not self.adversary.calm and self.rng.random() < s.tail_share:
            return min(s.tail_s * self.rng.paretovariate(1.5) / 3.0, 45.0)
        sigma = min(s.sigma, 0.5) if self.adversary.calm else s.sigma
        return s.latency_s * self.rng.lognormvariate(0.0, sigma)

    # ------------------------------------------------------------ deaths

    def kill(self, process: Process, why: str) -> None:
        """Kill a process (SIGKILL): none of its handles runs any more."""
        if process.dead or self.over:
            return
        self.note("kill", f"{process.name} ({why})")
        process.dead, process.runs = True, False
        self._died[process] = self.loop.now
        if self.roles.get(process.name) is process:
            del self.roles[process.name]
        self.network.kill(process)
        if process.name == "datapipe" and self.pipe is not None:
            self._freeze_ledger_file(self.pipe.ledger)
            self.checks.after_crash()
        end = self._ends.get(process)
        if end is not None and not end.done():
            end.set_result(Killed(why))

    def _freeze_ledger_file(self, ledger: Ledger) -> None:
        """Keep the ledger's files as they are now, without the writes of a close."""
        files = [Path(f"{ledger.path}{suffix}") for suffix in ("", "-wal")]
        copies = [(f, Path(f"{f}.kept")) for f in files if f.exists()]
        for file, copy in copies:
            shutil.copyfile(file, copy)
        ledger.connection.close()
        Path(f"{ledger.path}-shm").unlink(missing_ok=True)
        for file, copy in copies:
            os.replace(copy, file)

    def kill_server(self, index: int) -> None:
        """Kill a server; it returns with old weights, and a live publisher updates it."""
        self.servers.set(index, None)
        self.dead_servers.add(index)

        def back() -> None:
            self.dead_servers.discard(index)
            if self.servers.newest is not None and "trainer-0" in self.roles:
                self.servers.set(index, self.servers.newest)

        self.loop.call_later(self.rng.uniform(0.5, 6.0), back)

    def freeze(self, process: Process, seconds: float) -> None:
        """Stop a process (SIGSTOP), and resume it (SIGCONT) later."""
        self.note("freeze", f"{process.name} {seconds:.1f} s")
        process.runs = False
        self.loop.call_later(seconds, self._thaw, process)

    def _thaw(self, process: Process) -> None:
        if not process.dead:
            self.note("thaw", process.name)
            self.loop.wake(process)

    def change(self, scenario: Scenario) -> None:
        """Change batch size, η or policy for the next launch."""
        old, self.scenario = self.scenario, scenario
        if scenario != old:
            told = (scenario.policy, scenario.eta, scenario.num_groups)
            self.note("change", f"{told} from {(old.policy, old.eta, old.num_groups)}")
            self.changed = True
            self.loosest_eta = max(self.loosest_eta, scenario.oldest)
            step = self.disk.newest()[0]
            kept = {s: ids for s, ids in self.checks.batches.items() if s < step}
            self.checks.batches = kept

    def terminate(self, name: str) -> None:
        """Send SIGTERM to a role."""
        process = self.roles.get(name)
        if process is None:
            return
        self.note("term", name)
        if process.on_term is not None:
            self.loop.call_soon(process.on_term, context=_in(process))
        else:
            self.kill(process, "SIGTERM before it listens")

    def on_execute(self, ledger: Ledger, rows: Iterable[Any], execute: Any) -> None:
        """Write a transaction, unless the process dies before, within or after it."""
        if self.over or current.get(ROOT).dead:
            return
        statements = list(rows)
        self.note("write", str(len(statements)))
        if self.full_disk is not None and statements:
            self.full_disk -= 1
            if self.full_disk < 0:
                self.full_disk, self.launch.disk_is_full = None, True
                statements.insert(len(statements) // 2, ("THE DISK IS FULL", ()))
        cut = self.adversary.cut(len(statements))
        if cut is None:
            if statements:  # an empty transaction only takes time
                execute(ledger, statements)
            self.counts["transactions"] += 1
            return
        process = current.get(ROOT)
        if cut > len(statements):
            execute(ledger, statements)
        else:
            with contextlib.suppress(Killed):
                execute(ledger, _cut(statements, cut))
        self.kill(process, f"at statement {cut} of {len(statements)}")
        raise Killed

    def _on_send(self, socket: SimSocket, frames: list[bytes]) -> None:
        if self.over:
            return
        self.checks.sees(socket, frames)
        if self.adversary.dies_at_message(socket.process):
            self.kill(socket.process, "at a message")
            raise Killed

    # ------------------------------------------------------------ telling

    def note(self, what: str, text: str = "") -> None:
        """Add an event to the trace and to its checksum."""
        text = text.replace(str(self.root), "ROOT")
        line = f"{self.loop.now - 1000.0:10.4f} {what} {text}"
        if not what.startswith("log"):
            self.digest = checksum([line.encode()], self.digest)
        if self.trace is not None:
            self.trace.append(line)

    def _trace_message(self, what: str, socket: SimSocket, frames: list[bytes]) -> None:
        own = os.fsencode(self.root)
        self.digest = checksum([frame.replace(own, b"ROOT") for frame in frames], self.digest)
        if self.trace is not None:
            body = frames[1] if socket.connection is None else frames[0]
            line = f"{self.loop.now - 1000.0:10.4f} {what} {socket.process.name} {body[:110]!r}"
            self.trace.append(line)

    def log_config(self) -> dict[str, Any]:
        """Return structlog's settings: write to the trace, or discard."""
        level = logging.DEBUG if self.trace is not None else logging.CRITICAL

        def into_trace(logger: Any, method: str, event: dict[str, Any]) -> Any:
            event.pop("module", None)
            self.note(f"log {current.get(ROOT).name}", f"{event.pop('event', '')} {event}"[:300])
            raise structlog.DropEvent

        return {
            "processors": [into_trace],
            "wrapper_class": structlog.make_filtering_bound_logger(level),
            "logger_factory": structlog.ReturnLoggerFactory(),
            "cache_logger_on_first_use": False,
        }

    def _on_loop_error(self, loop: Any, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if self.over or isinstance(error, Killed) or current.get(ROOT).dead:
            return
        if isinstance(error, ArealiteError):
            return  # of a task whose process ends with it
        self.checks.expect(False, f"{context.get('message')}: {error!r}", throw=False)

    def uuid4(self) -> Any:
        """Return a random id that is the same for each run of the seed."""
        self._uuids += 1
        return type("Id", (), {"hex": f"{self._uuids:032x}"[::-1]})

    def describe_roles(self) -> str:
        """Describe the state of each role, for the report of a hang."""
        parts = [f"{name}{'' if p.runs else ' (frozen)'}" for name, p in self.roles.items()]
        text = "live: " + ", ".join(parts)
        if self.pipe is not None and "datapipe" in self.roles:
            store = self.pipe.machine.store
            text += (
                f"; next step {store.next_step}, version {store.version}, {dict(store.counts)}, "
            )
            text += self.pipe.machine.workers.describe()
        return text + f"; servers {self.servers.versions}"


def _cut(statements: list[Any], at: int) -> Iterable[Any]:
    yield from statements[:at]
    raise Killed


def _in(process: Process) -> Any:
    from tests.simulation.loop import context_of

    return context_of(process)


def simulate(seed: int, *, keep_trace: bool = False, **changes: Any) -> Outcome:
    """Simulate one seed in its own temporary folder."""
    from dataclasses import replace

    scenario = replace(Scenario.draw(seed), **changes)
    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    root = Path(tempfile.mkdtemp(prefix="arealite-sim-", dir=base))
    try:
        return Simulation(scenario, root, keep_trace=keep_trace).run()
    finally:
        shutil.rmtree(root, ignore_errors=True)


def ledger_of(sim: Simulation) -> Path:
    """Return the path of a simulation's ledger."""
    return run_paths(sim.scenario.experiment(sim.root)).ledger
