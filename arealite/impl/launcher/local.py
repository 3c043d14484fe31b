"""The local launcher: every role of a run as a child process of this one, watched until the run
ends.

A run ends in one of three ways: the trainer finishes, a child dies, or a person stops it. In each,
no child survives.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from arealite.api.config import ExperimentConfig, run_paths
from arealite.api.launcher import Launcher
from arealite.base.errors import UserError
from arealite.impl.launcher.progress import Progress
from arealite.system.audit import audit

TERMINATE_GRACE_S = 5.0
TAIL_LINES = 15
REFRESH_S = 0.5


@dataclass
class Child:
    """One role's process."""

    name: str
    process: asyncio.subprocess.Process
    log: Path

    @property
    def running(self) -> bool:
        return self.process.returncode is None

    def tail(self) -> str:
        """Return the last lines of its log, or only the last where that says it all."""
        lines = self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        if lines and lines[-1].startswith("error: "):
            lines = lines[-1:]
        return "\n".join(f"    {line}" for line in lines or ["(empty: is the disk full?)"])


class LocalLauncher(Launcher):
    """Starts, watches and ends the roles of one experiment on this machine."""

    def __init__(self, config: ExperimentConfig) -> None:
        super().__init__(config)
        self.options = config.launcher.local
        self.paths = run_paths(config)
        self.progress = Progress(self.paths.metrics, config.trainer.ppo.total_steps)
        self.children: list[Child] = []
        self._stops = 0

    def run(self) -> int:
        """Run to the end; 0 finished, 130 stopped by a person, else the dead child's code."""
        return asyncio.run(self._run())

    async def _run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        try:
            await self._start_all()
            code = await self._watch()
        finally:
            await self._end_all()
        self.progress.poll()
        return self._close(code)

    async def _start_all(self) -> None:
        await self._start("datapipe", 0, {})
        for index in range(self.options.rollout_workers):
            await self._start("rollout", index, {})
        rendezvous = {
            "WORLD_SIZE": str(self.options.trainer_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        for rank in range(self.options.trainer_ranks):
            ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            await self._start("trainer", rank, rendezvous | ranks)

    def command(self, role: str, index: int) -> list[str]:
        """Return the command line of one role."""
        module = "arealite.cli.main"
        return [sys.executable, "-m", module, "role", role, str(index), str(self.paths.root)]

    async def _start(self, role: str, index: int, environment: dict[str, str]) -> None:
        log = self.paths.logs / f"{role}-{index}.log"
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *self.command(role, index),
                env=os.environ | threads(self.options.trainer_threads) | environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C reaches this process only, which drains the others
            )
        self.children.append(Child(f"{role}-{index}", process, log))

    def _on_signal(self) -> None:
        self._stops += 1
        if self._stops == 1:
            self.progress.say("stopping after this step, with a checkpoint (again: stop now)")
            self._terminate("trainer")

    def _terminate(self, role: str) -> None:
        for child in self.children:
            if child.name.startswith(role) and child.running:
                child.process.terminate()

    def _ended_well(self, child: Child) -> bool:
        """Whether a child ended by itself, or by our SIGTERM before it could listen to it."""
        over = any(c.name.startswith("datapipe") and not c.running for c in self.children)
        late = over and child.process.returncode == -signal.SIGTERM
        return child.process.returncode == 0 or (child.name.startswith("rollout") and late)

    async def _watch(self) -> int:
        """Wait until every child ended well, one ended badly, or the end took too long."""
        loop = asyncio.get_running_loop()
        exits = {asyncio.ensure_future(c.process.wait()): c for c in self.children}
        deadline: float | None = None
        try:
            while exits:
                done, _ = await asyncio.wait(
                    exits, timeout=REFRESH_S, return_when=asyncio.FIRST_COMPLETED
                )
                self.progress.poll()
                for child in [exits.pop(task) for task in done]:
                    if not self._ended_well(child):
                        return self._report_death(child)
                    if child.name.startswith("datapipe"):
                        self._terminate("rollout")  # one that came too late was not let go
                if self._stops > 1:
                    return 130
                # After its last step the trainer lets the others go, so any of them may end first.
                if deadline is None and (self._stops or len(exits) < len(self.children)):
                    deadline = loop.time() + self.options.drain_timeout_s
                if deadline is not None and loop.time() > deadline:
                    return self._report_late([c.name for c in exits.values()])
        finally:
            for task in exits:
                task.cancel()
        return 130 if self._stops else 0

    def _report_late(self, names: list[str]) -> int:
        seconds = self.options.drain_timeout_s
        self.progress.say(f"error: {', '.join(names)} did not end within {seconds:g} s; killed.")
        return 1

    def _report_death(self, child: Child) -> int:
        code = child.process.returncode or 0
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        self.progress.say(f"error: {child.name} died ({how}). Its last lines ({child.log}):")
        self.progress.say(child.tail())
        return code if code > 0 else 1

    async def _end_all(self) -> None:
        """End what still runs: ask, wait a little, then kill; a session is killed as a group."""
        for child in self.children:
            if child.running:
                child.process.terminate()
        waits = [asyncio.ensure_future(c.process.wait()) for c in self.children if c.running]
        if waits and self._stops < 2:
            await asyncio.wait(waits, timeout=TERMINATE_GRACE_S)
        for child in self.children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.process.pid, signal.SIGKILL)
            await child.process.wait()

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
