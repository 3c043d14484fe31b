"""Handmade trajectories and batches for tests of the trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from arealite.api.trainer_messages import Batch
from arealite.api.trajectory import Segment, TrajectoryHeader
from tests.payloads import encode_segments


def segment(
    tokens: Sequence[int],
    *,
    sampled: int,
    version: int | Sequence[int] = 0,
    logprob: float = -1.0,
    reward: float = 0.0,
) -> Segment:
    """Return a segment whose last `sampled` tokens come from the policy; the last has `reward`."""
    length, prompt = len(tokens), len(tokens) - sampled
    mask = np.array([0] * prompt + [1] * sampled, np.uint8)
    versions = [version] * sampled if isinstance(version, int) else list(version)
    return Segment(
        tokens=np.asarray(tokens, "<i4").tobytes(),
        loss_mask=mask.tobytes(),
        logprobs=(mask * logprob).astype("<f4").tobytes(),
        versions=np.array([-1] * prompt + versions, "<i4").tobytes(),
        rewards=np.array([0.0] * (length - 1) + [reward], "<f4").tobytes(),
        temperature=0.7,
    )


def header(
    name: str, segments: Sequence[Segment], *, reward: float | None, **changes: Any
) -> TrajectoryHeader:
    """Return the header of `<group>/<member>/agent`, consistent with its segments."""
    group, member, seat = name.split("/")
    versions = np.concatenate([np.frombuffer(s.versions, "<i4") for s in segments])
    versions = versions[versions >= 0]
    facts: dict[str, Any] = {
        "trajectory_id": name,
        "group_id": group,
        "member": int(member),
        "seat": seat,
        "task_id": "train-0",
        "reward": reward,
        "reward_parts": {} if reward is None else {"exact": reward},
        "segment_lengths": [len(s.loss_mask) for s in segments],
        "trained_tokens": sum(s.loss_mask.count(1) for s in segments),
        "oldest_version": int(versions.min(initial=2**31 - 1)),
        "newest_version": int(versions.max(initial=-1)),
        "turns": len(segments),
        "truncated": False,
        "interruptions": 0,
        "seconds": 1.0,
        "waits": {"generation": 0.5},
    }
    return TrajectoryHeader(**(facts | changes))


def batch(
    trajectories: Sequence[tuple[TrajectoryHeader, Sequence[Segment]]],
    *,
    step: int = 0,
    rank: int = 0,
    ranks: Sequence[int] | None = None,
    minibatches: Sequence[int] | None = None,
) -> tuple[Batch, list[bytes]]:
    """Return batch `step` and its payloads, as the datapipe sends them to `rank`."""
    owners = list(ranks or [0] * len(trajectories))
    mine = [i for i, owner in enumerate(owners) if owner == rank]
    made = Batch(
        step=step,
        headers=[h for h, _ in trajectories],
        ranks=owners,
        minibatches=list(minibatches or [0] * len(trajectories)),
        mine=mine,
        waits={"batch_s": 0.25},
    )
    return made, [encode_segments(list(trajectories[i][1])) for i in mine]


def group(
    name: str, rewards: Sequence[float | None], *, version: int = 0, prompt: int = 2
) -> list[tuple[TrajectoryHeader, list[Segment]]]:
    """Return a group with one trajectory for each reward; member i has i + 1 sampled tokens."""
    made = []
    for member, reward in enumerate(rewards):
        tokens = [3 + member] * (prompt + member + 1)
        parts = [segment(tokens, sampled=member + 1, version=version, reward=reward or 0.0)]
        made.append((header(f"{name}/{member}/agent", parts, reward=reward), parts))
    return made
