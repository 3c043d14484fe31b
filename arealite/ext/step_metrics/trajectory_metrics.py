"""Metrics of a batch from the headers of its trajectories, which every rank has."""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from arealite.algo.advantages import members_of_groups
from arealite.api.trajectory import TrajectoryHeader, mean_reward, means
from arealite.impl.trainer.metrics import Metrics

Headers = Sequence[TrajectoryHeader]


def trajectory_metrics(headers: Headers, *, step: int) -> Metrics:
    """Compute the metrics of the whole batch from its headers."""
    rewards = column("reward", headers)
    groups = [(h.group_id, h.seat) for h in headers]
    scored = [reward for reward in rewards if reward is not None]
    ages = [step - h.oldest_version for h in headers]
    spans = [h.newest_version - h.oldest_version + 1 for h in headers]
    segment_counts = [len(h.segment_lengths) for h in headers]
    num_interruptions = sum(column("interruptions", headers))
    unchecked = [h.reward_parts.get("unchecked", 0.0) for h in headers]
    metrics = {
        "reward/unscored": float(len(headers) - len(scored)),
        "reward/unchecked": sum(unchecked),
        "episode/trajectories": float(len(headers)),
        "episode/turns_mean": mean_of("turns", headers),
        "episode/segments_mean": fmean(segment_counts),
        "episode/truncated_frac": mean_of("truncated", headers),
        "episode/seconds_mean": mean_of("seconds", headers),
        "episode/seconds_max": max(column("seconds", headers)),
        "rollout/interruptions_in_batch": float(num_interruptions),
        "staleness/versions_per_trajectory_mean": fmean(spans),
        "staleness/versions_per_trajectory_max": float(max(spans)),
        "staleness/mixed_version_frac": fmean(span > 1 for span in spans),
    }
    if scored:
        metrics |= spread("reward/", scored)
    metrics |= spread("length/tokens_", column("num_tokens", headers))
    metrics |= spread("length/trained_", column("trained_tokens", headers))
    metrics |= spread("staleness/", ages)
    wait_means = means(column("waits", headers))
    metrics |= prefixed("episode/wait/", wait_means)
    reward_part_means = means(column("reward_parts", headers))
    metrics |= prefixed("reward/parts/", reward_part_means)
    metrics |= prefixed("episode/", group_counts(rewards, groups))
    return metrics | metrics_by_source(headers)


def metrics_by_source(headers: Headers) -> Metrics:
    """Compute metrics for each source of tasks, and for each seat where there are several."""
    by_source = defaultdict[str, list[TrajectoryHeader]](list)
    seats = {*column("seat", headers)}
    for h in headers:
        if h.source:
            by_source[h.source].append(h)
        if len(seats) > 1:
            by_source[f"seat/{h.seat}"].append(h)
    metrics = Metrics()
    for source, headers_of_source in sorted(by_source.items()):
        reward = mean_reward(headers_of_source)
        if reward is not None:
            metrics[f"reward/{source}/mean"] = float(reward)
        metrics |= {
            f"episode/{source}/trajectories": float(len(headers_of_source)),
            f"episode/{source}/turns_mean": mean_of("turns", headers_of_source),
            f"episode/{source}/truncated_frac": mean_of("truncated", headers_of_source),
            f"length/{source}/trained_mean": mean_of("trained_tokens", headers_of_source),
        }
    return metrics


def column(name: str, headers: Headers) -> list[Any]:
    """Return a field of all headers."""
    return [getattr(h, name) for h in headers]


def mean_of(name: str, headers: Headers) -> float:
    """Return the mean of a field of headers."""
    return fmean(column(name, headers))


def prefixed(prefix: str, metrics: Mapping[str, float]) -> Metrics:
    """Return metrics whose names begin with `prefix`."""
    return {f"{prefix}{name}": number for name, number in metrics.items()}


def group_counts(
    rewards: Sequence[float | None],
    groups: Sequence[Hashable],
) -> dict[str, float]:
    """Count groups, groups of one episode, and larger groups whose rewards are all equal.

    The latter include groups in which fewer than two episodes have a score.
    """
    counts = {
        "groups": 0.0,
        "groups_of_one": 0.0,
        "groups_zero_variance": 0.0,
    }
    for members in members_of_groups(groups):
        scores = {rewards[index] for index in members} - {None}
        counts["groups"] += 1
        if len(members) == 1:
            counts["groups_of_one"] += 1
        elif len(scores) < 2:
            counts["groups_zero_variance"] += 1
    return counts


def spread(prefix: str, values: Sequence[float]) -> Metrics:
    """Return mean, min, max and std (population) of `values`; `prefix` begins their names."""
    array = np.asarray(values, np.float64)
    return {
        f"{prefix}mean": float(array.mean()),
        f"{prefix}min": float(array.min()),
        f"{prefix}max": float(array.max()),
        f"{prefix}std": float(array.std()),
    }
