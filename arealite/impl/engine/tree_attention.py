"""Causal attention over prefix trees on a CPU, without a mask and without copies of shared tokens.

The tokens of a tree are in depth-first order. A *chain* is a run of nodes in which each node is the
parent of the next. Its tokens are consecutive, and attend to each other causally in one call. If a
node has descendants outside its chain, these are consecutive, too. They attend to the chain from
its start to that node, in another call without a mask. The partial results of a query are merged by
their log-sum-exp, as in flash attention.

Shape letters: N = tokens of a micro-batch, D = width of a head, B = chains of a call, W = tokens of
the longest of these chains.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from arealite.algo.prefix_tree import Forest

_forward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
MIN_UNPADDED = 128
"""Neighboring chains of equal length get an unpadded call if they have at least this many tokens in
total. All other chains share padded calls."""
MAX_PADDING = 1 / 8
"""Maximum share of padding in a call."""


@dataclass
class Call:
    """One call of the kernel: B chains of up to W tokens, each of which attends to itself."""

    rows: int
    where: slice | Tensor
    """Positions [B · W] of the tokens among the N tokens: a slice, or int64. Padding repeats the
    last token of a chain."""
    places: slice | Tensor
    """The same positions without the padding."""
    mask: Tensor | None = None
    """bool [B, 1, W, 1]: False for padding; None: there is no padding."""

    def take(self, values: Tensor) -> Tensor:
        """Return [B, heads, W, …] of values [N, heads, …]."""
        return values[self.where].unflatten(0, (self.rows, -1)).transpose(1, 2)

    def put(self, into: Tensor, values: Tensor) -> None:
        """Write values [B, heads, W, …] without the padding into [N, heads, …]."""
        flat = values.transpose(1, 2).flatten(0, 1)
        into[self.places] = flat if self.mask is None else flat[self.mask.flatten()]


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
        """The calls of the kernel in which chains attend to themselves; each chain is in one."""
        found, short = list[Call](), list[tuple[int, int]]()
        starts = [self.bounds[node] for node, chain in enumerate(self.chains) if chain == node]
        spans = [(end - begin, begin) for begin, end in pairwise([*starts, self.bounds[-1]])]
        for length, run in groupby(spans, key=lambda span: span[0]):
            begins = [begin for _, begin in run]
            if length * len(begins) >= MIN_UNPADDED:
                where = slice(begins[0], begins[0] + length * len(begins))
                found.append(Call(len(begins), where, where))
            else:
                short += [(length, begin) for begin in begins]
        short.sort(reverse=True)
        while short:
            width, tokens, rows = short[0][0], 0, 0
            while rows < len(short):
                more = tokens + short[rows][0]
                if rows and width * (rows + 1) - more > MAX_PADDING * width * (rows + 1):
                    break
                tokens, rows = more, rows + 1
            part, short = np.array(short[:rows]), short[rows:]
            column = np.arange(width)
            places = part[:, 1:] + np.minimum(column, part[:, :1] - 1)
            where = torch.from_numpy(places.reshape(-1))
            mask = torch.from_numpy(column < part[:, :1])[:, None, :, None]
            found.append(Call(rows, where, where[mask.flatten()], mask))
        return found

    @cached_property
    def branches(self) -> list[tuple[slice, slice]]:
        """For each node with descendants in other chains: its chain up to it, and these."""
        stops, branch = self.bounds[1:], dict[int, int]()
        for node in range(len(self.parents) - 1, -1, -1):
            if (parent := self.parents[node]) >= 0:
                stops[parent] = max(stops[parent], stops[node])
                if parent != node - 1:
                    branch[parent] = self.bounds[node]
        chains, bounds = self.chains, self.bounds
        return [
            (slice(bounds[chains[node]], bounds[node + 1]), slice(begin, stops[node]))
            for node, begin in sorted(branch.items())
        ]


class TreeAttention(torch.autograd.Function):
    """Causal attention within prefix trees: query, key and value [N, heads, D] to [N, heads, D]."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        """Attend; the inputs are query, key, value, the PrefixTree and the scale."""
        query, key, value, tree, scale = inputs
        wide = torch.promote_types(query.dtype, torch.float32)
        out, lse = torch.empty_like(query), query.new_empty(query.shape[:2], dtype=wide)
        for call in tree.calls:
            taken = (call.take(each) for each in (query, key, value))
            attended, sums = _forward(*taken, 0.0, True, scale=scale)
            call.put(out, attended)
            call.put(lse, sums)
        for keys, queries in tree.branches:
            taken = (_row(query[queries]), _row(key[keys]), _row(value[keys]))
            attended, sums = (_flat(each) for each in _forward(*taken, 0.0, False, scale=scale)[:2])
            before, total = lse[queries], torch.logaddexp(lse[queries], sums)
            part = out[queries] * (before - total).exp_()[..., None].to(out.dtype)
            out[queries] = part.addcmul_(attended, (sums - total).exp_()[..., None].to(out.dtype))
            lse[queries] = total
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.options = tree, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of query, key and value.

        The gradients of a partial result need only the merged output and the merged log-sum-exp.
        """
        saved, (tree, scale) = ctx.saved_tensors, ctx.options
        found = [torch.empty_like(each) for each in saved[:3]]
        grad = grads[0].contiguous()
        for call in tree.calls:
            given, *taken = (call.take(each) for each in (grad, *saved))
            if call.mask is not None:
                given = given * call.mask
            parts = _backward(given, *taken, 0.0, True, scale=scale)
            for into, part in zip(found, parts, strict=True):
                call.put(into, part)
        for keys, queries in tree.branches:
            places = queries, queries, keys, keys, queries, queries
            taken = [_row(each[at]) for each, at in zip((grad, *saved), places, strict=True)]
            parts = _backward(*taken, 0.0, False, scale=scale)
            for into, part, at in zip(found, parts, places[1:4], strict=True):
                into[at] += _flat(part)
        return *found, None, None


def _row(values: Tensor) -> Tensor:
    """Return [1, heads, N, …] of [N, heads, …]."""
    return values.transpose(0, 1)[None]


def _flat(values: Tensor) -> Tensor:
    """Return [N, heads, …] of [1, heads, N, …]."""
    return values[0].transpose(0, 1)
