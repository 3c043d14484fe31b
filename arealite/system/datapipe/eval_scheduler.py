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

from arealite.algo.pass_at_k import default_ks, mean_pass_at_k
from arealite.api.rollout_messages import Episode, Lease
from arealite.api.task import Task
from arealite.system.ledger.group import LOST, Group

SOLVED = 1.0
"""Reward from which a sample counts as solved in pass@k."""


class EvalScheduler:
    """All evaluations under way; the samples of a held-out task are a group."""

    def __init__(self, tasks: Sequence[Task], *, samples: int, max_attempts: int) -> None:
        self.tasks = tasks
        self.samples = samples
        self.max_attempts = max_attempts
        self.runs: dict[int, list[Group]] = {}
        """The groups of each evaluation; a group's seq is the evaluation's id."""
        self.groups: dict[str, Group] = {}
        """The groups of all evaluations."""
        self.results: dict[int, dict[str, float]] = {}
        """Metrics of finished ones, as the ledger has them."""
        self._wanting: dict[str, Group] = {}
        """Groups that may have samples to be run."""
        self._numbers = count()

    def begin(self, eval_id: int) -> None:
        """Begin an evaluation, unless it is under way."""
        if eval_id not in self.runs:
            self.runs[eval_id] = groups = [
                Group(eval_id, f"e{eval_id}-{row}", task, self.samples, 0, row)
                for row, task in enumerate(self.tasks)
            ]
            self.groups |= (by_id := {group.group_id: group for group in groups})
            self._wanting |= by_id

    def lease(self, *, boot: int, version: int, credit: int) -> Lease | None:
        """Lease up to `credit` samples of the next task that has some nobody runs."""
        now = time.monotonic()
        for group_id, group in [*self._wanting.items()]:
            if members := group.missing(self.max_attempts, now)[:credit]:
                lease_id = f"{group_id}.{boot}.{next(self._numbers)}"
                about = (group_id, f"eval-{group.seq}", group.task)
                lease = group.leases[lease_id] = Lease(lease_id, *about, members, version)
                return lease
            if not group.missing(self.max_attempts):
                del self._wanting[group_id]
        return None

    def release(self, lease: Lease, *, is_lost: bool) -> None:
        """Offer the samples that a worker will not bring again; lost ones count as attempts."""
        if group := self.groups.get(lease.group_id):
            if (live := group.leases.pop(lease.lease_id, None)) and is_lost:
                group.failures += [(member, lease.lease_id, LOST) for member in group.due(live)]
            self._settle(group)

    def is_running(self, group_id: str, lease_id: str, member: int) -> bool:
        """Return whether a sample of a lease is waited for.

        A lease that is missing was lost, answered, or is of another boot.
        """
        group = self.groups.get(group_id)
        lease = group and group.leases.get(lease_id)
        return group is not None and lease is not None and member in group.due(lease)

    def add(self, episode: Episode) -> bool:
        """Take in a sample; return whether it was waited for."""
        group_id, lease_id, member = episode.group_id, episode.lease_id, episode.member
        if not self.is_running(group_id, lease_id, member):
            return False
        group = self.groups[group_id]
        if episode.failure is None:
            group.finished[member] = episode.headers
        else:
            group.failures.append((member, lease_id, episode.failure.failure_class))
            group.rest(member)
        if not group.due(group.leases[lease_id]):
            del group.leases[lease_id]
        self._settle(group)
        return True

    def left(self, group: Group) -> int:
        """Return how many samples of a task are neither finished nor failed for good."""
        return group.size - len(group.finished) - len(group.given_up(self.max_attempts))

    def _settle(self, group: Group) -> None:
        self._wanting[group.group_id] = group
        if not self.left(group):
            group.state = "complete"

    def take_finished(self) -> list[tuple[int, dict[str, float]]]:
        """Return (eval id, metrics) of the evaluations that are done, and forget them."""
        runs = self.runs.items()
        done = [key for key, groups in runs if all(g.state == "complete" for g in groups)]
        for eval_id in done:
            groups = self.runs.pop(eval_id)
            for group in groups:
                del self.groups[group.group_id]
            self.results[eval_id] = score(groups)
        return [(eval_id, self.results[eval_id]) for eval_id in done]

    def forget(self, *, after: int) -> None:
        """Drop what is under way, and the results of later steps: training was rolled back."""
        for under_way in (self.runs, self.groups, self._wanting):
            under_way.clear()
        self.results = {k: v for k, v in self.results.items() if k <= after}


def score(groups: Sequence[Group]) -> dict[str, float]:
    """Average an evaluation. Failed samples are counted, never scored."""
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
    for k in default_ks(size) if size > 1 else ():
        if estimate := mean_pass_at_k(counts, k):
            metrics[f"eval/pass@{k}"] = estimate.mean
    sources: defaultdict[str, list[float]] = defaultdict(list)
    for group, own in zip(groups, rewards, strict=True):
        sources[group.task.source] += own
    for source, own in sources.items():
        if source and own:
            metrics[f"eval/reward/{source}"] = fmean(own)
    return metrics
