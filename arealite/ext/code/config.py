"""Options of the environment of programs."""

from dataclasses import dataclass
from math import inf

from arealite.api.fields import opt, sub
from arealite.ext.sandbox.config import SandboxConfig


@dataclass(frozen=True, kw_only=True)
class CodeEnvConfig:
    """Programs that are scored by test cases."""

    sandbox: SandboxConfig = sub(SandboxConfig, "sandbox of the programs")
    levels: tuple[int, ...] = opt((1,), "of generated tasks, equally likely", at_least=1, at_most=5)
    case_timeout_s: float = opt(2.0, "timeout of one case; sandbox.timeout_s is for all", above=0)
    tolerance: float = opt(1e-6, "relative and absolute tolerance of numbers", at_least=0)
    partial: bool = opt(True, "reward the share of passed cases")
    bonus: float = opt(1.0, "added to the reward if all cases pass", above=-inf)
    error_reward: float = opt(-0.5, "reward of a program that does not load", above=-inf)
