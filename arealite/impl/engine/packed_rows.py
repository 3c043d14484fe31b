"""The rows of a packed micro-batch, end to end: prefix trees, in which rows share tokens.

Without a shared prefix, each row is a tree of one node.
"""

from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from arealite.algo.prefix_tree import Forest
from arealite.api.hooks import PackedKernel, PackedKernelMaker
from arealite.base import entries


@cache
def _kernel_makers() -> list[PackedKernelMaker]:
    return entries.hooks("packed_kernel")


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
    def kernel(self) -> PackedKernel | None:
        """The kernel of an extension for the device; None: there is none."""
        return entries.first_result(_kernel_makers(), self)

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
