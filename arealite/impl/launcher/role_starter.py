"""How a supervisor starts the processes of its roles on this machine.

Without an extension, each role is a new process. An entry of the group `role_starter`, an object or
a module with the functions of `RoleStarters`, can start roles in another way. The last entry is
used, so another package's replaces AReaLite's.
"""

import gc
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol

from arealite.api.experiment_config import ExperimentConfig, ServerConfig
from arealite.base import entries
from arealite.impl.launcher.processes import Child, spawn


class RoleStarter(Protocol):
    """Starts the roles of one supervisor."""

    async def start_role(
        self, name: str, words: Sequence[str], *, log: Path | None, env: Mapping[str, str]
    ) -> Child:
        """Start a role, as `processes.spawn` does.

        Args:
            name: Name of the role, as in "rollout-1".
            words: Command line.
            log: See `processes.spawn`.
            env: Variables of the role in addition to those of this process.
        """
        ...

    def close(self) -> None:
        """End what starts roles; the roles continue."""
        ...


class RoleStarters(Protocol):
    """Makes the starters of supervisors."""

    def begin(self) -> None:
        """Begin a command that starts roles.

        A command calls it before it has a thread or has imported a module of the user.
        """
        ...

    def early(self, config: ExperimentConfig) -> AbstractContextManager[object]:
        """Return a context for the checks of a run and its launcher."""
        ...

    def of_run(self, config: ExperimentConfig, *, has_torch: bool) -> RoleStarter:
        """Return the starter of a run's supervisor.

        Args:
            config: The experiment.
            has_torch: Whether a role needs torch.
        """
        ...

    def of_server(self, config: ServerConfig) -> RoleStarter:
        """Return the starter of a server's supervisor."""
        ...

    def freeze(self) -> None:
        """Keep all objects of this role out of garbage collections, once it is set up."""
        ...


class NewProcesses:
    """Starts each role as a new process, which imports its modules itself."""

    async def start_role(
        self, name: str, words: Sequence[str], *, log: Path | None, env: Mapping[str, str]
    ) -> Child:
        return await spawn(name, words, log=log, environment=env)

    def close(self) -> None:
        return


class NewProcessStarters:
    """Prepares nothing."""

    def begin(self) -> None:
        return

    def early(self, config: ExperimentConfig) -> AbstractContextManager[object]:
        return nullcontext()

    def of_run(self, config: ExperimentConfig, *, has_torch: bool) -> RoleStarter:
        return NewProcesses()

    def of_server(self, config: ServerConfig) -> RoleStarter:
        return NewProcesses()

    def freeze(self) -> None:
        gc.freeze()


def starters() -> RoleStarters:
    """Return the last entry of the group `role_starter`; without one, that of new processes."""
    all_starters: list[RoleStarters] = [NewProcessStarters(), *entries.hooks("role_starter")]
    return all_starters[-1]
