"""The local launcher: every role of a run as a child process of this one, brought back when it
dies, until the run ends.

A run ends in one of three ways: the trainer finishes, a role cannot be brought back, or a person
stops it. In each, no child survives.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from dataclasses import replace

from arealite.api.config import ExperimentConfig, name_dir, run_paths
from arealite.api.launcher import Launcher
from arealite.base import config as base_config
from arealite.base.errors import ArealiteError, UserError
from arealite.impl.launcher.doctor import Doctor
from arealite.impl.launcher.progress import Progress
from arealite.impl.launcher.supervisor import PARENT, STOPPING, Budget, Child, Died, Role, how_ended
from arealite.system.audit import audit

TERMINATE_GRACE_S = 5.0
REFRESH_S = 0.5
STOPPED = 130


class LocalLauncher(Launcher):
    """Starts, watches, brings back and ends the roles of one experiment on this machine."""

    def __init__(self, config: ExperimentConfig) -> None:
        super().__init__(config)
        self.options = config.launcher.local
        self.paths = run_paths(config)
        self.vitals = name_dir(config) / "vitals"
        self.progress = Progress(self.paths.metrics, config.trainer.ppo.total_steps)
        self.datapipe = self._role("datapipe-0")
        rollouts = [self._role(f"rollout-{i}") for i in range(self.options.rollout_workers)]
        ranks = [f"trainer-{i}" for i in range(self.options.trainer_ranks)]
        self.trainer = self._role(*ranks, leads=True)
        self.roles = [self.datapipe, *rollouts, self.trainer]
        self.over = asyncio.Event()
        """Set when processes may leave: all steps are trained, or a person stops the run."""
        self._stops = 0

    def _role(self, *names: str, leads: bool = False) -> Role:
        return Role(names, Budget(self.options.max_restarts), leads)

    @property
    def children(self) -> list[Child]:
        """The processes started last, of all roles."""
        return [child for role in self.roles for child in role.children]

    def run(self) -> int:
        """Run to the end; 0 finished, 130 stopped by a person, else the dead child's code."""
        return asyncio.run(self._run())

    async def _run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        doctor = asyncio.ensure_future(self._doctor().run())
        try:
            code = await self._watch()
        finally:
            doctor.cancel()
            await self._end_all()
        self.progress.poll()
        return self._close(code)

    def _doctor(self) -> Doctor:
        """Return who looks for roles that do nothing; a dead one of ours is no news."""
        for kind in ("datapipe", "rollout", "trainer"):
            for stale in self.vitals.glob(f"{kind}-*"):
                stale.unlink(missing_ok=True)
        ours = {name for role in self.roles for name in role.names}
        return Doctor(
            self.vitals,
            lambda: [child.process.pid for child in self.children if child.running],
            self.progress.say,
            self.options.silent_s,
            self.options.blocked_s,
            lambda finding: finding.cause != "dead" or finding.culprit not in ours,
        )

    # ------------------------------------------------------------ starting

    def command(self, role: str, index: int) -> list[str]:
        """Return the command line of one role."""
        module = "arealite.cli.main"
        return [sys.executable, "-m", module, "role", role, str(index), str(self.paths.root)]

    async def _start(self, role: Role) -> None:
        """Start all processes of a role."""
        environment = os.environ | threads(self.options.trainer_threads)
        environment[PARENT] = str(os.getpid())
        if role is self.trainer:
            environment["WORLD_SIZE"] = str(len(role.names))
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            if role.budget.deaths:  # a run goes on, however it was once begun
                base_config.save(replace(self.config, resume="auto"), self.paths.config)
        role.children = []
        for name in role.names:
            role.children.append(await self._spawn(name, environment))

    async def _spawn(self, name: str, environment: dict[str, str]) -> Child:
        kind, index = name.split("-")
        log = self.paths.logs / f"{name}.log"
        ranks = {"RANK": index, "LOCAL_RANK": index} if "WORLD_SIZE" in environment else {}
        try:
            with log.open("ab") as output:
                begin = output.tell()
                process = await asyncio.create_subprocess_exec(
                    *self.command(kind, int(index)),
                    env=environment | ranks,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,  # Ctrl-C reaches this process only, which drains them
                )
        except OSError as error:
            raise UserError(f"{name} cannot be started: {error}") from error
        return Child(name, process, log, begin)

    # ------------------------------------------------------------ watching

    async def _keep(self, role: Role) -> None:
        """Start a role, and again when it dies, until it has ended as planned.

        Raises:
            Died: it may not be started again.
        """
        again = ""
        while True:
            await self._start(role)
            if again:
                self.progress.say(again)
            dead = await role.end(self.over)
            await role.clear()
            if dead is None or (pause := self._judge(role, dead)) is None:
                role.ended = True
                return
            await asyncio.sleep(pause)
            if self._stops and role is self.trainer:
                raise self._died(dead, "while the run was being stopped")
            budget = role.budget
            again = f"{self._said(dead)}; started again ({budget.deaths} of {budget.limit})"

    def _judge(self, role: Role, dead: Child) -> float | None:
        """Return the pause before a role is started again, None if it is no longer needed.

        Raises:
            Died: it may not be started again.
        """
        if dead.code in STOPPING:
            raise self._died(dead)
        if self.trainer.ended or self.datapipe.ended:  # the trainer's last word has been heard
            if dead.code != -signal.SIGTERM:
                self.progress.say(f"{self._said(dead)}; no longer needed")
            return None
        if self._stops and role is self.trainer:
            raise self._died(dead, "while the run was being stopped")
        lived_s = time.monotonic() - dead.started
        said = f"{dead.how()}; its log: {dead.log}):\n{dead.tail()}"
        pause = role.budget.spend(said, mark=self.progress.newest, lived_s=lived_s)
        if pause is None and not self.options.max_restarts:
            raise self._died(dead)
        if pause is None:
            raise Died(
                f"{self._said(dead)}, for the {role.budget.deaths}th time without a trained step "
                f"in between (launcher.local.max_restarts={role.budget.limit}). Last lines of the "
                f"first of these deaths ({role.budget.first}",
                max(dead.code, 1),
            )
        return pause

    def _said(self, dead: Child) -> str:
        return f"{dead.name} died ({dead.how()})"

    def _died(self, dead: Child, when: str = "") -> Died:
        if self._stops and dead.code == -signal.SIGTERM:
            return Died(f"{dead.name} had not begun to listen when it was stopped", STOPPED)
        what = f"{dead.name} died ({how_ended(dead.code)}) {when}".rstrip()
        return Died(f"{what}. Its last lines ({dead.log}):\n{dead.tail()}", max(dead.code, 1))

    async def _watch(self) -> int:
        """Keep every role until all have ended, one may not be started again, or the end took too
        long."""
        loop = asyncio.get_running_loop()
        keeping = {asyncio.ensure_future(self._keep(role)): role for role in self.roles}
        deadline: float | None = None
        try:
            while keeping:
                done, _ = await asyncio.wait(
                    keeping, timeout=REFRESH_S, return_when=asyncio.FIRST_COMPLETED
                )
                for role in [keeping.pop(task) for task in done if task.result() is None]:
                    if role is self.datapipe:
                        self._terminate("rollout")  # one that came too late was not let go
                self.progress.poll()
                if self.progress.finished or self.trainer.ended:
                    self.over.set()
                if self._stops > 1:
                    return STOPPED
                # After its last step the trainer lets the others go, so any of them may end first.
                if deadline is None and (self._stops or any(role.ended for role in self.roles)):
                    deadline = loop.time() + self.options.drain_timeout_s
                if deadline is not None and loop.time() > deadline:
                    return self._report_late()
        except ArealiteError as error:
            self.progress.say(f"error: {error}")
            return error.exit_code
        finally:
            for task in keeping:
                task.cancel()
            await asyncio.gather(*keeping, return_exceptions=True)
        return STOPPED if self._stops else 0

    # ------------------------------------------------------------ ending

    def _on_signal(self) -> None:
        self._stops += 1
        self.over.set()
        if self._stops == 1:
            self.progress.say("stopping after this step, with a checkpoint (again: stop now)")
            self._terminate("trainer")

    def _terminate(self, role: str) -> None:
        for child in self.children:
            if child.name.startswith(role) and child.running:
                child.process.terminate()

    def _report_late(self) -> int:
        names = ", ".join(child.name for child in self.children if child.running)
        seconds = self.options.drain_timeout_s
        self.progress.say(f"error: {names} did not end within {seconds:g} s; killed.")
        return 1

    async def _end_all(self) -> None:
        """End what still runs: ask, wait a little, then kill; a session is killed as a group."""
        self._terminate("")
        waits = [asyncio.ensure_future(c.process.wait()) for c in self.children if c.running]
        if waits and self._stops < 2:
            await asyncio.wait(waits, timeout=TERMINATE_GRACE_S)
        for role in self.roles:
            await role.clear()

    def _close(self, code: int) -> int:
        try:
            report = audit(self.paths.ledger)
        except UserError as error:  # the run ended before there was a ledger to hold it against
            self.progress.say(f"no audit: {error}")
        else:
            self.progress.say(report.table())
            code = code or (0 if report.ok else 1)
        self.progress.say(f"run folder: {self.paths.root}")
        return code


def free_port() -> int:
    """Return a loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def threads(count: int) -> dict[str, str]:
    """Keep maths libraries from taking every core for each process."""
    return {"OMP_NUM_THREADS": str(count), "TOKENIZERS_PARALLELISM": "false"}
