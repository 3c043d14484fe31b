"""The options of the sandbox that runs a model's programs, and the outcome of a program."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

import msgspec

from arealite.api.fields import opt, sub
from arealite.base.errors import EpisodeError


@dataclass(frozen=True, kw_only=True)
class SandboxConfig:
    """How programs are confined."""

    backend: Literal["bwrap", "unsafe"] = opt(
        "bwrap", "bwrap: bubblewrap; without it the run is refused. unsafe: no confinement"
    )
    concurrency: int = opt(8, "programs that one rollout worker runs at a time", at_least=1)
    timeout_s: float = opt(10.0, "wall time of a program", above=0)
    memory_mb: int = opt(512, "memory of a process, and of all of a program's", at_least=64)
    processes: int = opt(32, "processes and threads of a program", at_least=4)
    output_kb: int = opt(256, "of stdout and of stderr each; who writes more is killed", at_least=1)
    disk_mb: int = opt(16, "files of a program, kept in memory", at_least=1)
    packages: str | None = opt(None, "a folder (site-packages) that programs may import from")


@dataclass(frozen=True, kw_only=True)
class CodeEnvConfig:
    """Programs scored by test cases."""

    sandbox: SandboxConfig = sub(SandboxConfig, "where the programs run")
    case_timeout_s: float = opt(2.0, "of one case; sandbox.timeout_s is for all", above=0)
    tolerance: float = opt(1e-6, "relative and absolute, between numbers", at_least=0)
    partial: bool = opt(True, "reward the share of cases passed")
    bonus: float = opt(1.0, "added where all pass", above=-inf)
    error_reward: float = opt(-0.5, "of a program that does not load", above=-inf)


class Outcome(msgspec.Struct, frozen=True):
    """What became of a program. Filled by the sandbox."""

    status: Literal["exited", "timeout", "output", "killed"]
    """By itself; killed for its time or its output; or by a signal, as of another limit."""
    code: int
    """Exit code, or minus the signal."""
    stdout: str
    stderr: str
    seconds: float


class SandboxFailed(EpisodeError):
    """The sandbox could not start or end a program: nothing is known of the program."""

    failure_class = "sandbox_failed"
