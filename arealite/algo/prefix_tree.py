"""Merge rows of tokens that begin alike into prefix trees, so that shared tokens are computed once.

Under causal attention, the hidden state of a token depends only on the tokens before it. Rows that
begin alike, for example the prompt of a group or the earlier turns of an episode, have the same
states there. A tree has each shared run of tokens as one node.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

LEAST_SHARED = 4
"""Tokens from which on a common beginning is shared. A first token that all rows have is not."""
MOST_BEHIND = 16
"""Tokens of a row behind a shared token. Attention to a shared beginning costs a product for each
token behind it: with more of them (measured on a CPU, hidden size 128), sharing saves nothing."""


class Node(NamedTuple):
    """Consecutive tokens that the same rows have."""

    row: int
    """One of these rows."""
    begin: int
    """Position of the first token in the row, which is the number of tokens before it."""
    end: int
    parent: int
    """Index of the node before it; -1 for the root of a tree."""


class Forest(NamedTuple):
    """Trees in depth-first order: the descendants of a node directly follow it, and first of them
    the child with the longest row."""

    nodes: list[Node]
    last: list[int]
    """The node in which each row ends."""


@dataclass
class _Draft:
    """A node while rows are added."""

    row: int
    begin: int
    end: int
    children: "dict[bytes, _Draft]" = field(default_factory=lambda: dict[bytes, _Draft]())
    ends: list[int] = field(default_factory=lambda: list[int]())
    longest: int = 0
    """Length of the longest row that passes."""


def _key(row: np.ndarray, begin: int, end: int | None = None) -> bytes:
    """Return the tokens from `begin` that must be equal before more of them are compared."""
    return row[begin:end][:LEAST_SHARED].tobytes()


def prefix_forest(rows: Sequence[np.ndarray]) -> Forest:
    """Merge rows into prefix trees, in time linear in their tokens.

    Args:
        rows: The tokens of each row, [T] with T > 0, of one dtype. Equal items are equal tokens.
    """
    roots = _Draft(0, 0, 0)
    for number, row in enumerate(rows):
        path, at, child = [roots], 0, roots
        while at == child.end and (found := path[-1].children.get(_key(row, at))) is not None:
            child, stop = found, min(found.end, len(row))
            differs = rows[child.row][at:stop] != row[at:stop]
            at = at + int(differs.argmax()) if differs.any() else stop
            path += [child] if at == child.end else []
        own = _Draft(number, at, len(row), longest=len(row))
        if 0 < at * MOST_BEHIND < len(row) - at:
            own.begin, key = 0, _key(row, 0) + number.to_bytes(8, "little")
            roots.children[key] = own
        else:
            if at < child.end:  # the row leaves the tree inside a node, which is divided
                rest = replace(child, begin=at)
                child.end, child.children = at, {_key(rows[child.row], at, child.end): rest}
                child.ends = []
                path.append(child)
            for node in path:
                node.longest = max(node.longest, len(row))
            if at < len(row):
                path[-1].children[_key(row, at)] = own
            else:
                own = path[-1]
        own.ends.append(number)
    nodes, last = list[Node](), [0] * len(rows)
    waiting = [(child, -1) for child in reversed(roots.children.values())]
    while waiting:
        draft, parent = waiting.pop()
        for number in draft.ends:
            last[number] = len(nodes)
        children = sorted(reversed(draft.children.values()), key=lambda child: child.longest)
        waiting += [(child, len(nodes)) for child in children]
        nodes.append(Node(draft.row, draft.begin, draft.end, parent))
    return Forest(nodes, last)


def tree_chunks(
    rows: Sequence[np.ndarray], budget: int, *, rows_per_example: int = 1
) -> tuple[list[list[int]], list[int]]:
    """Divide rows into parts of trees that one micro-batch computes, and count their tokens.

    Args:
        rows: As in `prefix_forest`.
        budget: Largest number of computed tokens of a part; a single example may exceed it.
        rows_per_example: Consecutive rows that stay together; from 2 on, each example is a part.

    Returns:
        (rows of each part, computed tokens of each part), most tokens first.
    """
    size, forest = rows_per_example, prefix_forest(rows)
    found, path = list[tuple[int, list[int]]](), set[int]()
    order = sorted(range(len(rows)), key=lambda row: forest.last[row] if size == 1 else row)
    for number, row in enumerate(order):
        before, path, node = path, set[int](), forest.last[row]
        while node >= 0:
            path.add(node)
            node = forest.nodes[node].parent
        shared = max((forest.nodes[n].end for n in path & before), default=0)
        more = len(rows[row]) - shared
        if number % size or (size == 1 and shared and found[-1][0] + more <= budget):
            found[-1] = found[-1][0] + more, [*found[-1][1], row]
        else:
            found.append((len(rows[row]), [row]))
    found.sort(key=lambda part: (-part[0], part[1]))
    return [part for _, part in found], [tokens for tokens, _ in found]
