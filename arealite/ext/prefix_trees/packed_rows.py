"""The layout of packed rows: prefix trees, in which rows share tokens, end to end.

Without a shared prefix, each row is a tree of one node.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from arealite.api.engine import Sequence
from arealite.api.engine_extension import Placement, Plan, RowLayout
from arealite.ext.prefix_trees.packed_plan import packed
from arealite.ext.prefix_trees.prefix_tree import Forest, prefix_forest
from arealite.ext.prefix_trees.tree_attention import KernelCalls
from arealite.impl.engine.micro_batches import routing_of


@dataclass(kw_only=True)
class PrefixTree:
    """Prefix trees of a micro-batch: the positions of their nodes among its N tokens."""

    device: torch.device
    bounds: list[int]
    """The first position of each node, and N as the last item."""
    parents: list[int]
    """Index of the parent of each node; -1: the node is a root."""
    paths: list[np.ndarray]
    """int64 for each node: positions of the tokens of its ancestors and of its own tokens."""

    @classmethod
    def of(cls, forest: Forest, device: torch.device) -> "PrefixTree":
        """Place the nodes of a forest end to end, in their order."""
        node_lengths = [node.end - node.begin for node in forest.nodes]
        bounds = [0, *accumulate(node_lengths)]
        parents = [node.parent for node in forest.nodes]
        paths = list[np.ndarray]()
        for parent, (begin, end) in zip(parents, pairwise(bounds), strict=True):
            positions = np.arange(begin, end)
            if parent >= 0:
                positions = np.concatenate([paths[parent], positions])
            paths.append(positions)
        return cls(
            device=device,
            bounds=bounds,
            parents=parents,
            paths=paths,
        )

    def padded(self, missing: int) -> "PrefixTree":
        """Return these trees, followed by a tree of `missing` > 0 tokens of padding."""
        begin = self.bounds[-1]
        end = begin + missing
        return PrefixTree(
            device=self.device,
            bounds=[*self.bounds, end],
            parents=[*self.parents, -1],
            paths=[*self.paths, np.arange(begin, end)],
        )

    def put(
        self,
        numbers: np.ndarray | list[int],
        dtype: torch.dtype = torch.int64,
    ) -> Tensor:
        """Return numbers as a tensor on the device."""
        return torch.as_tensor(numbers, dtype=dtype).to(self.device)

    @cached_property
    def kernel(self) -> KernelCalls | None:
        """The calls of a kernel without copies of shared keys; None: the device has none."""
        return KernelCalls(self) if self.device.type == "cpu" else None

    @cached_property
    def keys(self) -> Tensor | None:
        """Positions of the keys, int64, node after node; None: no tokens are shared."""
        if max(self.parents) < 0:
            return None
        return self.put(np.concatenate(self.paths))

    @cached_property
    def flash_bounds(self) -> tuple[Tensor, Tensor, int, int]:
        """Bounds of each node's queries and keys, int32, and the largest numbers of both."""
        key_counts = [len(path) for path in self.paths]
        key_bounds = [0, *accumulate(key_counts)]
        return (
            self.put(self.bounds, torch.int32),
            self.put(key_bounds, torch.int32),
            int(np.diff(self.bounds).max()),
            max(key_counts),
        )


class PackedRows(RowLayout):
    """Micro-batches of prefix trees, end to end in one row of tokens."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def plan(self, rows: list[Sequence], budget: int, *, rows_per_example: int) -> Plan:
        """Return the row indices of each micro-batch; see `packed`."""
        return packed(input_items(rows), budget, rows_per_example=rows_per_example)

    def place(self, rows: Seq[Sequence]) -> Placement:
        """Place the inputs in prefix trees."""
        forest = prefix_forest(input_items(rows))
        tree = PrefixTree.of(forest, self.device)
        width = tree.bounds[-1]
        node_begins = [node.begin for node in forest.nodes]
        bounds = np.array(tree.bounds)
        shifts = node_begins - bounds[:-1]
        position_ids_W = np.arange(width) + np.repeat(shifts, bounds[1:] - bounds[:-1])
        return Placement(
            shape=(1, width),
            place_I=np.concatenate([tree.paths[node] for node in forest.last]),
            attention={"position_ids": tree.put(position_ids_W[None]), "prefix_tree": tree},
        )


def input_items(rows: Seq[Sequence]) -> list[np.ndarray]:
    """Return the inputs of each row as items to compare: tokens, with their recorded experts."""
    row_items = [row.tokens for row in rows]
    routing_SR = routing_of(rows)
    if routing_SR is not None:
        tokens_S = np.concatenate(row_items).astype(np.int32)
        token_bytes = tokens_S[:, None].view(np.uint8)
        item_bytes = np.concatenate([token_bytes, routing_SR], 1)
        item_dtype = f"V{item_bytes.shape[1]}"
        items_S = item_bytes.view(item_dtype)[:, 0]
        row_ends = np.cumsum([len(row.tokens) for row in rows])
        row_items = np.split(items_S, row_ends[:-1])
    inputs = list[np.ndarray]()
    for items in row_items:
        num_inputs = max(1, len(items) - 1)
        inputs.append(items[:num_inputs])
    return inputs
