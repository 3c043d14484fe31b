"""Schedules evaluations: leases the held-out tasks during training, and averages the scores.

The state is in memory only: after a restart the trainer requests an unfinished evaluation again.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain, count
from statistics import fmean

from arealite.algo.pass_at_k import default_ks, mean_pass_at_k
from arealite.api.rollout_messages import Episode, Lease
from arealite.api.task import Task
from arealite.api.trajectory import mean_reward
from arealite.system.ledger.group import LOST, Group

SOLVED = 1.0
"""A sample with at least this reward counts as solved in pass@k."""


class EvalScheduler:
    """All running evaluations. The samples of one held-out task are a group."""

    def __init__(self, tasks: Sequence[Task], *, samples: int, max_attempts: int) -> None:
        self.tasks = tasks
        self.samples = samples
        self.max_attempts = max_attempts
        self.runs: dict[int, list[Group]] = {}
        """By evaluation id: its groups. The `seq` of a group is the evaluation id."""
        self.groups: dict[str, Group] = {}
        """By group id: the groups of all running evaluations."""
        self.results: dict[int, dict[str, float]] = {}
        """By evaluation id: metrics of finished evaluations, as in the ledger."""
        self._leasable: dict[str, Group] = {}
        """By group id: groups that may have unleased samples."""
        self._numbers = count()

    def begin(self, eval_id: int) -> None:
        """Begin an evaluation, unless it is running already."""
        if eval_id not in self.runs:
            self.runs[eval_id] = groups = [
                Group(eval_id, f"e{eval_id}-{row}", task, task.eval_samples(self.samples), 0, row)
                for row, task in enumerate(self.tasks)
            ]
            self.groups |= (by_id := {group.group_id: group for group in groups})
            self._leasable |= by_id

    def lease(self, *, boot: int, version: int, credit: int) -> Lease | None:
        """Lease up to `credit` samples of the next task with unleased samples; None without one.

        Args:
            boot: Number of the datapipe's start, a part of the lease id.
            version: Policy version of the lease.
            credit: Maximum number of samples.
        """
        now = time.monotonic()
        for group_id, group in [*self._leasable.items()]:
            if members := group.leasable(self.max_attempts, now)[:credit]:
                lease_id = f"{group_id}.{boot}.{next(self._numbers)}"
                ids_and_task = (group_id, f"eval-{group.seq}", group.task)
                lease = group.leases[lease_id] = Lease(lease_id, *ids_and_task, members, version)
                return lease
            if not group.leasable(self.max_attempts):
                del self._leasable[group_id]
        return None

    def release(self, lease: Lease, *, is_lost: bool) -> None:
        """Return the unfinished samples of a lease to the queue.

        Args:
            lease: A lease that its worker will not finish.
            is_lost: Count a failed attempt for each unfinished sample.
        """
        if group := self.groups.get(lease.group_id):
            if (live := group.leases.pop(lease.lease_id, None)) and is_lost:
                group.failures += [(m, lease.lease_id, LOST) for m in group.unfinished(live)]
            self._close_if_finished(group)

    def is_running(self, group_id: str, lease_id: str, member: int) -> bool:
        """Return whether a sample of an evaluation is leased and unfinished.

        False for a lease that was lost or answered, or that an earlier datapipe process granted.
        """
        group = self.groups.get(group_id)
        lease = group and group.leases.get(lease_id)
        return group is not None and lease is not None and member in group.unfinished(lease)

    def add_episode(self, episode: Episode) -> bool:
        """Store a sample; return False, and ignore it, if it is not running."""
        group_id = episode.group_id
        lease_id = episode.lease_id
        member = episode.member
        if not self.is_running(group_id, lease_id, member):
            return False
        group = self.groups[group_id]
        if episode.failure is None:
            group.finished[member] = episode.headers
        else:
            group.failures.append((member, lease_id, episode.failure.failure_class))
            group.back_off(member)
        if not group.unfinished(group.leases[lease_id]):
            del group.leases[lease_id]
        self._close_if_finished(group)
        return True

    def samples_left(self, group: Group) -> int:
        """Return the number of samples of a task that are neither finished nor exhausted."""
        return group.size - len(group.finished) - len(group.exhausted(self.max_attempts))

    def _close_if_finished(self, group: Group) -> None:
        self._leasable[group.group_id] = group
        if not self.samples_left(group):
            group.state = "complete"

    def take_finished(self) -> list[tuple[int, dict[str, float]]]:
        """Return (evaluation id, metrics) of evaluations that finished since the last call."""
        runs = self.runs.items()
        done = [key for key, groups in runs if all(g.state == "complete" for g in groups)]
        for eval_id in done:
            groups = self.runs.pop(eval_id)
            for group in groups:
                del self.groups[group.group_id]
            self.results[eval_id] = score(groups)
        return [(eval_id, self.results[eval_id]) for eval_id in done]

    def forget(self, *, after: int) -> None:
        """Roll back: drop running evaluations, and results of steps later than `after`."""
        for running in (self.runs, self.groups, self._leasable):
            running.clear()
        self.results = {k: v for k, v in self.results.items() if k <= after}


def score(groups: Sequence[Group]) -> dict[str, float]:
    """Average the scores of an evaluation. Samples that failed or have no score are counted."""
    headers = [h for g in groups for h in g.headers]
    failed = sum(g.size - len(g.finished) for g in groups)
    metrics = {"eval/num_prompts": float(len(groups)), "eval/failed": float(failed)}
    if not headers:
        return metrics
    # A sample's reward is averaged over its seats.
    samples = [[mean_reward(hs) for hs in g.finished.values() if hs] for g in groups]
    rewards = [[reward for reward in own if reward is not None] for own in samples]
    if every := [*chain.from_iterable(rewards)]:
        metrics["eval/reward"] = fmean(every)
    if unscored := sum(map(len, samples)) - len(every):
        metrics["eval/unscored"] = float(unscored)
    metrics["eval/tokens_mean"] = fmean(h.trained_tokens for h in headers)
    metrics["eval/oldest_version"] = float(min(h.oldest_version for h in headers))
    metrics["eval/newest_version"] = float(max(h.newest_version for h in headers))
    counts = [(len(own), sum(r >= SOLVED for r in own)) for own in rewards]
    sizes = {group.size for group in groups}
    for k in sorted({k for n in sizes for k in default_ks(n)}) if max(sizes) > 1 else ():
        if estimate := mean_pass_at_k(counts, k):
            metrics[f"eval/pass@{k}"] = estimate.mean
    sources: defaultdict[str, list[float]] = defaultdict(list)
    for group, own in zip(groups, rewards, strict=True):
        sources[group.task.source] += own
    for source, own in sources.items():
        if source and own:
            metrics[f"eval/reward/{source}"] = fmean(own)
    return metrics
