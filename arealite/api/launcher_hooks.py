"""The types of the hooks that launchers and supervisors call. See arealite/api/hooks.py."""

from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from arealite.api.findings import Finding
from arealite.base.trial_files import RunPaths

if TYPE_CHECKING:
    from arealite.api.experiment_config import ExperimentConfig

RunCompanion = Callable[
    ["ExperimentConfig", Callable[[str], object]], Coroutine[Any, Any, None] | None
]
"""Hook `run_started`: return a coroutine to run beside a launcher until the run ends, or None.

A launcher calls it before it starts a role, with the config and a function that prints a line. An
error of the coroutine is one warning and does not end the run."""


class WatchedSupervisor(Protocol):
    """A supervisor as a health monitor uses it."""

    @property
    def say(self) -> Callable[[str], object]:
        """Prints a line."""
        ...

    def is_shown(self, finding: Finding) -> bool:
        """Return whether to report a finding."""
        ...

    def child_of(self, finding: Finding) -> Any:
        """Return the child (`Child`) that a finding is about; None: another process."""
        ...


class HealthMonitorMaker(Protocol):
    """Hook `health_monitor`: return what kills unresponsive children of a supervisor.

    A supervisor runs the coroutine until its roles have ended. An error of it is not reported.
    """

    def __call__(
        self, folder: Path, supervisor: WatchedSupervisor, *, silent_s: float, blocked_s: float
    ) -> Coroutine[Any, Any, None]:
        """Return the coroutine.

        Args:
            folder: Where the roles write their vitals.
            supervisor: Parent of the children; other processes must not be killed.
            silent_s: Seconds after which a silent or stopped child is killed.
            blocked_s: Seconds after which a blocked child is killed.
        """
        ...


RoleStacks = Callable[[], str]
"""Hook `role_stacks`: return the stacks of this process, one a line.

The thread that writes the vitals of a role calls it when the stacks are requested; the role may
hang. It is imported when the role starts."""

ExitReason = Callable[[str, int], str | None]
"""Hook `exit_reason`: return the line of a process's output that says why it ended, or None.

A supervisor calls it about a process that wrote no record of its end, with the end of its output
and its exit code (`Child.code`). The first result that is not None is used."""

RunFailed = Callable[[Path, Path], str]
"""Hook `run_failed`: return a text about a run that fails, "" for none.

A launcher calls it in a thread before it stops the roles, with the folder of their vitals and that
of their logs, and prints the text. An error is ignored."""


class Console(Protocol):
    """Prints the lines of a launcher."""

    @property
    def has_panel(self) -> bool:
        """Whether the console shows the progress of the run, so that lines need not."""
        ...

    def print(self, line: str) -> None:
        """Print a line."""
        ...

    def shown(self) -> AbstractContextManager[None]:
        """Return a context in which the console shows the state of the run."""
        ...


ConsoleMaker = Callable[[RunPaths], Console | None]
"""Hook `console`: return what prints the lines of a launcher, or None.

A launcher calls it before it starts a role, with the paths of the run. The last result that is not
None is used; after None from all, lines are printed to stdout. An error ends the run."""
