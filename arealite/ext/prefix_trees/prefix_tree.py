"""Merge rows with a common prefix into prefix trees, so that shared tokens are computed once.

Under causal attention, the hidden state of a token depends only on that token and on the tokens
before it. Rows therefore have equal hidden states in their common prefix, for example the prompt of
a group or the earlier turns of an episode. A tree holds each shared run of tokens in one node.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

MIN_SHARED = 4
"""Minimum length of a shared prefix. To share only a start token does not pay."""


@dataclass(slots=True, kw_only=True)  # frozen would double the time to create it
class PrefixNode:
    """A run of consecutive tokens that one or more rows have in common."""

    row: int
    """Index of one of these rows."""
    begin: int
    """Position of the first token in the row, which is the number of tokens before it."""
    end: int
    """Position after the last token in the row."""
    parent: int
    """Index of the node that ends where this node begins; -1 for the root of a tree."""


class Forest(NamedTuple):
    """Trees in depth-first order: the descendants of a node directly follow it.

    The first descendant is the child with the longest row.
    """

    nodes: list[PrefixNode]
    last: list[int]
    """Index of the node in which each row ends."""

    def path(self, row: int) -> set[int]:
        """Return the indices of the nodes that hold the tokens of a row."""
        path = set[int]()
        node = self.last[row]
        while node >= 0:
            path.add(node)
            node = self.nodes[node].parent
        return path


@dataclass(kw_only=True)
class _Draft:
    """A node of the trees under construction."""

    row: int
    begin: int
    end: int
    children: "dict[bytes, _Draft]" = field(default_factory=lambda: dict[bytes, _Draft]())
    ends: list[int] = field(default_factory=lambda: list[int]())
    """Indices of the rows that end with the node."""
    longest: int = 0
    """Length of the longest row that contains the node."""

    def split(self, position: int, key: bytes) -> None:
        """Move the tokens from `position` on, with all that follows, to a child with this key."""
        lower_part = replace(self, begin=position)
        self.end = position
        self.children = {key: lower_part}
        self.ends = []


def _key(row: np.ndarray, position: int) -> bytes:
    """Return the key of the child that begins at a position: one token, or MIN_SHARED of a root."""
    num_tokens = 1 if position else MIN_SHARED
    return row[position : position + num_tokens].tobytes()


def prefix_forest(rows: Sequence[np.ndarray]) -> Forest:
    """Merge rows into prefix trees, in time linear in the number of tokens.

    The number of tokens in the trees does not depend on the order of the rows.

    Args:
        rows: The tokens of each row, [T] with T > 0, all of one dtype. An item is a
            token, or a token with its recorded experts. Equal items are shared.
    """
    root = _Draft(row=0, begin=0, end=0)
    for row in range(len(rows)):
        _insert(root, rows, row)
    return _depth_first(root, num_rows=len(rows))


def _insert(
    root: _Draft,
    rows: Sequence[np.ndarray],
    row: int,
) -> None:
    """Add a row to the trees, which are the children of `root`."""
    tokens = rows[row]
    length = len(tokens)
    path = _shared_path(root, rows, row)
    last = path[-1]
    position = last.end
    for node in path:
        node.longest = max(node.longest, length)
    if position < length:
        leaf = _Draft(
            row=row,
            begin=position,
            end=length,
            longest=length,
        )
        last.children[_key(tokens, position)] = leaf
        last = leaf
    last.ends.append(row)


def _shared_path(
    root: _Draft,
    rows: Sequence[np.ndarray],
    row: int,
) -> list[_Draft]:
    """Return the nodes whose tokens a row begins with, from `root` on.

    If the row leaves the trees inside a node, this node is split there.
    """
    tokens = rows[row]
    path = [root]
    position = 0
    while True:
        child = path[-1].children.get(_key(tokens, position))
        if child is None:
            return path
        path.append(child)
        stop = min(child.end, len(tokens))
        child_tokens = rows[child.row]
        differs = child_tokens[position:stop] != tokens[position:stop]
        if differs.any():
            position += int(differs.argmax())
        else:
            position = stop
        if position < child.end:
            child.split(position, _key(child_tokens, position))
            return path


def _depth_first(root: _Draft, num_rows: int) -> Forest:
    """Return the descendants of `root` as a forest."""
    nodes = list[PrefixNode]()
    last = [0] * num_rows
    stack = [(tree, -1) for tree in reversed(root.children.values())]
    while stack:
        draft, parent = stack.pop()
        index = len(nodes)
        node = PrefixNode(
            row=draft.row,
            begin=draft.begin,
            end=draft.end,
            parent=parent,
        )
        nodes.append(node)
        for row in draft.ends:
            last[row] = index
        children = sorted(reversed(draft.children.values()), key=lambda child: child.longest)
        stack += [(child, index) for child in children]
    return Forest(nodes=nodes, last=last)


@dataclass(kw_only=True)
class _Part:
    """Rows of one tree, and the number of tokens that are computed for them."""

    num_tokens: int
    rows: list[int]


def tree_parts(
    rows: Sequence[np.ndarray],
    budget: int,
    *,
    rows_per_example: int = 1,
) -> tuple[list[list[int]], list[int]]:
    """Divide rows into parts, each of one tree, and count their computed tokens.

    A micro-batch computes one or more whole parts.

    Args:
        rows: As in `prefix_forest`.
        budget: Largest number of computed tokens of a part; a single example may exceed it.
        rows_per_example: Number of consecutive rows that stay together. If it is 2 or more, each
            example is a part.

    Returns:
        (row indices of each part, computed tokens of each part), largest parts first.
    """
    forest = prefix_forest(rows)
    is_divisible = rows_per_example == 1
    order = [*range(len(rows))]
    if is_divisible:
        order.sort(key=lambda row: forest.last[row])
    parts = list[_Part]()
    path = set[int]()
    for place, row in enumerate(order):
        path_before = path
        path = forest.path(row)
        num_tokens = len(rows[row])
        shared_ends = [forest.nodes[node].end for node in path & path_before]
        num_shared = max(shared_ends, default=0)
        num_added = num_tokens - num_shared
        is_same_example = place % rows_per_example > 0
        shares_tree = is_divisible and num_shared > 0
        if is_same_example or (shares_tree and parts[-1].num_tokens + num_added <= budget):
            parts[-1].num_tokens += num_added
            parts[-1].rows.append(row)
        else:
            parts.append(_Part(num_tokens=num_tokens, rows=[row]))
    parts.sort(key=lambda part: (-part.num_tokens, part.rows))
    return [part.rows for part in parts], [part.num_tokens for part in parts]
