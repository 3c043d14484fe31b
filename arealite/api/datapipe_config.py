"""Options of the datapipe, the process between rollout workers and trainer."""

import re
from dataclasses import dataclass

from arealite.api.fields import Constraints, opt, sub


@dataclass(frozen=True, kw_only=True)
class CurriculumConfig:
    """The curriculum: tasks of classes with a success rate near 0.5 are drawn more often.

    The probability of a class is proportional to its rows times floor + (1 - floor)·4p(1 - p),
    where p is its success rate.
    """

    by: str = opt("", "key of extra_info with a task's class, like level or env; '': off")
    threshold: float = opt(0.5, "an episode with at least this reward is a success")
    floor: float = opt(0.1, "weight at success rates 0 and 1; 1: no curriculum", above=0, at_most=1)
    window: int = opt(32, "newest groups of a class that count for its success rate", at_least=1)


@dataclass(frozen=True, kw_only=True)
class DatapipeConfig:
    """The process between rollout workers and trainer."""

    lease_ttl_s: float = opt(15.0, "silence until a worker's leases are offered again", above=0)
    commit_interval_s: float = opt(
        0.05, "time between ledger commits; results that a batch needs commit at once", at_least=0
    )
    max_failed_share: float = opt(0.5, "stop if more of the last 256 episodes failed", at_least=0)
    max_filtered_groups: int = opt(
        1000, "stop after this many filtered groups without a complete one; 0: never", at_least=0
    )
    stall_timeout_s: float = opt(300.0, "stop if no leased episode finishes for this long", above=0)
    keep_payloads: str = opt(
        "all",
        "payloads (tokens) in the ledger: all, for replay and report of every step; a number N "
        "drops those of steps older than the N newest checkpoints",
    )
    max_frame_mb: int = opt(64, "larger trajectories fail; 12 bytes a sampled token", at_least=1)
    curriculum: CurriculumConfig = sub(CurriculumConfig, "order of tasks by success rate")

    def constraints(self) -> Constraints:
        """Yield the constraint on `keep_payloads`."""
        is_valid = re.fullmatch(r"all|[1-9]\d{0,8}", self.keep_payloads) is not None
        yield (
            is_valid,
            f"keep_payloads={self.keep_payloads}: use all, or a number of at least 1.",
        )
