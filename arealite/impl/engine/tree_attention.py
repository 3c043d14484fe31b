"""Causal attention over prefix trees on a CPU, without copies of shared tokens.

The tokens of a tree are in depth-first order. A *chain* is a run of nodes in which each node is the
parent of the next. Its tokens are consecutive, and attend to each other causally in one call. If a
node has descendants outside its chain, these are consecutive, too. They attend to the chain from
its start to that node, in another call. The partial results of a query are merged by their
log-sum-exp, as in flash attention. A small tree has many branches of few tokens; it is treated as
one chain in which a mask hides the tokens of other branches.

Shape letters: N = tokens of a micro-batch, D = width of a head, B = chains of a call, W = tokens of
the longest of these chains.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, compress, groupby, pairwise
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
MAX_PADDING = 1 / 4
"""Maximum share of padding in a row of a call."""
SMALL_TREE = 96
"""Trees of up to this many tokens are computed as one chain with a mask. Measured with 32 groups of
8 answers (0.8 million parameters): updates with answers of up to 8 tokens take 20 % less time."""
Places = slice | Tensor


@dataclass
class Call:
    """One call of the kernel: B chains of up to W tokens that attend to themselves, or a branch."""

    rows: int
    queries: Places
    """Positions [B · W] of the queries among the N tokens: a slice, or int64. Padding repeats the
    last token of a chain."""
    keys: Places
    """Positions of the keys: those of the queries, or of the tokens above a branch."""
    is_branch: bool = False
    mask: Tensor | None = None
    """bool [B, 1, W, 1]: False for padding; None: there is no padding."""
    hidden: Tensor | None = None
    """float32 [B, 1, W, W]: -inf where a query does not see a key, else 0; None: chains are causal,
    and all queries of a branch see all keys."""

    def options(self, dtype: torch.dtype, scale: float) -> dict[str, Any]:
        """Return options of the kernel; `dtype` is that of the log-sum-exp.

        The mask gets this dtype: torch 2.13 misreads a float32 mask if the queries are float64.
        """
        hidden = None if self.hidden is None else self.hidden.to(dtype)
        is_causal = hidden is None and not self.is_branch
        return {"dropout_p": 0.0, "is_causal": is_causal, "attn_mask": hidden, "scale": scale}

    def take(self, values: Tensor, places: Places) -> Tensor:
        """Return [B, heads, W, …] of values [N, heads, …]."""
        return values[places].unflatten(0, (self.rows, -1)).transpose(1, 2)

    def flat(self, values: Tensor) -> Tensor:
        """Return [tokens, heads, …] of values [B, heads, W, …], without the padding."""
        return self.unpad(values.transpose(1, 2).flatten(0, 1))

    def unpad(self, values: Any) -> Any:
        """Return values [B · W, …] without those of the padding."""
        return values if self.mask is None else values[self.mask.flatten()]


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
        found, is_small = list[int](), False
        for node, parent in enumerate(self.parents):
            if parent < 0:
                is_small = self.stops[node] - self.bounds[node] <= SMALL_TREE
            joins = parent >= 0 and (is_small or parent == node - 1)
            found.append(found[-1] if joins else node)
        return found

    @cached_property
    def stops(self) -> list[int]:
        """For each node, the position after its last descendant."""
        stops = self.bounds[1:]
        for node in range(len(self.parents) - 1, -1, -1):
            if (parent := self.parents[node]) >= 0:
                stops[parent] = max(stops[parent], stops[node])
        return stops

    @cached_property
    def calls(self) -> list[Call]:
        """The calls of the kernel: first those of chains, each chain in one, then the branches.

        A branch is a call for a node with descendants outside its chain: these attend to the chain
        up to the node.
        """
        chains, bounds, done = self.chains, self.bounds, set[int]()
        begins = [bounds[node] for node, first in enumerate(chains) if first == node]
        spans = [(end - begin, begin) for begin, end in pairwise([*begins, bounds[-1]])]
        runs = [list(run) for _, run in groupby(spans, key=lambda span: span[0])]
        is_long = [len(run) * run[0][0] >= MIN_UNPADDED for run in runs]
        found = [self._call(run) for run in compress(runs, is_long)]
        short = sorted(chain(*compress(runs, [not each for each in is_long])), reverse=True)
        while short:
            part = [span for span in short if span[0] >= (1 - MAX_PADDING) * short[0][0]]
            found.append(self._call(part))
            short = short[len(part) :]
        for node, parent in enumerate(self.parents):
            if parent >= 0 and chains[parent] != chains[node] and parent not in done:
                done.add(parent)
                keys = slice(bounds[chains[parent]], bounds[parent + 1])
                queries = slice(bounds[node], self.stops[parent])
                found.append(Call(1, queries, keys, is_branch=True))
        return found

    def _call(self, spans: list[tuple[int, int]]) -> Call:
        """Return the call of chains; a span is (number of tokens, first position)."""
        (lengths, begins), column = np.array(spans).T[:, :, None], np.arange(spans[0][0])
        at = begins + np.minimum(column, lengths - 1)
        begin, end, mask, hidden = int(at[0, 0]), int(at[-1, -1]) + 1, None, None
        is_slice = (at.reshape(-1) == np.arange(begin, begin + at.size)).all()
        places = slice(begin, end) if is_slice else torch.from_numpy(at.reshape(-1))
        if lengths.min() < len(column):
            mask = torch.from_numpy(column < lengths)[:, None, :, None]
        stops = np.repeat(self.stops, np.diff(self.bounds))[at]
        if (stops <= at[:, -1:]).any():  # the chain is a small tree
            keys, queries = (begins + column)[:, None], at[:, :, None]
            seen = torch.from_numpy((keys <= queries) & (queries < stops[:, None]))[:, None]
            hidden = torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf)
        return Call(len(spans), places, places, mask=mask, hidden=hidden)


class TreeAttention(torch.autograd.Function):
    """Causal attention within prefix trees: query, key and value [N, heads, D] to [N, heads, D]."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        """Attend; the inputs are query, key, value, the PrefixTree and the scale."""
        query, key, value, tree, scale = inputs
        wide = torch.promote_types(query.dtype, torch.float32)
        out, lse = torch.empty_like(query), query.new_empty(query.shape[:2], dtype=wide)
        for call in tree.calls:
            taken = map(call.take, inputs, (call.queries, call.keys, call.keys))
            attended, sums = map(call.flat, _forward(*taken, **call.options(wide, scale)))
            at = call.unpad(call.queries)
            if call.is_branch:
                before, total = lse[at], torch.logaddexp(lse[at], sums)
                part = out[at] * (before - total).exp_()[..., None].to(out.dtype)
                share = (sums - total).exp_()[..., None].to(out.dtype)
                attended, sums = part.addcmul_(attended, share), total
            out[at], lse[at] = attended, sums
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
            q, k = call.queries, call.keys
            given, *taken = map(call.take, (grad, *saved), (q, q, k, k, q, q))
            given = given if call.mask is None else given * call.mask
            parts = _backward(given, *taken, **call.options(saved[-1].dtype, scale))
            for into, part, places in zip(found, parts, (q, k, k), strict=True):
                at, part = call.unpad(places), call.flat(part)
                into[at] = into[at] + part if call.is_branch else part
        return *found, None, None
