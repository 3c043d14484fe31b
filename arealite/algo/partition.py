"""Assign a batch's trajectories to optimizer updates and to ranks.

The functions are deterministic, so that all ranks, a restarted datapipe and a replay agree.
"""

import heapq
import random
from collections.abc import Sequence

from arealite.api.trainer_messages import Batch, BatchRequest
from arealite.api.trajectory import TrajectoryHeader


def deal_groups(group_ids: Sequence[str], *, updates: int, seed: int | None) -> list[int]:
    """Return the minibatch of each trajectory.

    Groups stay whole, and the minibatches' numbers of groups differ by at most one.

    Args:
        group_ids: The group of each trajectory.
        updates: Number of minibatches.
        seed: Seed of a random order of groups; None: order of appearance. A batch is ordered from
            old to new groups, so that without a seed each update would get groups of one age.

    Raises:
        ValueError: There are fewer groups than updates.
    """
    groups = list(dict.fromkeys(group_ids))
    if len(groups) < updates:
        raise ValueError(f"{len(groups)} groups cannot fill {updates} updates")
    if seed is not None:
        random.Random(seed).shuffle(groups)
    place = {group: index * updates // len(groups) for index, group in enumerate(groups)}
    return [place[group] for group in group_ids]


def balance(tokens: Sequence[int], *, ranks: int) -> list[int]:
    """Return the rank of each row, so that ranks have about equal numbers of tokens.

    Each row, longest first, goes to the least loaded rank: at most 4/3 of the optimum (Graham
    1969). Every rank gets a row if there are enough rows.
    """
    loads = [(0, rank) for rank in range(ranks)]
    result = [0] * len(tokens)
    for index in sorted(range(len(tokens)), key=lambda i: (-tokens[i], i)):
        load, rank = heapq.heappop(loads)
        result[index] = rank
        heapq.heappush(loads, (load + max(1, tokens[index]), rank))
    return result


def balance_groups(headers: Sequence[TrajectoryHeader], *, ranks: int) -> list[int]:
    """Return the rank of each trajectory, so that the most loaded rank computes few tokens.

    Trajectories of a group with equal prompts form a set. A rank computes the prompt of a set once.
    The function tries whole sets, then parts of half the size, a quarter, and so on. It returns the
    division whose most loaded rank computes the fewest tokens; of equal ones, that with the largest
    parts. A rank may get no trajectory.
    """
    prompts = dict[tuple[str, bytes | str], list[int]]()
    for index, header in enumerate(headers):
        key = header.group_id, header.prompt or header.trajectory_id
        prompts.setdefault(key, []).append(index)
    size = max(map(len, prompts.values()), default=1)
    best = float("inf")
    result = list[int]()
    while size:
        parts = [one[i : i + size] for one in prompts.values() for i in range(0, len(one), size)]
        costs = [_computed([headers[i] for i in part]) for part in parts]
        loads = [0] * ranks
        found = [0] * len(headers)
        for part, cost, rank in zip(parts, costs, balance(costs, ranks=ranks), strict=True):
            loads[rank] += cost
            for index in part:
                found[index] = rank
        if max(loads) < best:
            best = max(loads)
            result = found
        size //= 2
    return result


def _computed(headers: Sequence[TrajectoryHeader]) -> int:
    """Return the computed tokens of trajectories with equal prompts; the prompt counts once."""
    tokens = sum(header.computed_tokens or header.num_tokens for header in headers)
    return max(1, tokens - (len(headers) - 1) * headers[0].prompt_tokens)


def partition(
    headers: Sequence[TrajectoryHeader], *, updates: int, ranks: int, seed: int | None
) -> tuple[list[int], list[int]]:
    """Return (minibatch, rank) of each trajectory; ranks are balanced within each minibatch."""
    group_ids = [header.group_id for header in headers]
    minibatches = deal_groups(group_ids, updates=updates, seed=seed)
    rank_of = [0] * len(headers)
    for update in range(updates):
        rows = [index for index, at in enumerate(minibatches) if at == update]
        for index, rank in zip(
            rows, balance_groups([headers[i] for i in rows], ranks=ranks), strict=True
        ):
            rank_of[index] = rank
    return minibatches, rank_of


def batch_for_rank(
    request: BatchRequest,
    headers: list[TrajectoryHeader],
    *,
    updates: int,
    seed: int,
    waits: dict[str, float],
) -> Batch:
    """Build the Batch message that answers a rank's request.

    Args:
        request: The request, with the rank and the world size.
        headers: The trajectories of the batch.
        updates: Optimizer updates of a step.
        seed: Seed of the run.
        waits: Metrics of the datapipe.
    """
    updates = min(updates, len({header.group_id for header in headers}))
    seed = seed + request.step
    size = request.world_size
    minibatches, ranks = partition(headers, updates=updates, ranks=size, seed=seed)
    mine = [index for index, rank in enumerate(ranks) if rank == request.rank]
    return Batch(request.step, headers, ranks, minibatches, mine, waits)
