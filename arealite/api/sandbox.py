"""A sandbox runs a program that nobody trusts, with limits, and leaves nothing behind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import inf
from typing import Any, Literal

import msgspec

from arealite.api.fields import opt, sub
from arealite.base.errors import EpisodeError


@dataclass(frozen=True, kw_only=True)
class SandboxConfig:
    """How programs are confined."""

    backend: Literal["auto", "bwrap", "landlock", "unsafe"] = opt(
        "auto", "auto: bubblewrap, else Landlock, else refusal; unsafe confines nothing"
    )
    concurrency: int = opt(8, "programs that one rollout worker runs at a time", at_least=1)
    timeout_s: float = opt(10.0, "wall time of a program", above=0)
    memory_mb: int = opt(512, "memory of a process, and of all of a program's", at_least=64)
    processes: int = opt(32, "processes and threads of a program", at_least=4)
    output_kb: int = opt(256, "of stdout and of stderr each; who writes more is killed", at_least=1)
    disk_mb: int = opt(16, "files of a program, kept in memory; Landlock allows none", at_least=1)
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


class Sandbox(ABC):
    """Runs Python programs one by one, each in a world of its own; shared by all episodes."""

    def __init__(self, config: SandboxConfig) -> None:
        self.config = config

    async def setup(self) -> None:  # noqa: B027  (optional hook)
        """Check that this host can confine programs."""

    @abstractmethod
    async def run(self, program: str, *, stdin: str = "") -> Outcome:
        """Run a Python program to its end, or kill it at a limit; cancelling kills it, too.

        When this returns, nothing of the program is left.

        Raises:
            SandboxFailed: for reasons of its own.
        """

    async def close(self) -> None:  # noqa: B027  (optional hook)
        """Stop what `setup` started."""


class SandboxFactory:
    """Makes the sandbox that a config asks for and the host can give."""

    def __init__(self, args: Any) -> None:
        self.args = args

    def make_sandbox(self, config: SandboxConfig) -> Sandbox:
        """Return a sandbox; call its `setup` before the first program. Blocks for 0.1 s: it is
        tried out.

        Raises:
            UserError: this host can give none that the config allows; says what to install or set.
        """
        from importlib import import_module

        return import_module("arealite.impl.sandbox.choice").choose(config)
