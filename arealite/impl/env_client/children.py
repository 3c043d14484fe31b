"""An environment's own processes: children of the worker that run `arealite serve` on loopback.

One that crashes, hangs or leaks takes its episodes with it, and no more: another takes its place.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from arealite.api.env_config import EnvConfig
from arealite.api.runtime import RuntimeConfig
from arealite.base import log
from arealite.base.errors import DeadlineError, UserError
from arealite.impl.env_client.channel import Server
from arealite.impl.env_client.servers import Servers, parse
from arealite.impl.env_server.wire import SERVING
from arealite.impl.launcher.processes import PARENT, how_ended
from arealite.impl.launcher.supervisor import Budget
from arealite.system.health.waits import deadline

logger = log.get(__name__)

START_S = 120.0
CHECK_S = 0.5
"""How often a child's memory is looked at."""
TERMINATE_S = 2.0
"""From SIGTERM to SIGKILL."""
RETIRE_S = 600.0
"""What is full of episodes has this long to finish them; what holds too much memory, a tenth."""


@dataclass(eq=False)
class Running:
    """A child that listens."""

    process: asyncio.subprocess.Process
    server: Server
    exit: asyncio.Task[int]

    def rss_mb(self) -> float:
        """Return the memory that it holds; 0 where this system does not tell."""
        try:
            pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        except (OSError, IndexError):
            return 0.0
        return int(pages) * os.sysconf("SC_PAGE_SIZE") / 2**20


class Children:
    """Keeps `runtime.processes` children alive, and in the list of servers."""

    def __init__(self, args: Any, config: EnvConfig, servers: Servers) -> None:
        self.runtime: RuntimeConfig = config.runtime
        self.name = f"environment {config.type}"
        self._servers = servers
        # Its episodes end with the worker's sockets, and by the collector's deadline.
        own = {"max_sessions": 2**20, "idle_s": 1e6, "episode_s": 1e6}
        own["max_message_kb"] = self.runtime.max_message_kb
        tree = {name: getattr(args, name) for name in ("seed", "experiment_name", "trial_name")}
        tree["imports"] = list(args.imports)
        tree["cluster"] = OmegaConf.structured(args.cluster)
        tree["env"] = OmegaConf.structured(replace(config, runtime=RuntimeConfig()))
        tree["server"] = {**own, "token_env": self.runtime.token_env}
        self._yaml = OmegaConf.to_yaml(OmegaConf.create(tree))
        self._running = set[Running]()
        self._tasks = set[asyncio.Task[None]]()

    async def start(self) -> None:
        """Start the first children.

        Raises:
            UserError: one does not come to serve; its words are in this process's log.
        """
        starts = (self._start() for _ in range(self.runtime.processes))
        for first in await asyncio.gather(*starts, return_exceptions=True):
            if isinstance(first, BaseException):
                raise first
            self._own(self._keep(first))

    async def close(self) -> None:
        """End all of them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(self._remove(child) for child in [*self._running]))

    def _own(self, work: Any) -> None:
        task = asyncio.create_task(work, name=self.name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start(self) -> Running:
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as config:
            config.write(self._yaml)
            config.flush()
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "arealite.cli.main", "serve", "--config", config.name),
                env=os.environ | {PARENT: str(os.getpid())},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
            try:
                address = await self._address(process)
            except BaseException:
                await _kill(process)
                raise
        server = self._servers.add(parse(address), most=self.runtime.recycle_episodes)
        server.alive = True  # it has just told that it listens
        self._servers.changed.set()
        logger.info("environment process ready", name=self.name, server=address, child=process.pid)
        exit_ = asyncio.create_task(process.wait())
        child = Running(process, server, exit_)
        self._running.add(child)
        return child

    async def _address(self, process: asyncio.subprocess.Process) -> str:
        assert process.stdout is not None
        async with deadline("its port", owner="collector", on=self.name, seconds=START_S):
            line = (await process.stdout.readline()).decode(errors="replace")
            if line.startswith(SERVING):
                return line.removeprefix(SERVING).strip()
            ended = how_ended(await process.wait())
        raise UserError(f"a process of {self.name} did not start ({ended}); see above.")

    async def _keep(self, child: Running | None) -> None:
        """Replace a child whenever it is over, until it dies too often."""
        budget = Budget(self.runtime.max_restarts)
        while True:
            begin = time.monotonic()
            try:
                child = child or await self._start()
                why, grace_s = await self._over(child)
            except (UserError, DeadlineError) as error:
                why, grace_s = str(error), 0.0
            if child and grace_s:
                logger.info("environment process renewed", name=self.name, why=why)
                self._own(self._retire(child, grace_s))
            else:
                if child:
                    await self._remove(child)
                lived_s = time.monotonic() - begin
                pause_s = budget.spend(why, mark=self._servers.finished, lived_s=lived_s)
                logger.warning("environment process died", name=self.name, why=why, wait=pause_s)
                if pause_s is None:
                    break
                await asyncio.sleep(pause_s)
            child = None
        self._servers.verdict = UserError(
            f"the processes of {self.name} died {budget.deaths} times in a row, at first: "
            f"{budget.first}. Its words are in the log of the rollout worker."
        )
        self._servers.changed.set()

    async def _over(self, child: Running) -> tuple[str, float]:
        """Wait until a child is to be replaced; return why, and how long it may go on meanwhile:
        0, it is dead or silent."""
        server, most_mb = child.server, self.runtime.max_memory_mb
        while True:
            await asyncio.wait((child.exit,), timeout=CHECK_S)
            if child.exit.done():
                return how_ended(child.exit.result()), 0.0
            if server.lost:
                return f"silent for {self.runtime.silence_s} s", 0.0
            if server.most and server.begun >= server.most:
                return f"{server.begun} episodes", RETIRE_S
            if most_mb and (held := child.rss_mb()) > most_mb:
                return f"{held:.0f} MB", RETIRE_S / 10

    async def _retire(self, child: Running, seconds: float) -> None:
        """Let a child finish what it has, and end it."""
        child.server.retired = True
        try:
            async with asyncio.timeout(seconds):
                await self._servers.until(lambda: child.exit.done() or not child.server.load)
        except TimeoutError:
            logger.warning("environment process ended early", name=self.name, seconds=seconds)
        await self._remove(child)

    async def _remove(self, child: Running) -> None:
        if child.server in self._servers.known:
            self._servers.remove(child.server)
        await _kill(child.process)
        await child.exit
        self._running.discard(child)


async def _kill(process: asyncio.subprocess.Process) -> None:
    """Ask a process to end, then kill it and what it has started."""
    if process.returncode is None:
        with suppress(ProcessLookupError, TimeoutError):
            os.kill(process.pid, signal.SIGTERM)
            async with asyncio.timeout(TERMINATE_S):
                await process.wait()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
