"""A sandbox runs a program that nobody trusts, with limits, and leaves nothing behind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from arealite.api.fields import opt, sub


@dataclass(frozen=True, kw_only=True)
class SandboxConfig:
    """How programs are confined."""

    backend: Literal["auto", "bwrap", "landlock", "unsafe"] = opt(
        "auto", "auto: bubblewrap, else Landlock, else refusal; unsafe confines nothing"
    )
    concurrency: int = opt(8, "programs that one rollout worker runs at a time", at_least=1)
    timeout_s: float = opt(10.0, "wall time of a program", above=0)
    memory_mb: int = opt(512, "address space of a process", at_least=64)
    processes: int = opt(32, "processes and threads of a program", at_least=1)
    output_kb: int = opt(256, "of stdout and of stderr each; who writes more is killed")
    disk_mb: int = opt(16, "files of a program, in memory", at_least=1)


@dataclass(frozen=True, kw_only=True)
class CodeEnvConfig:
    """Programs scored by test cases."""

    sandbox: SandboxConfig = sub(SandboxConfig, "where the programs run")


class Outcome(msgspec.Struct, frozen=True):
    """What became of a program. Filled by the sandbox."""

    status: Literal["exited", "timeout", "output", "killed"]
    """exited by itself; killed by the sandbox for its time or its output; or killed by a limit."""
    code: int
    """Exit code where it exited, else minus the signal."""
    stdout: str
    stderr: str
    seconds: float


class Sandbox(ABC):
    """Runs Python programs one by one, each in a world of its own; shared by all episodes."""

    def __init__(self, config: SandboxConfig) -> None:
        self.config = config

    async def setup(self) -> None:  # noqa: B027  (optional hook)
        """Check that this host can confine programs."""

    @abstractmethod
    async def run(self, program: str, *, stdin: str = "") -> Outcome:
        """Run a Python program to its end, or kill it at a limit; cancelling kills it, too."""

    async def close(self) -> None:  # noqa: B027  (optional hook)
        """Stop what `setup` started."""


class SandboxFactory:
    """Makes the sandbox that a config asks for and the host can give."""

    def __init__(self, args: Any) -> None:
        self.args = args

    def make_sandbox(self, config: SandboxConfig) -> Sandbox:
        """Return a sandbox; call its `setup` before the first program.

        Raises:
            UserError: this host can give none that the config allows; says what to install or set.
        """
        from importlib import import_module

        return import_module("arealite.impl.sandbox.choice").choose(config)
