"""Assign a batch's trajectories to optimizer updates and ranks, and rows to micro-batches.

The functions are deterministic, so that all ranks, a restarted datapipe and a replay agree.
"""

import heapq
import random
from collections.abc import Sequence

from arealite.api.engine_extension import Plan
from arealite.api.trainer_messages import Batch, BatchRequest
from arealite.api.trajectory import TrajectoryHeader

MICRO_BATCH_OVERHEAD = 24
"""Fixed cost of a micro-batch, in tokens. More padding than this starts a new micro-batch. Measured
on a CPU (tools/bench_train.py): 400 for a model of 0.1 million parameters, 90 for 0.8 million, and
less for larger models. 24 keeps padding below 5 % for 512 rows."""


def deal_groups(
    group_ids: Sequence[str],
    *,
    updates: int,
    seed: int | None,
) -> list[int]:
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
    minibatch_of_group = dict[str, int]()
    for index, group in enumerate(groups):
        minibatch_of_group[group] = index * updates // len(groups)
    return [minibatch_of_group[group] for group in group_ids]


def balance(tokens: Sequence[int], *, ranks: int) -> list[int]:
    """Return the rank of each row, so that ranks have about equal numbers of tokens.

    Each row, longest first, goes to the least loaded rank: at most 4/3 of the optimum (Graham
    1969). Every rank gets a row if there are enough rows.
    """
    loads = [(0, rank) for rank in range(ranks)]
    rank_of_row = [0] * len(tokens)
    for row in sorted(range(len(tokens)), key=lambda index: (-tokens[index], index)):
        load, rank = heapq.heappop(loads)
        rank_of_row[row] = rank
        load += max(1, tokens[row])
        heapq.heappush(loads, (load, rank))
    return rank_of_row


def balance_groups(headers: Sequence[TrajectoryHeader], *, ranks: int) -> list[int]:
    """Return the rank of each trajectory, so that the most loaded rank computes few tokens.

    Trajectories of a group with equal prompts form a set. A rank computes the prompt of a set once.
    The function tries whole sets, then parts of half the size, a quarter, and so on. It returns the
    division whose most loaded rank computes the fewest tokens; of equal ones, that with the largest
    parts. A rank may get no trajectory.
    """
    sets = _sets_of_equal_prompts(headers)
    part_size = max(map(len, sets), default=1)
    lowest_load = float("inf")
    best_division = list[int]()
    while part_size:
        parts = list[list[int]]()
        for indices in sets:
            begins = range(0, len(indices), part_size)
            parts += [indices[begin : begin + part_size] for begin in begins]
        costs = [_computed([headers[index] for index in part]) for part in parts]
        rank_of_part = balance(costs, ranks=ranks)
        loads = [0] * ranks
        rank_of = [0] * len(headers)
        for part, cost, rank in zip(parts, costs, rank_of_part, strict=True):
            loads[rank] += cost
            for index in part:
                rank_of[index] = rank
        if max(loads) < lowest_load:
            lowest_load = max(loads)
            best_division = rank_of
        part_size //= 2
    return best_division


def _sets_of_equal_prompts(headers: Sequence[TrajectoryHeader]) -> list[list[int]]:
    """Return the indices of the trajectories of each group and prompt."""
    sets = dict[tuple[str, bytes | str], list[int]]()
    for index, header in enumerate(headers):
        prompt = header.prompt or header.trajectory_id
        sets.setdefault((header.group_id, prompt), []).append(index)
    return list(sets.values())


def _computed(headers: Sequence[TrajectoryHeader]) -> int:
    """Return the computed tokens of trajectories with equal prompts; the prompt counts once."""
    tokens = sum(header.computed_tokens or header.num_tokens for header in headers)
    num_repeated = len(headers) - 1
    return max(1, tokens - num_repeated * headers[0].prompt_tokens)


def partition(
    headers: Sequence[TrajectoryHeader],
    *,
    updates: int,
    ranks: int,
    seed: int | None,
) -> tuple[list[int], list[int]]:
    """Return (minibatch, rank) of each trajectory; ranks are balanced within each minibatch."""
    group_ids = [header.group_id for header in headers]
    minibatches = deal_groups(group_ids, updates=updates, seed=seed)
    rank_of = [0] * len(headers)
    for update in range(updates):
        indices = [index for index, minibatch in enumerate(minibatches) if minibatch == update]
        minibatch_headers = [headers[index] for index in indices]
        minibatch_ranks = balance_groups(minibatch_headers, ranks=ranks)
        for index, rank in zip(indices, minibatch_ranks, strict=True):
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
    num_groups = len({header.group_id for header in headers})
    minibatches, ranks = partition(
        headers,
        updates=min(updates, num_groups),
        ranks=request.world_size,
        seed=seed + request.step,
    )
    return Batch(
        step=request.step,
        headers=headers,
        ranks=ranks,
        minibatches=minibatches,
        mine=[index for index, rank in enumerate(ranks) if rank == request.rank],
        waits=waits,
    )


def padded(
    lengths: Sequence[int],
    budget: int,
    *,
    rows_per_example: int = 1,
) -> Plan:
    """Plan micro-batches of at most `budget` tokens, padding included; longest examples first.

    An example is `rows_per_example` consecutive rows, which stay in one micro-batch in their order:
    a pair of answers of DPO, or a single row. A single example may exceed the budget. A micro-batch
    ends when its padding would cost more than another micro-batch.
    """
    example_widths = list[int]()
    for begin in range(0, len(lengths), rows_per_example):
        example_lengths = lengths[begin : begin + rows_per_example]
        example_widths.append(max(example_lengths))
    examples = range(len(example_widths))
    plan: Plan = []
    width = 0
    padding = 0
    for example in sorted(examples, key=lambda index: (-example_widths[index], index)):
        example_width = example_widths[example]
        padding += (width - example_width) * rows_per_example
        is_full = bool(plan) and (len(plan[-1]) + rows_per_example) * width > budget
        if not plan or is_full or padding > MICRO_BATCH_OVERHEAD:
            plan.append([])
            width = example_width
            padding = 0
        first_row = example * rows_per_example
        plan[-1] += range(first_row, first_row + rows_per_example)
    return plan
