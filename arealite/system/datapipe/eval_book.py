"""Runs evaluations: leases the held-out tasks beside the training ones, and averages the scores.

Kept in memory only, apart from the training groups, because an unfinished evaluation is simply
asked for again.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import count
from statistics import fmean

import msgspec

from arealite.algo.pass_at_k import ks, mean_pass_at_k
from arealite.api.rollout_messages import Episode, Lease
from arealite.api.task import Task
from arealite.api.trajectory import TrajectoryHeader
from arealite.system.ledger.group import rest_end

SOLVED = 1.0
"""Reward from which a sample counts as solved in pass@k."""


class EvalGroup(msgspec.Struct, eq=False):
    """One held-out task and its samples."""

    group_id: str
    task: Task
    wanted: dict[int, float]
    """Samples that nobody runs, and when (monotonic) each may be offered."""
    finished: dict[int, list[TrajectoryHeader]] = {}
    failures: Counter[int] = msgspec.field(default_factory=Counter[int])
    failed: set[int] = set()
    """Samples that failed for good."""

    @property
    def rewards(self) -> list[float]:
        """Reward of each finished sample, averaged over seats."""
        return [fmean(h.reward for h in headers) for headers in self.finished.values() if headers]


class EvalRun(msgspec.Struct, eq=False):
    """One evaluation under way."""

    eval_id: int
    groups: list[EvalGroup]
    samples: int

    @property
    def left(self) -> int:
        """Samples that are neither finished nor failed for good."""
        done = sum(len(g.finished) + len(g.failed) for g in self.groups)
        return self.samples * len(self.groups) - done


class EvalBook:
    """All evaluations under way."""

    def __init__(self, tasks: Sequence[Task], *, samples: int, max_attempts: int) -> None:
        self.tasks = tasks
        self.samples = samples
        self.max_attempts = max_attempts
        self.runs: dict[int, EvalRun] = {}
        self.results: dict[int, dict[str, float]] = {}
        """Metrics of finished ones, as the ledger has them."""
        self._numbers = count()
        self._running: dict[tuple[str, int], EvalGroup] = {}
        """By (lease id, member); what is not here was lost, answered, or is of another boot."""

    def begin(self, eval_id: int) -> None:
        """Begin an evaluation, unless it is under way."""
        if eval_id not in self.runs:
            groups = [
                EvalGroup(f"e{eval_id}-{row}", task, dict.fromkeys(range(self.samples), 0.0))
                for row, task in enumerate(self.tasks)
            ]
            self.runs[eval_id] = EvalRun(eval_id, groups, self.samples)

    def lease(self, *, boot: int, version: int, credit: int) -> Lease | None:
        """Lease up to `credit` samples of the next task that has some nobody runs."""
        now = time.monotonic()
        for run in self.runs.values():
            for group in run.groups:
                members = sorted(m for m, rests in group.wanted.items() if rests <= now)[:credit]
                if not members:
                    continue
                for member in members:
                    del group.wanted[member]
                lease_id = f"{group.group_id}.{boot}.{next(self._numbers)}"
                self._running |= {(lease_id, member): group for member in members}
                split = f"eval-{run.eval_id}"
                return Lease(lease_id, group.group_id, split, group.task, members, version)
        return None

    def release(self, lease: Lease, *, is_lost: bool) -> None:
        """Offer the samples that a worker will not bring again; lost ones count as attempts."""
        for member in lease.members:
            if group := self._running.pop((lease.lease_id, member), None):
                group.failures[member] += is_lost
                self._offer_again(group, member, at=0.0)

    def is_running(self, lease_id: str, member: int) -> bool:
        """Return whether a sample of a lease is waited for."""
        return (lease_id, member) in self._running

    def add(self, episode: Episode) -> bool:
        """Take in a sample; False if it is none that is waited for."""
        group = self._running.pop((episode.lease_id, episode.member), None)
        if group is not None and episode.failure is None:
            group.finished[episode.member] = episode.headers
        elif group is not None:
            group.failures[episode.member] += 1
            rests = rest_end(group.failures[episode.member])
            self._offer_again(group, episode.member, at=rests)
        return group is not None

    def _offer_again(self, group: EvalGroup, member: int, *, at: float) -> None:
        if group.failures[member] >= self.max_attempts:
            group.failed.add(member)
        else:
            group.wanted[member] = at

    def take_finished(self) -> list[tuple[int, dict[str, float]]]:
        """Return (eval id, metrics) of the evaluations that are done, and forget them."""
        done = [run for run in self.runs.values() if not run.left]
        for run in done:
            del self.runs[run.eval_id]
            self.results[run.eval_id] = score(run)
        return [(run.eval_id, self.results[run.eval_id]) for run in done]

    def forget(self, *, after: int) -> None:
        """Drop what is under way, and the results of later steps: training was rolled back."""
        self.runs.clear()
        self._running.clear()
        self.results = {k: v for k, v in self.results.items() if k <= after}


def score(run: EvalRun) -> dict[str, float]:
    """Average an evaluation. Failed samples are counted, never scored."""
    groups = run.groups
    headers = [h for g in groups for hs in g.finished.values() for h in hs]
    metrics = {
        "eval/num_prompts": float(len(groups)),
        "eval/failed": float(sum(len(g.failed) for g in groups)),
    }
    if not headers:
        return metrics
    metrics["eval/reward"] = fmean(reward for g in groups for reward in g.rewards)
    metrics["eval/tokens_mean"] = fmean(h.trained_tokens for h in headers)
    metrics["eval/oldest_version"] = float(min(h.oldest_version for h in headers))
    metrics["eval/newest_version"] = float(max(h.newest_version for h in headers))
    counts = [(len(g.rewards), sum(r >= SOLVED for r in g.rewards)) for g in groups]
    for k in ks(run.samples) if run.samples > 1 else ():
        if estimate := mean_pass_at_k(counts, k):
            metrics[f"eval/pass@{k}"] = estimate.mean
    sources: defaultdict[str, list[float]] = defaultdict(list)
    for group in groups:
        sources[group.task.source] += group.rewards
    for source, rewards in sources.items():
        if source and rewards:
            metrics[f"eval/reward/{source}"] = fmean(rewards)
    return metrics
