"""The local launcher: supervises every role of a run as a child process, until the run ends.

A run ends when the trainer finishes, when the restart budget of a role is spent, or when the user
stops it. In all three cases no child survives.
"""

import asyncio
import math
import os
import signal
import sys
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from pathlib import Path

from arealite.api.experiment_config import ExperimentConfig, name_dir, run_paths
from arealite.api.findings import Finding
from arealite.api.hooks import LedgerAudit
from arealite.api.launcher import Launcher
from arealite.api.launcher_hooks import RunCompanion, RunFailed
from arealite.base import entries, exit_record
from arealite.base.errors import ArealiteError, RoleError, UserError, one_line
from arealite.base.exit_record import ExitRecord
from arealite.base.files import remove_unlocked
from arealite.base.signals import on_stop
from arealite.base.trial_files import TMPFS
from arealite.impl.launcher import processes, supervisor
from arealite.impl.launcher.processes import Child, NewProcesses, RoleStarter, starters
from arealite.impl.launcher.progress import RunProgress
from arealite.impl.launcher.supervisor import Role, RoleFailed, Supervisor
from arealite.system.health import vitals, waits
from arealite.system.health.vitals import STACKS_REQUEST, read_roles
from arealite.system.names.name_registry import NameRegistry

REFRESH_S = 0.5
REPORTED = ("dead", "crashing")
"""Causes that the supervisor reports for its own roles, so that the health monitor does not."""
STOPPED = 130
"""Exit code of a run that the user stopped."""
OUT_OF_BALANCE = "the ledger is out of balance"


