"""Runs evaluations: leases the held-out tasks beside the training ones, and averages the scores.

Kept in memory only, apart from the training groups, because an unfinished evaluation is simply
asked for again.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain, count
from statistics import fmean

import msgspec

from arealite.algo.pass_at_k import ks, mean_pass_at_k
from arealite.api.rollout_messages import Episode, Lease
from arealite.api.task import Task
from arealite.system.ledger.group import LOST, Group

SOLVED = 1.0
"""Reward from which a sample counts as solved in pass@k."""


class EvalRun(msgspec.Struct, eq=False):
    """One evaluation under way; the samples of a held-out task are a group."""

    eval_id: int
    groups: list[Group]
    wanting: dict[str, Group]
    """Groups that may have samples to be run, by id."""
    left: int
    """Samples that are neither finished nor failed for good."""


class EvalScheduler:
    """All evaluations under way."""

    def __init__(self, tasks: Sequence[Task], *, samples: int, max_attempts: int) -> None:
        self.tasks = tasks
        self.samples = samples
        self.max_attempts = max_attempts
        self.runs: dict[int, EvalRun] = {}
        self.results: dict[int, dict[str, float]] = {}
        """Metrics of finished ones, as the ledger has them."""
        self._numbers = count()
        self._leased: dict[str, tuple[EvalRun, Group]] = {}
        """By lease id. A lease that is missing was lost, answered, or is of another boot."""

    def begin(self, eval_id: int) -> None:
        """Begin an evaluation, unless it is under way."""
        if eval_id not in self.runs:
            groups = [
                Group(row, f"e{eval_id}-{row}", task, self.samples, 0, row)
                for row, task in enumerate(self.tasks)
            ]
            wanting = {group.group_id: group for group in groups}
            self.runs[eval_id] = EvalRun(eval_id, groups, wanting, self.samples * len(groups))

    def lease(self, *, boot: int, version: int, credit: int) -> Lease | None:
        """Lease up to `credit` samples of the next task that has some nobody runs."""
        now = time.monotonic()
        for run in self.runs.values():
            for group in [*run.wanting.values()]:
                if members := group.missing(self.max_attempts, now)[:credit]:
                    lease_id = f"{group.group_id}.{boot}.{next(self._numbers)}"
                    about = (group.group_id, f"eval-{run.eval_id}", group.task)
                    lease = group.leases[lease_id] = Lease(lease_id, *about, members, version)
                    self._leased[lease_id] = run, group
                    return lease
                if not group.missing(self.max_attempts):
                    del run.wanting[group.group_id]
        return None

    def release(self, lease: Lease, *, is_lost: bool) -> None:
        """Offer the samples that a worker will not bring again; lost ones count as attempts."""
        for member in lease.members if is_lost else ():
            if self.is_running(lease.lease_id, member):
                self._fail(lease.lease_id, member, LOST)
        self._end(lease.lease_id)

    def is_running(self, lease_id: str, member: int) -> bool:
        """Return whether a sample of a lease is waited for."""
        _, group = self._leased.get(lease_id, (None, None))
        return group is not None and member in group.due(group.leases[lease_id])

    def add(self, episode: Episode) -> bool:
        """Take in a sample; return whether it was waited for."""
        lease_id, member = episode.lease_id, episode.member
        if not self.is_running(lease_id, member):
            return False
        run, group = self._leased[lease_id]
        if episode.failure is None:
            group.finished[member] = episode.headers
            run.left -= 1
        else:
            self._fail(lease_id, member, episode.failure.failure_class)
            group.rest(member)
        if not group.due(group.leases[lease_id]):
            self._end(lease_id)
        return True

    def _fail(self, lease_id: str, member: int, failure_class: str) -> None:
        """Count a failed attempt."""
        run, group = self._leased[lease_id]
        group.failures.append((member, lease_id, failure_class))
        run.left -= member in group.given_up(self.max_attempts)
        run.wanting[group.group_id] = group

    def _end(self, lease_id: str) -> None:
        """Expect nothing more of a lease."""
        if found := self._leased.pop(lease_id, None):
            run, group = found
            del group.leases[lease_id]
            run.wanting[group.group_id] = group

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
        self._leased.clear()
        self.results = {k: v for k, v in self.results.items() if k <= after}


def score(run: EvalRun) -> dict[str, float]:
    """Average an evaluation. Failed samples are counted, never scored."""
    groups = run.groups
    headers = [h for g in groups for h in g.headers]
    failed = sum(g.size - len(g.finished) for g in groups)
    metrics = {"eval/num_prompts": float(len(groups)), "eval/failed": float(failed)}
    if not headers:
        return metrics
    # A sample's reward is averaged over its seats.
    rewards = [[fmean(h.reward for h in hs) for hs in g.finished.values() if hs] for g in groups]
    metrics["eval/reward"] = fmean(chain.from_iterable(rewards))
    metrics["eval/tokens_mean"] = fmean(h.trained_tokens for h in headers)
    metrics["eval/oldest_version"] = float(min(h.oldest_version for h in headers))
    metrics["eval/newest_version"] = float(max(h.newest_version for h in headers))
    counts, size = [(len(own), sum(r >= SOLVED for r in own)) for own in rewards], groups[0].size
    for k in ks(size) if size > 1 else ():
        if estimate := mean_pass_at_k(counts, k):
            metrics[f"eval/pass@{k}"] = estimate.mean
    sources: defaultdict[str, list[float]] = defaultdict(list)
    for group, own in zip(groups, rewards, strict=True):
        sources[group.task.source] += own
    for source, own in sources.items():
        if source and own:
            metrics[f"eval/reward/{source}"] = fmean(own)
    return metrics
