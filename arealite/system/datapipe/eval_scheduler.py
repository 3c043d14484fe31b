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

    def __init__(
        self,
        tasks: Sequence[Task],
        *,
        samples: int,
        max_attempts: int,
    ) -> None:
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
        if eval_id in self.runs:
            return
        groups: list[Group] = []
        for row, task in enumerate(self.tasks):
            group = Group(
                seq=eval_id,
                group_id=f"e{eval_id}-{row}",
                task=task,
                size=task.eval_samples(self.samples),
                epoch=0,
                row=row,
            )
            groups.append(group)
            self.groups[group.group_id] = group
            self._leasable[group.group_id] = group
        self.runs[eval_id] = groups

    def lease(
        self,
        *,
        boot: int,
        version: int,
        credit: int,
    ) -> Lease | None:
        """Lease up to `credit` samples of the next task with unleased samples; None without one.

        Args:
            boot: Number of the datapipe's start, a part of the lease id.
            version: Policy version of the lease.
            credit: Maximum number of samples.
        """
        now = time.monotonic()
        for group_id, group in [*self._leasable.items()]:
            members = group.leasable(self.max_attempts, now)[:credit]
            if members:
                lease = Lease(
                    lease_id=f"{group_id}.{boot}.{next(self._numbers)}",
                    group_id=group_id,
                    split=f"eval-{group.seq}",
                    task=group.task,
                    members=members,
                    version=version,
                )
                group.leases[lease.lease_id] = lease
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
        group = self.groups.get(lease.group_id)
        if group is None:
            return
        active_lease = group.leases.pop(lease.lease_id, None)
        if active_lease is not None and is_lost:
            for member in group.unfinished(active_lease):
                group.failures.append((member, lease.lease_id, LOST))
        self._close_if_finished(group)

    def is_running(self, group_id: str, lease_id: str, member: int) -> bool:
        """Return whether a sample of an evaluation is leased and unfinished.

        False for a lease that was lost or answered, or that an earlier datapipe process granted.
        """
        group = self.groups.get(group_id)
        if group is None:
            return False
        lease = group.leases.get(lease_id)
        return lease is not None and member in group.unfinished(lease)

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
        num_exhausted = len(group.exhausted(self.max_attempts))
        return group.size - len(group.finished) - num_exhausted

    def _close_if_finished(self, group: Group) -> None:
        self._leasable[group.group_id] = group
        if not self.samples_left(group):
            group.state = "complete"

    def take_finished(self) -> list[tuple[int, dict[str, float]]]:
        """Return (evaluation id, metrics) of evaluations that finished since the last call."""
        finished: list[tuple[int, dict[str, float]]] = []
        for eval_id, groups in [*self.runs.items()]:
            if any(group.state != "complete" for group in groups):
                continue
            del self.runs[eval_id]
            for group in groups:
                del self.groups[group.group_id]
            metrics = score(groups)
            self.results[eval_id] = metrics
            finished.append((eval_id, metrics))
        return finished

    def forget(self, *, after: int) -> None:
        """Roll back: drop running evaluations, and results of steps later than `after`."""
        self.runs.clear()
        self.groups.clear()
        self._leasable.clear()
        self.results = {
            eval_id: metrics for eval_id, metrics in self.results.items() if eval_id <= after
        }


def score(groups: Sequence[Group]) -> dict[str, float]:
    """Average the scores of an evaluation. Samples that failed or have no score are counted."""
    headers = [header for group in groups for header in group.headers]
    num_failed = sum(group.size - len(group.finished) for group in groups)
    metrics = {"eval/num_prompts": float(len(groups)), "eval/failed": float(num_failed)}
    if not headers:
        return metrics
    rewards_by_group: list[list[float]] = []
    num_unscored = 0
    for group in groups:
        sample_rewards = _sample_rewards(group)
        rewards = [reward for reward in sample_rewards if reward is not None]
        rewards_by_group.append(rewards)
        num_unscored += len(sample_rewards) - len(rewards)
    all_rewards = [*chain.from_iterable(rewards_by_group)]
    if all_rewards:
        metrics["eval/reward"] = fmean(all_rewards)
    if num_unscored:
        metrics["eval/unscored"] = float(num_unscored)
    metrics["eval/tokens_mean"] = fmean(header.trained_tokens for header in headers)
    metrics["eval/oldest_version"] = float(min(header.oldest_version for header in headers))
    metrics["eval/newest_version"] = float(max(header.newest_version for header in headers))
    metrics |= _pass_at_k(groups, rewards_by_group)
    metrics |= _source_rewards(groups, rewards_by_group)
    return metrics


def _sample_rewards(group: Group) -> list[float | None]:
    """Return the reward of each sample with trajectories, averaged over its seats."""
    return [mean_reward(headers) for headers in group.finished.values() if headers]


def _pass_at_k(
    groups: Sequence[Group], rewards_by_group: Sequence[Sequence[float]]
) -> dict[str, float]:
    """Return pass@k for the usual k; {} if each task has only one sample."""
    sizes = {group.size for group in groups}
    if max(sizes) <= 1:
        return {}
    counts: list[tuple[int, int]] = []
    for rewards in rewards_by_group:
        num_solved = sum(reward >= SOLVED for reward in rewards)
        counts.append((len(rewards), num_solved))
    metrics = dict[str, float]()
    for k in sorted({k for size in sizes for k in default_ks(size)}):
        if estimate := mean_pass_at_k(counts, k):
            metrics[f"eval/pass@{k}"] = estimate.mean
    return metrics


def _source_rewards(
    groups: Sequence[Group], rewards_by_group: Sequence[Sequence[float]]
) -> dict[str, float]:
    """Return the mean reward of the tasks of each source."""
    rewards_by_source: defaultdict[str, list[float]] = defaultdict(list)
    for group, rewards in zip(groups, rewards_by_group, strict=True):
        rewards_by_source[group.task.source] += rewards
    return {
        f"eval/reward/{source}": fmean(rewards)
        for source, rewards in rewards_by_source.items()
        if source and rewards
    }
