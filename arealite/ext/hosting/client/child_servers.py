"""Child processes of a rollout worker that run `arealite serve` on loopback.

A child that crashes, hangs or leaks memory is replaced. Only its own episodes fail.
"""

import asyncio
import os
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Coroutine
from dataclasses import dataclass, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from arealite.api.env import EnvConfig
from arealite.api.runtime import RuntimeConfig
from arealite.api.trial import TrialConfig
from arealite.base import config_tree, log
from arealite.base.errors import DeadlineError, UserError
from arealite.ext.hosting.client.server_pool import ServerPool, parse
from arealite.ext.hosting.client.session_channel import ServerState
from arealite.ext.hosting.server.env_messages import SERVING
from arealite.ext.hosting.server_config import EnvServerConfig, EnvServerOptions
from arealite.impl.launcher.processes import Child, end_all, how_ended, spawn
from arealite.impl.launcher.supervisor import Budget
from arealite.system.health.waits import Wait, cancel_all

logger = log.get(__name__)

START_S = 120.0
CHECK_S = 0.5
"""Interval for checking a child's memory."""
TERMINATE_S = 2.0
"""Time between SIGTERM and SIGKILL."""
RETIRE_S = 600.0
"""Grace period for the running episodes of a child that has started `recycle_episodes` episodes. A
child with too much memory gets a tenth of it."""


@dataclass(eq=False, kw_only=True)
class Running:
    """A child that listens."""

    process: Child
    server: ServerState
    exit: asyncio.Task[int]

    def rss_mb(self) -> float:
        """Return the child's resident memory in MB; 0 if the system does not report it."""
        try:
            pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        except (OSError, IndexError):
            return 0.0
        return int(pages) * os.sysconf("SC_PAGE_SIZE") / 2**20


