"""Keeps the process of a language-model server alive, from a parent that holds nothing itself.

The parent loads no model, so it has nothing to die of, and the kernel takes the child with it.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from arealite.api.config import ServerConfig, name_dir
from arealite.base.signals import STOP
from arealite.impl.launcher.processes import Child, spawn
from arealite.impl.launcher.supervisor import EXAMINE_S, ROLE, STOPPING, Budget, HealthMonitor
from arealite.system.health import diagnosis, vitals
from arealite.system.names.registry import NameRegistry

TERMINATE_S = 10.0
"""From a person's signal to SIGKILL."""
PLANNED = (0, 130, *STOPPING)
"""Exit codes after which the server is not started again."""
KIND = "llm_server"
IS_KEPT = "AREALITE_IS_KEPT"
"""Environment variable that tells a server that its parent brings it back."""


class ServerKeeper:
    """One server process, started again when it dies or hangs."""

    def __init__(self, config: ServerConfig, command: Sequence[str]) -> None:
        self.command = command
        self._vitals = name_dir(config) / "vitals"
        self._names = NameRegistry.of(config, ttl_s=math.inf)
        self._host = config.cluster.host
        self._name = os.environ.get(ROLE) or f"llm_server-parent-{self._host}-{os.getpid()}"
        self._budget = Budget(config.llm_server.embedded.max_restarts, self._name)
        self._lives = 0
        """That came to serve."""
        self._child: Child | None = None
        self._stopping = asyncio.Event()

    async def run(self) -> int:
        """Keep the server alive until told to stop; return the exit code it had, or should have."""
        loop = asyncio.get_running_loop()
        for number in (STOP, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, number)
        vitals.start(self._name, self._vitals)
        vitals.watch(loop)
        self._budget.expect("start")
        while True:
            child = await self._live()
            if self._stopping.is_set() or child.code in PLANNED:
                return max(child.code, 0)
            said, lived_s = child.death, time.monotonic() - child.started
            pause = self._budget.spend(said, mark=self._lives, lived_s=lived_s)
            if pause is None:
                say(f"error: {said}, for the {self._budget.deaths}th time in a row")
                return max(child.code, 1)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)
                return 0
            say(f"{said}; started again ({self._budget.deaths} of {self._budget.limit})")

    def _stop(self, number: int) -> None:
        """Pass a signal on, and see to it that the child ends."""
        self._stopping.set()
        self._send(number)
        asyncio.get_running_loop().call_later(TERMINATE_S, self._send, signal.SIGKILL)

    def _send(self, number: int) -> None:
        """Send the server a signal, if it runs."""
        if self._child is not None and self._child.running:
            self._child.send(number)

    async def _live(self) -> Child:
        """Start the server and wait until it has ended; the health monitor may kill it."""
        own = {IS_KEPT: "1"}
        self._child = child = await spawn("llm_server", self.command, log=None, environment=own)
        if self._stopping.is_set():
            self._send(signal.SIGKILL)
        pid = child.process.pid
        monitor = HealthMonitor(
            self._vitals, lambda f: child if f.pid == pid else None, say, is_shown=lambda _: False
        )
        watching = [
            asyncio.ensure_future(each) for each in (monitor.run(), self._until_served(pid))
        ]
        try:
            await child.process.wait()
            return child
        finally:
            for each in watching:
                each.cancel()
            self._forget(pid)

    async def _until_served(self, pid: int) -> None:
        """Wait until the server has a name, then mark it as up."""
        while not await asyncio.to_thread(self._named, pid):  # noqa: ASYNC110  (files have no event)
            await asyncio.sleep(EXAMINE_S)
        self._budget.forget()

    def _named(self, pid: int) -> list[str]:
        """Return the ids of the names that the server process `pid` holds."""
        own, entries = {"pid": pid, "host": self._host}, self._names.list(KIND)
        return [entry.id for entry in entries if own.items() <= entry.value.items()]

    def _forget(self, pid: int) -> None:
        """Remove the name and the vitals that a killed server leaves: nobody need wait for it."""
        for role in diagnosis.read(self._vitals):
            if (role.vitals.pid, role.state) == (pid, "X"):
                for file in self._vitals.glob(f"{role.name}.*"):
                    file.unlink(missing_ok=True)
        for name in self._named(pid):
            self._names.remove(KIND, name)
            self._lives += 1


def keep(config: ServerConfig, command: Sequence[str]) -> int:
    """Run `command`, a server, until a person stops it; return the exit code."""
    return asyncio.run(ServerKeeper(config, command).run())


def say(text: str) -> None:
    """Tell whoever watches the server's log."""
    sys.stderr.write(text + "\n")
