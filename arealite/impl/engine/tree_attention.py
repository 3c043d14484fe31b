"""Causal attention over prefix trees on a CPU, without a mask and without copies of shared tokens.

The tokens of a tree are in depth-first order. A chain is a run of nodes in which each node is the
parent of the next one. The tokens of a chain are consecutive and attend to each other causally. The
other descendants of a node of the chain are consecutive, too. They attend to the whole chain up to
that node. A query thus has several partial results. They are merged by their log-sum-exp, as flash
attention merges blocks.

Shape letters: N = tokens of a micro-batch, D = width of a head, B = chains of a call, W = tokens of
the longest of these chains.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from arealite.algo.prefix_tree import Forest

_forward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
LEAST_TOKENS = 128
"""Smallest number of tokens of an unpadded call. Fewer tokens share a padded call with others."""
MOST_PADDING = 8
"""Largest share of padding in a call, as a divisor: at most 1 / MOST_PADDING of the tokens."""


class Piece(NamedTuple):
    """Consecutive tokens that attend to the same keys, or a chain that attends to itself."""

    num_keys: int
    """0 for a chain."""
    depth: int
    """Pieces of one depth with equally many keys have no token in common."""
    length: int
    """Number of tokens."""
    key: int
    """Position of the first key."""
    query: int
    """Position of the first token."""


@dataclass
class Call:
    """One call of the kernel: B runs of up to W tokens, each with its own keys."""

    rows: int
    queries: slice | Tensor
    """Positions [B · W] of the tokens among the N tokens: a slice, or int64. Padding repeats the
    last token of a run."""
    places: slice | Tensor
    """The same positions without the padding."""
    keys: slice | Tensor | None = None
    """Positions of the keys; None: the runs are chains that attend to themselves."""
    mask: Tensor | None = None
    """bool [B, 1, W, 1]: False for padding; None: there is no padding."""

    def take(self, values: Tensor, *, keys: bool = False) -> Tensor:
        """Return [B, heads, W, …] of values [N, heads, …]: of the tokens, or of their keys."""
        at = self.keys if keys and self.keys is not None else self.queries
        return values[at].unflatten(0, (self.rows, -1)).transpose(1, 2)

    def put(self, into: Tensor, values: Tensor) -> None:
        """Write values [B, heads, W, …] without the padding into [N, heads, …]."""
        into[self.places] = self._flat(values)

    def add(self, into: Tensor, values: Tensor, *, keys: bool) -> None:
        """Add values [B, heads, W, …] of the tokens, or of their keys, to [N, heads, …]."""
        if keys and self.keys is not None:
            into[self.keys] += values.transpose(1, 2).flatten(0, 1)
        else:
            into[self.places] += self._flat(values)

    def _flat(self, values: Tensor) -> Tensor:
        flat = values.transpose(1, 2).flatten(0, 1)
        return flat if self.mask is None else flat[self.mask.flatten()]


@dataclass
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
        bounds = [0, *accumulate(node.end - node.begin for node in forest.nodes)]
        tree = cls(device, bounds, [node.parent for node in forest.nodes], [])
        for parent, (begin, end) in zip(tree.parents, pairwise(bounds), strict=True):
            before = tree.paths[parent] if parent >= 0 else np.zeros(0, np.int64)
            tree.paths.append(np.concatenate([before, np.arange(begin, end)]))
        return tree

    def padded(self, missing: int) -> "PrefixTree":
        """Return these trees, followed by a tree of `missing` tokens of padding."""
        end = self.bounds[-1]
        paths = [*self.paths, np.arange(end, end + missing)]
        return PrefixTree(self.device, [*self.bounds, end + missing], [*self.parents, -1], paths)

    def put(self, values: np.ndarray | list[int], dtype: torch.dtype = torch.int64) -> Tensor:
        """Return numbers as a tensor on the device."""
        return torch.as_tensor(values, dtype=dtype).to(self.device)

    @cached_property
    def keys(self) -> Tensor | None:
        """Positions of the keys, int64, node after node; None: no tokens are shared."""
        return self.put(np.concatenate(self.paths)) if max(self.parents) >= 0 else None

    @cached_property
    def flash_bounds(self) -> tuple[Tensor, Tensor, int, int]:
        """Bounds of each node's queries and keys, int32, and the largest numbers of both."""
        queries, keys = np.diff(self.bounds), [len(path) for path in self.paths]
        starts = self.put(self.bounds, torch.int32), self.put([0, *accumulate(keys)], torch.int32)
        return *starts, int(queries.max()), max(keys)

    @cached_property
    def chains(self) -> list[int]:
        """For each node, the index of the first node of its chain."""
        found = list[int]()
        for node, parent in enumerate(self.parents):
            found.append(found[parent] if 0 <= parent == node - 1 else node)
        return found

    @cached_property
    def calls(self) -> list[Call]:
        """The calls of the kernel, those in which chains attend to themselves first."""
        found, short = list[Call](), list[Piece]()
        starts = [self.bounds[node] for node, chain in enumerate(self.chains) if chain == node]
        bounds = pairwise([*starts, self.bounds[-1]])
        pieces = [Piece(0, 0, end - begin, begin, begin) for begin, end in bounds]
        for (keys, _, length), run in groupby([*pieces, *self._shared()], lambda each: each[:3]):
            for part in [[*run]] if not keys else [[each] for each in run]:
                begin, end = part[0].query, part[-1].query + length
                if end - begin >= LEAST_TOKENS:
                    at = slice(part[0].key, part[0].key + keys) if keys else None
                    found.append(Call(len(part), slice(begin, end), slice(begin, end), at))
                else:
                    short += part
        short.sort(key=lambda each: (*each[:2], -each.length))
        while short:
            width, tokens, rows = short[0].length, 0, 0
            for piece in short:
                more = tokens + piece.length
                is_other = piece[:2] != short[0][:2]
                if is_other or (width * (rows + 1) - more) * MOST_PADDING > width * (rows + 1):
                    break
                tokens, rows = more, rows + 1
            found.append(_padded(np.array(short[:rows])))
            short = short[rows:]
        return sorted(found, key=lambda call: call.keys is not None)

    def _shared(self) -> list[Piece]:
        """Return the other descendants of each node, with their chain up to that node as keys."""
        stops, branch = self.bounds[1:], dict[int, int]()
        for node in range(len(self.parents) - 1, -1, -1):
            if (parent := self.parents[node]) >= 0:
                stops[parent] = max(stops[parent], stops[node])
                if parent != node - 1:
                    branch[parent] = self.bounds[node]
        found, depths = list[Piece](), [0] * len(self.parents)
        for node, chain in enumerate(self.chains):
            above = self.parents[chain]
            depths[node] = depths[above] + 1 if above >= 0 else 0
            if (begin := branch.get(node)) is not None:
                key, end = self.bounds[chain], self.bounds[node + 1]
                found.append(Piece(end - key, depths[node], stops[node] - begin, key, begin))
        return found


