"""Puts the vitals of all roles together and names who holds the run up.

Pure of effects, because the launcher, which heals, and `arealite why`, which tells, must agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Cause = Literal["stopped", "silent", "blocked", "dead", "overdue"]
"""stopped: the kernel holds the process (SIGSTOP, a debugger). silent: it runs, but shows no sign
of life. blocked: its event loop runs nothing. dead: its process is gone. overdue: it lives, but
others wait for it beyond their deadline."""


@dataclass(frozen=True)
class Finding:
    """One role that holds others up."""

    culprit: str
    """Its role, as in "rollout-1"."""
    cause: Cause
    since_s: float
    detail: str
    """One line: what it does or does not do."""
    stack: str = ""
    """Of what blocks it, where known."""
    victims: tuple[str, ...] = ()
    """Who waits for it: "trainer rank 0: batch 12, 8.2 s"."""


def examine(folder: Path) -> list[Finding]:
    """Read the vitals in `folder` and return who holds the run up, worst first."""
    return []
