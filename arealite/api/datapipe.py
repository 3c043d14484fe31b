"""The options of the process between rollout workers and trainer.

Apart from the root configs, which only say what an experiment consists of.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from arealite.api.fields import Constraints, opt, sub


@dataclass(frozen=True, kw_only=True)
class CurriculumConfig:
    """Which tasks come next: those of classes whose outcome is the least certain come more often.

    A class is drawn by its rows times floor + (1 - floor)·4p(1 - p), p its success rate.
    """

    by: str = opt("", "key of extra_info whose values are the classes, as level or env; '': off")
    threshold: float = opt(0.5, "an episode with at least this reward has succeeded")
    floor: float = opt(
        0.1, "weight of a class where all succeed or all fail; 1 is even", above=0, at_most=1
    )
    window: int = opt(32, "latest groups of a class that its success rate is of", at_least=1)


@dataclass(frozen=True, kw_only=True)
class DatapipeConfig:
    """The process between rollout workers and trainer."""

    lease_ttl_s: float = opt(
        15.0, "a worker silent for this long loses its leases; they are offered again", above=0
    )
    commit_interval_s: float = opt(
        0.05, "results share ledger transactions this far apart; awaited ones do not", at_least=0
    )
    max_failed_share: float = opt(
        0.5, "share of failed episodes, over the last 256, that stops the run", at_least=0
    )
    stall_timeout_s: float = opt(
        300.0, "no finished episode for this long, while some are due, stops the run", above=0
    )
    pace_report_share: float = opt(
        0.2, "share of time lost to pacing above which slow episodes are named", at_least=0
    )
    keep_payloads: str = opt(
        "all",
        "payloads (tokens) that the ledger keeps: all, for replay and report of every step; or a "
        "number N, which drops those of steps older than the N newest checkpoints",
    )
    max_frame_mb: int = opt(
        64, "largest trajectory, in MB; a token takes 17 bytes; a larger one fails", at_least=1
    )
    curriculum: CurriculumConfig = sub(CurriculumConfig, "the order of tasks by success")

    def constraints(self) -> Constraints:
        """Yield the constraint on `keep_payloads`."""
        yield (
            bool(re.fullmatch(r"all|[1-9]\d{0,8}", self.keep_payloads)),
            f"keep_payloads={self.keep_payloads}: use all, or a number of at least 1.",
        )