class LocalLauncher(Launcher, Supervisor):
    """Starts, restarts and ends the roles of one experiment on this machine."""

    stop = signal.SIGTERM
    """Signal that requests a child to exit."""
    is_remote = False
    """Whether roles run on other hosts; a finding's process is then not the child itself."""

    def __init__(self, config: ExperimentConfig) -> None:
        Launcher.__init__(self, config)
        Supervisor.__init__(self, lambda line: self.progress.say(line))
        self.options = config.launcher
        self.paths = run_paths(config)
        self.vitals = name_dir(config) / "vitals"
        self.progress = RunProgress(
            self.paths.metrics,
            config.trainer.ppo.total_steps,
            evaluates=config.evaluates,
        )
        if not config.trainer.is_offline:  # a resumed run may have no step left to train
            self.progress.newest = max(self.paths.starts, default=0)
        self.trained = asyncio.Event()
        """Set after the last step, or when the user stops the run: ranks may exit."""
        self.over = asyncio.Event()
        """Set after the last evaluation, or when the user stops the run: all roles may exit."""
        self.datapipe = self._role("datapipe-0")
        ranks = [f"trainer-{rank}" for rank in range(self.options.trainer_ranks)]
        self.trainer = self._role(*ranks, leads=True)
        self.roles = [self.trainer]
        if not config.trainer.is_offline:
            servers = self._roles("llm_server", self.options.llm_servers)
            rollouts = self._roles("rollout", self.options.rollout_workers)
            self.roles = [*servers, self.datapipe, *rollouts, self.trainer]
        self._stops = 0
        """Number of stop requests by the user."""
        self._end = ""
        """The error that ended the run."""
        self._names = NameRegistry.of(config)
        self._rank_failures: dict[tuple[ExitRecord, float], Child] = {}
        """The first death of the ranks by an exception after a number of steps."""
        self.local_ranks = self.options.trainer_ranks
        """Number of ranks on this host; they have its first GPUs."""
        self.starter: RoleStarter | None = None
        """Set with the first role."""
        self._on_start: list[RunCompanion] = entries.hooks("run_started")
        self._audits: list[LedgerAudit] = []
        if not config.trainer.is_offline:
            self._audits = entries.hooks("ledger_audit")

    def _role(self, *names: str, leads: bool = False) -> Role:
        return Role(
            names=names,
            budget=supervisor.Budget(limit=self.options.max_restarts, role=names[0]),
            leads=leads,
            over=self.trained if leads else self.over,
        )

    def _roles(self, kind: str, count: int) -> list[Role]:
        return [self._role(f"{kind}-{index}") for index in range(count)]

    def run(self) -> int:
        """Run until the end.

        Returns:
            0 if the run finished, 130 if the user stopped it, else the failed role's exit code.
        """
        return asyncio.run(self._run())

    async def _run(self) -> int:
        loop = asyncio.get_running_loop()
        self.paths.end.unlink(missing_ok=True)
        on_stop(loop, self._on_stop)
        vitals.watch(loop)
        companions = entries.results(self._on_start, self.config, self.say)
        self._companions = [asyncio.ensure_future(self._accompany(work)) for work in companions]
        servers = ["llm_server"] if self.options.llm_servers else []  # else started separately
        kinds = ("datapipe", "rollout", "trainer", *servers)
        await asyncio.to_thread(clear_leftovers, self.config, *kinds)
        with self.progress.shown():
            silent_s = self.options.silent_s
            blocked_s = self.options.blocked_s
            try:
                with self.monitored(self.vitals, silent_s=silent_s, blocked_s=blocked_s):
                    code = await self._supervise_all()
            finally:
                grace_s = 0.0 if self._stops > 1 else processes.TERMINATE_GRACE_S
                await processes.end_all(self.children, self.stop, grace_s=grace_s)
                if self.starter is not None:
                    self.starter.close()
                await asyncio.to_thread(clear_leftovers, self.config, *kinds)
            self.progress.poll()
        return await asyncio.to_thread(self._close, code)  # a large ledger would block the loop

    async def _accompany(self, work: Coroutine[object, object, None]) -> None:
        """Await a companion of the run (hook `run_started`), whose error does not end the run."""
        try:
            await work
        except Exception as error:  # noqa: BLE001  (of any package)
            self.say(f"warning: {one_line(error)}")

    def is_shown(self, finding: Finding) -> bool:
        """Return whether to report a finding. The supervisor reports deaths of its own roles."""
        is_own = any(finding.blocker in role.names for role in self.roles)
        return finding.cause != "starting" and not (is_own and finding.cause in REPORTED)

    def child_of(self, finding: Finding) -> Child | None:
        """Return the child that a finding is about; None if it may be about a predecessor."""
        if not self.is_remote:
            return super().child_of(finding)
        latest_start = time.monotonic() - self.options.silent_s
        for child in self.children:
            is_named = child.running and child.name == finding.blocker
            if is_named and child.started < latest_start:
                return child
        return None

    # ------------------------------------------------------------ starting

    def command(self, role: str, index: int) -> list[str]:
        """Return the command line of one role. Other launchers put their own words before it."""
        arealite = [sys.executable, "-m", "arealite.cli.main"]
        if role == "llm_server":
            return [*arealite, "serve-llm", str(self.paths.server)]
        return [*arealite, "role", role, str(index), str(self.paths.root)]

    async def start(self, role: Role) -> None:
        """Start all processes of a role."""
        if role.children:
            await asyncio.to_thread(clear_leftovers, self.config)
        threads = processes.threads(self.options.trainer_threads)
        role.children = []
        environments: list[dict[str, str]]
        if role is self.trainer:
            address, local_ranks = await self.rank_places()
            environments = processes.rank_environments(
                len(role.names),
                address=address,
                local=local_ranks,
            )
        else:
            environments = [{} for _ in role.names]
        for name, environment in zip(role.names, environments, strict=True):
            kind, index = name.split("-")
            (self.vitals / f"{name}.json").unlink(missing_ok=True)  # a predecessor's
            child = await self.spawn(
                name,
                self.command(kind, int(index)),
                self.paths.logs / f"{name}.log",
                threads | environment,
            )
            role.children.append(child)

    async def spawn(self, name: str, words: Sequence[str], log: Path, env: dict[str, str]) -> Child:
        """Start one process of a role; servers share the GPUs that local ranks do not use."""
        role, _, index = name.rpartition("-")
        if role == "llm_server":
            env = env | {supervisor.ROLE: name}
            env |= processes.server_gpus(
                int(index),
                self.options.llm_servers,
                ranks=self.local_ranks,
            )
        if self.starter is None:
            self.starter = self._make_starter()
        return await self.starter.start_role(name, words, log=log, env=env)

    def _make_starter(self) -> RoleStarter:
        """Return what starts the roles of this host."""
        if self.is_remote:
            return NewProcesses()
        has_torch = self.trainer in self.roles or self.options.llm_servers > 0
        return starters().of_run(self.config, has_torch=has_torch)

    async def rank_places(self) -> tuple[str, Sequence[int]]:
        """Return `address` and `local` of `rank_environments`."""
        return "", ()

    # ------------------------------------------------------------ watching

    async def supervise(self, role: Role) -> None:
        """Supervise a role until it has ended as planned."""
        await super().supervise(role)
        if role.leaving:  # its exit does not end the run
            self.roles.remove(role)
            return
        role.ended = True
        if role is self.trainer:
            self.over.set()
            self._terminate("llm_server")
        if role is self.datapipe:
            self._terminate("rollout")  # a worker that started late received no end message

    def is_needed(self, role: Role, dead: Child) -> bool:
        """Return whether to restart a role that died.

        Raises:
            RoleFailed: a restart would fail the same way, or the run is being stopped.
        """
        if role.leaving:
            return False
        if dead.code in supervisor.STOPPING:
            raise RoleFailed(dead.exit_report, dead.code)
        if self.trainer.ended or self.datapipe.ended:  # all steps are trained
            if dead.code != -self.stop:
                self.say(f"{dead.exit_summary}; no longer needed")
            return False
        if self._stops and role is self.trainer:
            code = STOPPED if dead.code == -self.stop else max(dead.code, 1)
            raise RoleFailed(f"{dead.exit_summary} while the run was being stopped", code)
        if role is self.trainer and dead.code > 0:
            self._check_ranks(dead)
        return True

    def _check_ranks(self, dead: Child) -> None:
        """Check that no rank ended as one did before, without a trained step in between.

        Raises:
            RoleFailed: one did, by an exception that a restart does not cure.
        """
        for rank in self.trainer.children:
            record = rank.failure_record
            if record is not None and record.is_repeatable:
                first = self._rank_failures.setdefault((record, self.mark()), dead)
                if first is not dead:
                    raise RoleFailed(f"twice at the same step: {rank.exit_report}", rank.code)

    def mark(self) -> float:
        """Return the number of trained steps."""
        self.progress.poll()
        return self.progress.newest

    def is_up(self, role: Role) -> bool:
        """Return whether all processes of a role have vitals; servers are not checked here."""
        names = [name for name in role.names if "server" not in name]
        files = [self.vitals / f"{name}.json" for name in names]
        return all(file.exists() for file in files)

    async def _rescale(self) -> list[Role]:
        """Stop workers that the datapipe no longer needs; return a new one if it needs more."""
        options = self.options
        if options.max_workers <= options.rollout_workers or self.over.is_set():
            return []
        for entry in await asyncio.to_thread(self._names.list, "datapipe"):
            return self._resized(entry.value.get("workers", 0))
        return []

    def _resized(self, wanted: int) -> list[Role]:
        """Stop workers beyond the number that the datapipe wants; return a new one below it.

        Args:
            wanted: Number of workers; 0: the datapipe wants no change.
        """
        workers = {name: role for role in self.roles for name in role.names if "rollout" in name}
        num_wanted = min(wanted or len(workers), self.options.max_workers)
        for name, role in workers.items():
            worker_number = int(name.rpartition("-")[2])
            if worker_number >= num_wanted and not role.leaving:
                role.leaving = True
                self.say(f"{name} is stopped: fewer workers are needed")
                for child in role.children:
                    child.send(self.stop)
        if len(workers) >= num_wanted:
            return []
        names = [f"rollout-{number}" for number in range(num_wanted)]
        free_name = next(name for name in names if name not in workers)
        added = self._role(free_name)
        self.roles.append(added)
        self.say(f"{free_name} is started: the other workers are full")
        return [added]

    async def _supervise_all(self) -> int:
        """Supervise every role until all have ended or one cannot be restarted.

        Returns:
            The exit code of the run.
        """
        self._tasks = {asyncio.ensure_future(self.supervise(role)) for role in self.roles}
        try:
            await self._until_ended()
        except ArealiteError as error:
            if error.exit_code not in (UserError.exit_code, STOPPED):
                await self._explain()
            exit_record.write(error)
            self.say(f"error: {error}")
            self._end = str(error)
            return error.exit_code
        finally:
            await waits.cancel_all(self._tasks)
        return STOPPED if self._stops else 0

    async def _until_ended(self) -> None:
        """Wait until all roles have ended, at most `drain_timeout_s` after the first of them."""
        loop = asyncio.get_running_loop()
        deadline = None
        while self._tasks and self._stops < 2:
            done, _ = await asyncio.wait(
                self._tasks,
                timeout=REFRESH_S,
                return_when=asyncio.FIRST_COMPLETED,
            )
            for task in done:
                self._tasks.remove(task)
                task.result()
            for role in await self._rescale():
                self._tasks.add(asyncio.ensure_future(self.supervise(role)))
            self.progress.poll()
            if self.progress.trained:
                self.trained.set()
            if self.progress.finished:
                self.over.set()
            # After the trainer's last step, any role may end first.
            is_ending = self._stops > 0 or any(role.ended for role in self.roles)
            if deadline is None and is_ending:
                deadline = loop.time() + self.options.drain_timeout_s
            if deadline is not None and loop.time() > deadline and self._tasks:
                names = ", ".join(child.name for child in self.children if child.running)
                raise RoleFailed(
                    f"{names} did not exit within {self.options.drain_timeout_s:g} s; killed.",
                    1,
                )

    async def _explain(self) -> None:
        """Print what extensions say about the failure, before the roles are stopped."""
        with suppress(Exception):  # an error here must not hide the reason of the run's end
            explanations: list[RunFailed] = entries.hooks("run_failed")
            for explain in explanations:
                text = await asyncio.to_thread(explain, self.vitals, self.paths.logs)
                if text:
                    self.say(text)

    # ------------------------------------------------------------ ending

    def _on_stop(self, number: int) -> None:
        self._stops += 1
        self.trained.set()
        self.over.set()
        if self._stops == 1:
            self.say("stopping after this step, with a checkpoint (again: stop now)")
            self._terminate("trainer")

    def _terminate(self, role: str) -> None:
        for child in self.children:
            if child.name.startswith(role) and child.running:
                child.send(self.stop)

    def _close(self, code: int) -> int:
        """Print the ledger's balance, write `end.txt`, and return the exit code.

        0 requires a balanced ledger, every step trained, and a result of the last evaluation.
        """
        failure = ""
        if self.config.trainer.is_offline:
            # A resumed offline run may have no step left to train.
            num_trained = self.progress.newest or self.progress.total
        else:
            failure, num_trained = self._audit()
            # A ledger out of balance also fails a run that the user stopped.
            if failure == OUT_OF_BALANCE and code == STOPPED:
                code = 0
        failure = failure or self._incomplete_work(num_trained)
        if failure and not code:
            exit_record.write(RoleError(failure))
            self.say(f"error: {failure}")
            self._end = failure
            code = 1
        with suppress(OSError):
            self.paths.end.write_text(f"exit code {code}. {self._end}\n")
        self.say(f"run folder: {self.paths.root}")
        return code

    def _audit(self) -> tuple[str, int]:
        """Print the ledger's balance; return its fault, "" for none, and the trained steps."""
        failure = ""
        num_trained = self.progress.newest
        for audit in self._audits:
            try:
                report = audit(self.paths.ledger, new_only=True)
            except UserError as error:  # the run ended before a ledger was created
                self.say(f"no audit: {error}")
                return "the ledger cannot be audited", 0
            self.say(report.summary())
            num_trained = report.steps
            failure = failure if report.ok else OUT_OF_BALANCE
        return failure, num_trained

    def _incomplete_work(self, num_trained: int) -> str:
        """Return the work that the run has not done, "" for none."""
        total = self.progress.total
        if num_trained < total and self.trainer in self.roles:
            return f"the trainer exited after {num_trained} of {total} steps without a request"
        if self.progress.is_unevaluated:
            return "every sample of the last evaluation failed"
        return ""