def _padded(pieces: np.ndarray) -> Call:
    """Return one call for pieces [B, 5] with equally many keys; the first piece is the longest."""
    num_keys, _, lengths, key, query = pieces.T[..., None]
    column = np.arange(lengths[0, 0])
    places = torch.from_numpy((query + np.minimum(column, lengths - 1)).reshape(-1))
    mask = torch.from_numpy(column < lengths)[:, None, :, None]
    keys = torch.from_numpy((key + np.arange(num_keys[0, 0])).reshape(-1))
    kept = places[mask.flatten()]
    return Call(len(pieces), places, kept, keys if len(keys) else None, mask)


class TreeAttention(torch.autograd.Function):
    """Causal attention within prefix trees: query, key and value [N, heads, D] to [N, heads, D]."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        """Attend; the inputs are query, key, value, the PrefixTree and the scale."""
        query, key, value, tree, scale = inputs
        wide = torch.promote_types(query.dtype, torch.float32)
        out, lse = torch.empty_like(query), query.new_empty(query.shape[:2], dtype=wide)
        for call in tree.calls:
            taken = call.take(query), call.take(key, keys=True), call.take(value, keys=True)
            attended, sums = _forward(*taken, 0.0, call.keys is None, scale=scale)
            if call.keys is not None:
                before, own = call.take(lse), sums
                sums = torch.logaddexp(before, own)
                attended = attended * (own - sums).exp_()[..., None].to(out.dtype)
                part = (before - sums).exp_()[..., None].to(out.dtype)
                attended.addcmul_(call.take(out), part)
            call.put(out, attended)
            call.put(lse, sums)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.options = tree, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of query, key and value.

        The gradients of a partial result need only the merged output and the merged log-sum-exp.
        """
        saved, (tree, scale) = ctx.saved_tensors, ctx.options
        query, key, value, out, lse = saved
        found = [torch.zeros_like(each) for each in saved[:3]]
        for call in tree.calls:
            given = call.take(grads[0])
            if call.mask is not None:
                given = given * call.mask
            taken = call.take(query), call.take(key, keys=True), call.take(value, keys=True)
            joined = call.take(out), call.take(lse)
            parts = _backward(given, *taken, *joined, 0.0, call.keys is None, scale=scale)
            for number, (into, part) in enumerate(zip(found, parts, strict=True)):
                call.add(into, part, keys=number > 0)
        return *found, None, None
