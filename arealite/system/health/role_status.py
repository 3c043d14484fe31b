"""Reads the state of each role: its vitals, and the kernel's state of its process."""

import socket
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from arealite.system.clocks import folder_time
from arealite.system.health.vitals import Vitals, process_state

FORGET_DEAD_S = 60.0
"""A role that died this long ago is reported only if another role waits for it."""


@dataclass(frozen=True, kw_only=True)
class RoleStatus:
    """State of one process, from its vitals and from the kernel."""

    vitals: Vitals
    age_s: float
    """Seconds since the last heartbeat."""
    state: str
    """The kernel's state letter of the process; "X" if it is gone, "" if it is on another host."""

    @property
    def name(self) -> str:
        return self.vitals.name

    @property
    def is_alive(self) -> bool:
        """Whether the process exists; on another host, whether its heartbeat is recent."""
        return self.state not in "XZ" if self.state else self.age_s < FORGET_DEAD_S


def read_roles(folder: Path) -> list[RoleStatus]:
    """Read the vitals in `folder`, and the kernel's state of each process of this host."""
    roles: list[RoleStatus] = []
    now = folder_time(folder)
    for path in sorted(folder.glob("[!.]*.json")):
        try:
            vitals = msgspec.json.decode(path.read_bytes(), type=Vitals)
            age_s = now - path.stat().st_mtime
        except (OSError, msgspec.DecodeError):
            continue  # removed in the meantime
        state = ""
        if vitals.host == socket.gethostname():
            age_s = min(age_s, time.monotonic() - vitals.clock)
            state = _kernel_state(vitals)
        roles.append(RoleStatus(vitals=vitals, age_s=max(0.0, age_s), state=state))
    return roles


def _kernel_state(vitals: Vitals) -> str:
    """Return the state letter of a process of this host; "X" if it is gone, "" if unknown."""
    if not vitals.started:
        return ""
    process = process_state(vitals.pid)
    if process is None:
        return "X"
    state, started = process
    return state if started == vitals.started else "X"