class Children:
    """Keeps `runtime.processes` children running and registered in the server pool."""

    def __init__(self, args: TrialConfig, config: EnvConfig, servers: ServerPool) -> None:
        self.args = args
        self.runtime: RuntimeConfig = config.runtime
        self.name = f"environment {config.type}"
        self.max_memory_mb = self.runtime.max_memory_mb
        self._servers = servers
        # A child needs no limits of its own: an episode ends when the worker closes its socket, and
        # the collector has a deadline for it.
        options = EnvServerOptions(
            max_sessions=2**20,
            idle_s=1e6,
            episode_s=1e6,
            max_message_kb=self.runtime.max_message_kb,
            token_env=self.runtime.token_env,
        )
        trial = {field.name: getattr(args, field.name) for field in fields(TrialConfig)}
        self._config = EnvServerConfig(
            **trial,
            env=replace(config, runtime=RuntimeConfig()),
            server=options,
        )
        self._running = set[Running]()
        self._tasks = set[asyncio.Task[None]]()

    async def start(self) -> None:
        """Start the first children.

        Raises:
            UserError: A child did not start; its stderr is in this process's log.
        """
        starts = (self._start() for _ in range(self.runtime.processes))
        for child in await asyncio.gather(*starts, return_exceptions=True):
            if isinstance(child, BaseException):
                raise child
            self._create_task(self._keep_alive(child))

    async def close(self) -> None:
        """Stop all children."""
        await cancel_all(self._tasks)
        await asyncio.gather(*(self._remove(child) for child in [*self._running]))

    def _create_task(self, coroutine: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(coroutine, name=self.name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _launch(self) -> tuple[Child, str]:
        """Start a child; return it and its address when it listens."""
        with TemporaryDirectory() as folder:
            file = Path(folder) / "env_server.msgpack"
            config_tree.write(self._config, file)
            words = [sys.executable, "-m", "arealite.cli.main", "serve", str(file)]
            child = await spawn(
                self.name,
                words,
                log=None,
                environment={},
                stdout=PIPE,
            )
            try:
                assert isinstance(child.process, Process)
                return child, await self._read_address(child.process)
            except BaseException:
                await end_all([child], grace_s=TERMINATE_S)
                raise

    async def _start(self) -> Running:
        child, address = await self._launch()
        server = self._servers.add(parse(address), max_episodes=self.runtime.recycle_episodes)
        server.alive = True
        self._servers.changed.set()
        logger.info(
            "environment process ready",
            name=self.name,
            server=address,
            child=child.pid,
        )
        running = Running(
            process=child, server=server, exit=asyncio.create_task(child.process.wait())
        )
        self._running.add(running)
        return running

    async def _read_address(self, process: Process) -> str:
        """Return the host:port that a new child prints when it listens."""
        assert process.stdout is not None
        with Wait(event="its port", owner="collector", on=self.name, seconds=START_S):
            line = (await process.stdout.readline()).decode(errors="replace")
            if line.startswith(SERVING):
                return line.removeprefix(SERVING).strip()
            exit_report = how_ended(await process.wait())
        raise UserError(
            f"a process of {self.name} did not start ({exit_report}). "
            "Its error is in the log above."
        )

    async def _keep_alive(self, child: Running | None) -> None:
        """Replace a child each time it dies or is used up, until the restart budget is spent."""
        budget = Budget(limit=self.runtime.max_restarts)
        while True:
            begin = time.monotonic()
            try:
                child = child or await self._start()
                end_reason, grace_s = await self._wait_for_replacement(child)
            except (UserError, DeadlineError) as error:
                end_reason = str(error)
                grace_s = 0.0
            if child and grace_s:
                logger.info("environment process recycled", name=self.name, why=end_reason)
                self._create_task(self._retire(child, grace_s))
            else:
                if child:
                    await self._remove(child)
                pause_s = budget.spend(
                    end_reason,
                    mark=self._servers.finished,
                    lived_s=time.monotonic() - begin,
                )
                logger.warning(
                    "environment process died",
                    name=self.name,
                    why=end_reason,
                    wait=pause_s,
                )
                if pause_s is None:
                    break
                await asyncio.sleep(pause_s)
            child = None
        self._servers.fatal = UserError(
            f"the processes of {self.name} died {budget.deaths} times in a row "
            f"(env.runtime.max_restarts={self.runtime.max_restarts}). "
            f"The first death: {budget.first}. "
            "The error is in the log of the rollout worker; fix the environment."
        )
        self._servers.changed.set()

    async def _wait_for_replacement(self, child: Running) -> tuple[str, float]:
        """Wait until a child must be replaced.

        Returns:
            The reason, and the grace period in seconds for the child's running episodes; 0: the
            child is dead or does not answer.
        """
        server = child.server
        while True:
            await asyncio.wait((child.exit,), timeout=CHECK_S)
            if child.exit.done():
                return how_ended(child.exit.result()), 0.0
            if server.lost:
                return f"no answer for {self.runtime.silence_s} s", 0.0
            if server.max_episodes and server.started >= server.max_episodes:
                return f"{server.started} episodes", RETIRE_S
            if not self.max_memory_mb:
                continue
            rss_mb = child.rss_mb()
            if rss_mb > self.max_memory_mb:
                return f"{rss_mb:.0f} MB of memory", RETIRE_S / 10

    async def _retire(self, child: Running, seconds: float) -> None:
        """Let a child finish its running episodes, then stop it."""
        child.server.retired = True
        try:
            with Wait(event="its last episodes", owner="collector", on=self.name, seconds=seconds):
                await self._servers.wait_until(lambda: child.exit.done() or not child.server.load)
        except DeadlineError:
            logger.warning(
                "retired environment process killed",
                name=self.name,
                seconds=seconds,
            )
        await self._remove(child)

    async def _remove(self, child: Running) -> None:
        if child.server in self._servers.known:
            self._servers.remove(child.server)
        await end_all([child.process], grace_s=TERMINATE_S)
        self._running.discard(child)
