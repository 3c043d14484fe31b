"""The supervisor of a language-model server: a small parent process without a model.

The kernel kills the server when its parent dies.
"""

import asyncio
import math
import os
import sys
from collections.abc import Sequence

from arealite.api.experiment_config import ServerConfig, name_dir
from arealite.base import exit_record
from arealite.base.signals import STOP, on_stop
from arealite.impl.launcher import supervisor
from arealite.impl.launcher.processes import IS_KEPT, Child, NewProcesses, RoleStarter
from arealite.impl.launcher.supervisor import ROLE, Role
from arealite.system.health import vitals
from arealite.system.health.vitals import read_roles
from arealite.system.names.name_registry import NameRegistry

TERMINATE_S = 10.0
"""Seconds between the user's signal and SIGKILL."""
PLANNED = (0, 130, *supervisor.STOPPING)
"""Exit codes after which the server is not started again."""
KIND = "llm_server"


class ServerSupervisor(supervisor.Supervisor):
    """Supervises one server process; restarts it when it dies or hangs."""

    milestone = "a name in the registry"

    def __init__(
        self,
        config: ServerConfig,
        command: Sequence[str],
        starter: RoleStarter,
    ) -> None:
        super().__init__(lambda line: sys.stderr.write(line + "\n"))
        self.command = command
        self.starter = starter
        self._vitals = name_dir(config) / "vitals"
        self._names = NameRegistry.of(config, ttl_s=math.inf)
        self._host = config.cluster.host
        self._name = os.environ.get(ROLE) or f"llm_server-parent-{self._host}-{os.getpid()}"
        server = config.llm_server
        self.option = f"llm_server.{server.type}.max_restarts"
        budget = supervisor.Budget(limit=server.selected_options.max_restarts, role=self._name)
        self._server = Role(names=(KIND,), budget=budget, grace_s=0.0)
        self.roles = [self._server]
        self._served = set[int]()
        """Ids of the processes that had a name in the registry."""

    async def run(self) -> int:
        """Supervise the server until a signal stops it; return the exit code."""
        loop = asyncio.get_running_loop()
        vitals.start(self._name, self._vitals)
        vitals.watch(loop)
        keeping = asyncio.ensure_future(self.supervise(self._server))
        on_stop(loop, lambda _: self._stop(keeping))
        try:
            with self.monitored(self._vitals):
                await keeping
            return max(self.children[0].code, 0)
        except asyncio.CancelledError:  # stopped while there was no server
            return 0
        except supervisor.RoleFailed as error:
            exit_record.write(error)
            self.say(f"error: {error}")
            return error.exit_code
        finally:
            self.starter.close()

    def _stop(self, keeping: asyncio.Task[None]) -> None:
        """Request the server to exit; kill the server if it does not exit in time."""
        self._server.leaving = True
        running = [child for child in self.children if child.running]
        if not running:
            keeping.cancel()
        for child in running:
            child.send(STOP)
            asyncio.get_running_loop().call_later(TERMINATE_S, child.kill)

    async def start(self, role: Role) -> None:
        environment = {IS_KEPT: "1"}
        child = await self.starter.start_role(KIND, self.command, log=None, env=environment)
        role.children = [child]

    def mark(self) -> float:
        return len(self._served)

    def is_needed(self, role: Role, dead: Child) -> bool:
        return not role.leaving and dead.code not in PLANNED

    def is_up(self, role: Role) -> bool:
        """Return whether the server has a name in the registry."""
        pid = role.children[0].pid
        names = self._named(pid)
        if names:
            self._served.add(pid)
        return bool(names)

    async def clear(self, role: Role) -> None:
        """Remove the name and the vitals of the killed server, so that no client waits for it."""
        await super().clear(role)
        pid = role.children[0].pid
        for status in read_roles(self._vitals):
            if status.vitals.pid == pid and status.state == "X":
                for file in self._vitals.glob(f"{status.name}.*"):
                    file.unlink(missing_ok=True)
        for name in self._named(pid):
            self._names.remove(KIND, name)
            self._served.add(pid)

    def _named(self, pid: int) -> list[str]:
        """Return the ids of the names that the server process `pid` holds."""
        process = {"pid": pid, "host": self._host}
        entries = self._names.list(KIND)
        return [entry.id for entry in entries if process.items() <= entry.value.items()]


def supervise(
    config: ServerConfig, command: Sequence[str], *, starter: RoleStarter | None = None
) -> int:
    """Run `command`, a server, until a signal stops it; return the exit code.

    Args:
        config: The server.
        command: Its command line.
        starter: Starts the server; None: as a new process.
    """
    return asyncio.run(ServerSupervisor(config, command, starter or NewProcesses()).run())
