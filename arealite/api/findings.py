"""Findings of a health monitor about the roles of a run."""

from dataclasses import dataclass
from typing import Literal

Cause = Literal[
    "stopped", "dead", "crashing", "silent", "blocked", "starved", "paused", "filtering", "overdue",
    "starting",
]  # fmt: skip
"""stopped: SIGSTOP or a debugger stopped the process. dead: the process has exited. crashing: the
process crashed, and its parent restarts it. silent: the process exists, but writes no vitals.
blocked: the event loop runs no task. starved: silent or blocked, because the process gets no CPU.
paused: a client that is not this trial's publisher paused the server. filtering: the datapipe
filters every group, so that no step can be trained. overdue: the process runs,
but its reply to another role is late. starting: the parent has started the process, which has not
written vitals yet."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One role that blocks other roles or is unhealthy."""

    blocker: str
    """The role, as in "rollout-1"."""
    cause: Cause
    since_s: float
    detail: str
    """One line that describes the state of the role."""
    stack: str = ""
    """The blocking stack, if it is known."""
    waiters: tuple[str, ...] = ()
    """The waits for the role, as in "trainer-0: batch 12, 8.2 s"."""
    pid: int = 0
    """Process id of the role; 0: the process is on another host."""
