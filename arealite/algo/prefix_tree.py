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


class Node(NamedTuple):
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

    nodes: list[Node]
    last: list[int]
    """Index of the node in which each row ends."""


@dataclass
class _Draft:
    """A node of the trees under construction."""

    row: int
    begin: int
    end: int
    children: "dict[bytes, _Draft]" = field(default_factory=lambda: dict[bytes, _Draft]())
    ends: list[int] = field(default_factory=lambda: list[int]())
    longest: int = 0
    """Length of the longest row that contains the node."""


def _key(row: np.ndarray, at: int) -> bytes:
    """Return the key of a child: the token at `at`, or the first MIN_SHARED tokens of a root."""
    return row[at : at + (1 if at else MIN_SHARED)].tobytes()


def prefix_forest(rows: Sequence[np.ndarray]) -> Forest:
    """Merge rows into prefix trees, in time linear in the number of tokens.

    The number of tokens in the trees does not depend on the order of the rows.

    Args:
        rows: The tokens of each row, [T] with T > 0, all of one dtype. An item is a
            token, or a token with its recorded experts. Equal items are shared.
    """
    roots = _Draft(0, 0, 0)
    for number, row in enumerate(rows):
        path = [roots]
        at = 0
        child = roots
        while at == child.end and (found := path[-1].children.get(_key(row, at))) is not None:
            child, stop = found, min(found.end, len(row))
            differs = rows[child.row][at:stop] != row[at:stop]
            at = at + int(differs.argmax()) if differs.any() else stop
            path += [child] if at == child.end else []
        own = _Draft(number, at, len(row), longest=len(row))
        if at < child.end:  # the row differs inside this node: split the node
            rest = replace(child, begin=at)
            child.end, child.children, child.ends = at, {_key(rows[child.row], at): rest}, []
            path.append(child)
        for node in path:
            node.longest = max(node.longest, len(row))
        if at < len(row):
            path[-1].children[_key(row, at)] = own
        else:
            own = path[-1]
        own.ends.append(number)
    nodes = list[Node]()
    last = [0] * len(rows)
    waiting = [(child, -1) for child in reversed(roots.children.values())]
    while waiting:
        draft, parent = waiting.pop()
        for number in draft.ends:
            last[number] = len(nodes)
        children = sorted(reversed(draft.children.values()), key=lambda child: child.longest)
        waiting += [(child, len(nodes)) for child in children]
        nodes.append(Node(draft.row, draft.begin, draft.end, parent))
    return Forest(nodes, last)


def tree_parts(
    rows: Sequence[np.ndarray], budget: int, *, rows_per_example: int = 1
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
    size, forest = rows_per_example, prefix_forest(rows)
    found = list[tuple[int, list[int]]]()
    path = set[int]()
    order = sorted(range(len(rows)), key=lambda row: forest.last[row] if size == 1 else row)
    for number, row in enumerate(order):
        before = path
        path = set[int]()
        node = forest.last[row]
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
