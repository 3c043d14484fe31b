"""Options of the sandbox, which runs programs of a model, and the result of a program."""

from dataclasses import dataclass
from typing import Literal

import msgspec

from arealite.api.fields import opt
from arealite.base.errors import EpisodeError


@dataclass(frozen=True, kw_only=True)
class SandboxConfig:
    """The sandbox and the limits of a program."""

    backend: Literal["bwrap", "unsafe"] = opt(
        "bwrap", "bwrap: bubblewrap, which must be installed; unsafe: no isolation"
    )
    concurrency: int = opt(8, "concurrent programs of one rollout worker", at_least=1)
    timeout_s: float = opt(10.0, "wall time of a program", above=0)
    memory_mb: int = opt(512, "memory of a program, and of each of its processes", at_least=64)
    processes: int = opt(32, "processes and threads of a program", at_least=4)
    output_kb: int = opt(256, "limit of stdout and stderr; more kills the program", at_least=1)
    disk_mb: int = opt(16, "files of a program, stored in memory", at_least=1)
    packages: str | None = opt(None, "folder (site-packages) from which programs can import")


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a program. Filled by the sandbox."""

    status: Literal["exited", "timeout", "output", "killed"]
    """exited: by itself; timeout, output: killed for this limit; killed: by another signal, for
    example of the memory limit."""
    code: int
    """Exit code, or the negative signal number."""
    stdout: str
    stderr: str
    seconds: float


class SandboxFailed(EpisodeError, failure_class="sandbox_failed"):
    """The sandbox failed to start or stop a program; the program has no result."""
