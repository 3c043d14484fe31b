"""Causal attention over prefix trees on a CPU, without copies of shared tokens.

The tokens of a tree are in depth-first order. A *chain* is a run of nodes in which each node is the
parent of the next. Its tokens are consecutive, and attend to each other causally in one call of the
kernel. The descendants of a node outside its chain are consecutive, too. In another call, a
*branch*, they attend to the tokens of the chain up to that node. The partial results of a query are
merged by their log-sum-exp, as in flash attention.

A tree of up to SMALL_TREE tokens is a single chain. An attention mask hides tokens of other
branches, which costs less than a call for each branch.

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
"""Adjacent chains of equal length form a call of their own if they have at least this many tokens.
All other chains are padded to the longest one in their call."""
MAX_PADDING = 1 / 4
"""Largest fraction of a row that is padding."""
SMALL_TREE = 96
"""Trees of up to this many tokens are chains with a mask; less than MIN_UNPADDED. Measured with 32
groups of 8 answers of up to 8 tokens (0.8 million parameters): an update takes 20 % less time than
with a call for each branch. In larger trees the mask costs about as much as these calls."""
Positions = slice | Tensor
"""Positions among the N tokens: a slice, or int64."""


@dataclass
class Call:
    """One call of the kernel: causal attention within each of B chains, or a branch (B = 1)."""

    rows: int
    queries: Positions
    """Positions [B · W] of the queries. Padding repeats the last token of a chain."""
    keys: Positions
    """Positions of the keys: those of the queries, or the chain up to the parent of a branch."""
    is_branch: bool = False
    is_token: Tensor | None = None
    """bool [B, 1, W, 1]: False for padding; None: there is no padding."""
    attn_mask: Tensor | None = None
    """float32 [B, 1, W, W]: -inf where a query does not see a key, else 0; None: no small trees."""

    def kernel_options(self, dtype: torch.dtype, scale: float) -> dict[str, Any]:
        """Return options of the kernel; `dtype` is that of the log-sum-exp.

        The mask gets this dtype: torch 2.13 misreads a float32 mask if the queries are float64.
        """
        mask = None if self.attn_mask is None else self.attn_mask.to(dtype)
        is_causal = mask is None and not self.is_branch
        return {"dropout_p": 0.0, "is_causal": is_causal, "attn_mask": mask, "scale": scale}

    def to_rows(self, values: Tensor, positions: Positions) -> Tensor:
        """Return [B, heads, W, …] of values [N, heads, …]."""
        return values[positions].unflatten(0, (self.rows, -1)).transpose(1, 2)

    def from_rows(self, values: Tensor) -> Tensor:
        """Return [tokens, heads, …] of values [B, heads, W, …], without the padding."""
        return self.drop_padding(values.transpose(1, 2).flatten(0, 1))

    def drop_padding(self, values: Any) -> Any:
        """Return values [B · W, …] without those of the padding."""
        return values if self.is_token is None else values[self.is_token.flatten()]


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
        """Return these trees, followed by a tree of `missing` > 0 tokens of padding."""
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
        queries = np.diff(self.bounds)
        keys = [len(path) for path in self.paths]
        starts = self.put(self.bounds, torch.int32), self.put([0, *accumulate(keys)], torch.int32)
        return *starts, int(queries.max()), max(keys)

    @cached_property
    def chains(self) -> list[int]:
        """For each node, the index of the first node of its chain."""
        found = list[int]()
        is_small = False
        for node, parent in enumerate(self.parents):
            if parent < 0:
                is_small = self.stops[node] - self.bounds[node] <= SMALL_TREE
            continues = parent >= 0 and (is_small or parent == node - 1)
            found.append(found[-1] if continues else node)
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
        """The calls of the kernel: first those of chains, each chain in one, then the branches."""
        chains = self.chains
        bounds = self.bounds
        branched = set[int]()
        begins = [bounds[node] for node, first in enumerate(chains) if first == node]
        spans = [(end - begin, begin) for begin, end in pairwise([*begins, bounds[-1]])]
        runs = [list(run) for _, run in groupby(spans, key=lambda span: span[0])]
        is_short = [len(run) * run[0][0] < MIN_UNPADDED for run in runs]
        found = [self._call(run) for run, few in zip(runs, is_short, strict=True) if not few]
        short = sorted(chain(*compress(runs, is_short)), key=lambda span: -span[0])
        while short:
            part = [span for span in short if span[0] >= (1 - MAX_PADDING) * short[0][0]]
            found.append(self._call(part))
            short = short[len(part) :]
        for node, parent in enumerate(self.parents):
            if parent >= 0 and chains[parent] != chains[node] and parent not in branched:
                branched.add(parent)
                keys = slice(bounds[chains[parent]], bounds[parent + 1])
                queries = slice(bounds[node], self.stops[parent])
                found.append(Call(1, queries, keys, is_branch=True))
        return found

    def _call(self, spans: list[tuple[int, int]]) -> Call:
        """Return the call of chains; a span is (tokens, first position), the longest first."""
        (lengths, begins), column = np.array(spans).T[:, :, None], np.arange(spans[0][0])
        at = begins + np.minimum(column, lengths - 1)
        begin = int(at[0, 0])
        end = int(at[-1, -1]) + 1
        is_slice = (at.reshape(-1) == np.arange(begin, begin + at.size)).all()
        positions = slice(begin, end) if is_slice else torch.from_numpy(at.reshape(-1))
        call = Call(len(spans), positions, positions)
        if lengths.min() < len(column):
            call.is_token = torch.from_numpy(column < lengths)[:, None, :, None]
        if len(column) < MIN_UNPADDED:
            stops = np.repeat(self.stops, np.diff(self.bounds))[at]
            if (stops <= at[:, -1:]).any():  # a chain is a small tree with branches
                keys = (begins + column)[:, None]
                queries = at[:, :, None]
                seen = torch.from_numpy((keys <= queries) & (queries < stops[:, None]))[:, None]
                call.attn_mask = torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf)
        return call


class TreeAttention(torch.autograd.Function):
    """Causal attention within prefix trees: query, key and value [N, heads, D] to [N, heads, D]."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        """Attend; the inputs are query, key, value, the PrefixTree and the scale."""
        query, key, value, tree, scale = inputs
        wide = torch.promote_types(query.dtype, torch.float32)
        wide_inputs = [tensor.to(wide) for tensor in inputs[:3]]
        out = torch.empty_like(wide_inputs[0])
        lse = query.new_empty(query.shape[:2], dtype=wide)
        for call in tree.calls:
            taken = map(call.to_rows, wide_inputs, (call.queries, call.keys, call.keys))
            part, sums = map(call.from_rows, _forward(*taken, **call.kernel_options(wide, scale)))
            at = call.drop_padding(call.queries)
            if call.is_branch:
                before = lse[at]
                total = torch.logaddexp(lse[at], sums)
                merged = out[at] * (before - total).exp_()[..., None]
                weight = (sums - total).exp_()[..., None]
                part = merged.addcmul_(part, weight)
                sums = total
            out[at] = part
            lse[at] = sums
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.options = tree, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of query, key and value.

        The gradients of a partial result need only the merged output and the merged log-sum-exp.
        """
        (tree, scale), saved = ctx.options, ctx.saved_tensors
        wide = saved[-1].dtype
        values = [tensor.to(wide) for tensor in (grads[0].contiguous(), *saved)]
        sums = [torch.empty_like(each) for each in values[1:4]]
        for call in tree.calls:
            at_q = call.queries
            at_k = call.keys
            grad_out, *taken = map(call.to_rows, values, (at_q, at_q, at_k, at_k, at_q, at_q))
            grad_out = grad_out if call.is_token is None else grad_out * call.is_token
            parts = _backward(grad_out, *taken, **call.kernel_options(wide, scale))
            for into, part, where in zip(sums, parts, (at_q, at_k, at_k), strict=True):
                at = call.drop_padding(where)
                part = call.from_rows(part)
                into[at] = into[at].add_(part) if call.is_branch else part
        return *(each.to(grads[0].dtype) for each in sums), None, None