def clear_leftovers(config: ExperimentConfig, *kinds: str) -> None:
    """Remove vitals, names and staged weights of the trial's dead processes on this host.

    A process belongs to the trial if the trial's vitals name it; its staged weights are in folders
    with its process id. Files of other trials are not touched.

    Args:
        config: Experiment of the trial.
        kinds: Kinds of roles, for example "trainer", of which no process runs on any host.
    """
    folder = name_dir(config) / "vitals"
    names = NameRegistry.of(config, ttl_s=math.inf)
    dead = [role for role in read_roles(folder) if not role.is_alive]
    prefixes = [f"{role.name}." for role in dead]
    prefixes += [f"{kind}-" for kind in kinds]
    if kinds:
        prefixes.append(STACKS_REQUEST)
    with suppress(OSError):  # the folder is away: nothing depends on this
        for prefix in prefixes:
            for file in [*folder.glob(f"{prefix}*"), *folder.glob(f".{prefix}*")]:
                file.unlink(missing_ok=True)
        for parent in _weights_folders(config):
            for role in dead:
                remove_unlocked(parent.glob(f"arealite-{os.getuid()}-{role.vitals.pid}-*"))
        for role in dead:
            kind, entry_id = role.name.split("-", 1)
            names.remove(kind, entry_id)
        for kind in kinds:
            for entry in names.list(kind):
                names.remove(kind, entry.id)


def _weights_folders(config: ExperimentConfig) -> list[Path]:
    """Return the folders in which a process of the trial may have staged weights."""
    publisher_folder = config.trainer.ppo.publisher.disk.dir or TMPFS
    return [TMPFS, run_paths(config).weights, Path(publisher_folder).expanduser()]
