"""Partitions keep groups whole, balance ranks, and are deterministic."""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from arealite.algo.partition import balance, deal_groups, partition
from arealite.api.trajectory import TrajectoryHeader

batches = st.lists(st.tuples(st.integers(1, 8), st.integers(0, 500)), min_size=4, max_size=20)


def header(group: str, tokens: int, *, prompt: int = 0, computed: int = 0) -> TrajectoryHeader:
    """Make a header; `prompt=0` makes a header of an older version, which recorded no prompt."""
    return TrajectoryHeader(
        trajectory_id=f"{group}/0/agent",
        group_id=group,
        member=0,
        seat="agent",
        task_id="task",
        reward=0.0,
        reward_parts={},
        segment_lengths=[tokens],
        trained_tokens=1,
        oldest_version=0,
        newest_version=0,
        turns=1,
        truncated=False,
        interruptions=0,
        seconds=0.0,
        waits={},
        prompt=group.encode() if prompt else b"",
        prompt_tokens=prompt,
        computed_tokens=computed,
    )


@given(batches, st.integers(1, 4), st.integers(1, 4), st.none() | st.integers(0, 99))
def test_partition_keeps_groups_whole_and_is_deterministic(
    shape: list[tuple[int, int]], updates: int, ranks: int, seed: int | None
) -> None:
    group_ids = [f"g{i}" for i, (size, _) in enumerate(shape) for _ in range(size)]
    tokens = [length + 7 * k for size, length in shape for k in range(size)]
    headers = [header(group, count) for group, count in zip(group_ids, tokens, strict=True)]
    headers = [msgspec.structs.replace(h, trajectory_id=str(i)) for i, h in enumerate(headers)]
    minibatches, rank_of = partition(headers, updates=updates, ranks=ranks, seed=seed)
    assert (minibatches, rank_of) == partition(headers, updates=updates, ranks=ranks, seed=seed)
    homes = {group: {m for g, m in zip(group_ids, minibatches, strict=True) if g == group}
             for group in group_ids}  # fmt: skip
    assert all(len(home) == 1 for home in homes.values())
    sizes = Counter(next(iter(home)) for home in homes.values())
    assert set(sizes) == set(range(updates))
    assert max(sizes.values()) - min(sizes.values()) <= 1
    for update in range(updates):
        rows = [i for i, m in enumerate(minibatches) if m == update]
        used = {rank_of[i] for i in rows}
        assert len(used) == min(ranks, len(rows))


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1, 5))
@example([1] * 6, 5)
def test_balance_is_close_to_the_optimum(tokens: list[int], ranks: int) -> None:
    """The largest load is one row, or at most the mean of all other rows plus a row that is not
    among the `ranks` longest."""
    loads = Counter({rank: 0 for rank in range(ranks)})
    for count, rank in zip(tokens, balance(tokens, ranks=ranks), strict=True):
        loads[rank] += count
    last = [*sorted(tokens, reverse=True), *[0] * ranks][ranks]
    bound = max(max(tokens), (sum(tokens) - last) / ranks + last)
    assert max(loads.values()) <= bound + 1e-9


def test_groups_keep_their_order_without_a_seed_and_are_shuffled_with_one() -> None:
    ids = [f"g{i}" for i in range(16)]
    assert deal_groups(ids, updates=2, seed=None) == [0] * 8 + [1] * 8
    assert deal_groups(ids, updates=2, seed=1) != deal_groups(ids, updates=2, seed=2)


def test_too_few_groups_raise_an_error() -> None:
    with pytest.raises(ValueError, match="2 groups cannot fill 3 updates"):
        deal_groups(["a", "b"], updates=3, seed=None)


def loads(headers: list[TrajectoryHeader], ranks: int) -> tuple[list[int], int]:
    """Return the computed tokens of each rank, and the number of groups on several ranks."""
    rank_of = partition(headers, updates=1, ranks=ranks, seed=None)[1]
    homes, totals = dict[str, set[int]](), [0] * ranks
    for each, rank in zip(headers, rank_of, strict=True):
        if rank not in homes.setdefault(each.group_id, set()):
            totals[rank] += each.prompt_tokens
        homes[each.group_id].add(rank)
        totals[rank] += each.computed_tokens - each.prompt_tokens
    return totals, sum(len(home) > 1 for home in homes.values())


def test_groups_with_equal_prompts_stay_on_one_rank_and_ranks_are_balanced() -> None:
    rng = np.random.default_rng(0)
    headers = [
        header(f"g{i}", 9999, prompt=prompt, computed=prompt + int(answer))
        for i, prompt in enumerate(rng.integers(200, 1000, 256).tolist())
        for answer in np.clip(rng.lognormal(np.log(300), 0.8, 8), 4, 4096)
    ]
    totals, divided = loads(headers, 8)
    assert divided == 0 and min(totals) >= 0.97 * max(totals)


def test_group_is_divided_if_a_rank_would_be_idle_or_overloaded() -> None:
    group = [header("a", 0, prompt=100, computed=150) for _ in range(8)]
    assert loads(group, 2) == ([300, 300], 1)
    assert loads(group * 2, 1) == ([100 + 16 * 50], 0)
    long = [header("b", 0, prompt=100, computed=1000) for _ in range(4)]
    assert loads([*group, *long], 2) == ([2200, 2200], 2)
