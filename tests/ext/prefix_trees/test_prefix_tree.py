"""Prefix trees contain every row as a path, share common prefixes, and keep the order of trees."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from arealite.ext.prefix_trees.prefix_tree import MIN_SHARED, Forest, prefix_forest, tree_parts

rows_of = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=30), max_size=12)


def arrays(rows: list[list[int]]) -> list[np.ndarray]:
    return [np.array(row, np.int32) for row in rows]


def path(forest: Forest, rows: list[np.ndarray], index: int) -> list[int]:
    """Return the tokens from the root of the tree to the end of a node."""
    node = forest.nodes[index]
    before = path(forest, rows, node.parent) if node.parent >= 0 else []
    assert len(before) == node.begin
    return before + rows[node.row][node.begin : node.end].tolist()


def size(rows: list[np.ndarray]) -> int:
    return sum(node.end - node.begin for node in prefix_forest(rows).nodes)


@given(rows_of)
def test_every_row_is_a_path_and_descendants_follow_their_node(rows: list[list[int]]) -> None:
    forest = prefix_forest(arrays(rows))
    for row, last in zip(rows, forest.last, strict=True):
        assert path(forest, arrays(rows), last) == row
    for index, node in enumerate(forest.nodes):
        assert node.parent < index
        between = forest.nodes[node.parent + 1 : index]
        assert node.parent < 0 or all(other.parent >= node.parent for other in between)


@given(rows_of)
def test_two_rows_share_exactly_their_common_prefix(rows: list[list[int]]) -> None:
    forest = prefix_forest(arrays(rows))
    for a, b in pairwise(rows):
        common = 0
        while common < min(len(a), len(b)) and a[common] == b[common]:
            common += 1
        pair = prefix_forest(arrays([a, b]))
        total = sum(node.end - node.begin for node in pair.nodes)
        shared = common >= MIN_SHARED or (common == len(a) == len(b))
        assert total == len(a) + len(b) - (common if shared else 0)
    assert sum(node.end - node.begin for node in forest.nodes) <= sum(map(len, rows))


@given(rows_of, st.integers(1, 100))
def test_parts_have_every_row_once_and_keep_the_budget(rows: list[list[int]], budget: int) -> None:
    parts, tokens = tree_parts(arrays(rows), budget)
    assert sorted(row for part in parts for row in part) == list(range(len(rows)))
    assert tokens == sorted(tokens, reverse=True)
    for part, counted in zip(parts, tokens, strict=True):
        assert size(arrays([rows[row] for row in part])) == counted
        assert len(part) == 1 or counted <= budget


def test_group_with_one_prompt_is_one_part_that_counts_the_prompt_once() -> None:
    rows = [[5] * 100 + [row] * 10 for row in range(8)]
    other = [[6] * 50]
    assert tree_parts(arrays(rows + other), 1000) == ([[*range(8)], [8]], [180, 50])
    parts, tokens = tree_parts(arrays(rows), 130)
    assert [len(part) for part in parts] == [3, 3, 2] and tokens == [130, 130, 120]
    pairs = tree_parts(arrays(rows), 1000, rows_per_example=2)
    assert pairs == ([[0, 1], [2, 3], [4, 5], [6, 7]], [120] * 4)


@given(rows_of, st.randoms())
def test_trees_have_as_many_tokens_in_any_order(rows: list[list[int]], rng: Random) -> None:
    before = size(arrays(rows))
    rng.shuffle(rows)
    assert size(arrays(rows)) == before


def test_groups_with_a_common_system_prompt_share_it_and_their_own_prompts() -> None:
    prompts = [[1] * 20 + [2 + group] * 500 for group in range(8)]
    rows = [[*prompt, *[50 + answer] * 100] for prompt in prompts for answer in range(8)]
    assert size(arrays(rows)) == 20 + 8 * (500 + 8 * 100)
