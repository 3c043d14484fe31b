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
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from arealite.ext.prefix_trees.packed_rows import PrefixTree

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


@dataclass(kw_only=True)
class KernelCall:
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
        mask = self.attn_mask
        if mask is not None:
            mask = mask.to(dtype)
        return {
            "dropout_p": 0.0,
            "is_causal": mask is None and not self.is_branch,
            "attn_mask": mask,
            "scale": scale,
        }

    def to_rows(self, values: Tensor, positions: Positions) -> Tensor:
        """Return [B, heads, W, …] of values [N, heads, …]."""
        values_of_rows = values[positions].unflatten(0, (self.rows, -1))
        return values_of_rows.transpose(1, 2)

    def from_rows(self, values: Tensor) -> Tensor:
        """Return [tokens, heads, …] of values [B, heads, W, …], without the padding."""
        flat = values.transpose(1, 2).flatten(0, 1)
        return self.drop_padding(flat)

    def drop_padding(self, values: Any) -> Any:
        """Return values [B · W, …] without those of the padding."""
        if self.is_token is None:
            return values
        return values[self.is_token.flatten()]


class KernelCalls:
    """The calls of the kernel for the prefix trees of a micro-batch."""

    def __init__(self, tree: "PrefixTree") -> None:
        self.bounds = tree.bounds
        self.parents = tree.parents

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
    ) -> Tensor:
        """Attend causally within the trees, from [N, heads, D] to [N, heads, D], with gradients.

        Keys and values may have fewer heads than queries. Scores are multiplied by `scale`.
        """
        return TreeAttention.apply(query, key, value, self, scale)

    @cached_property
    def chains(self) -> list[int]:
        """For each node, the index of the first node of its chain."""
        first_nodes = list[int]()
        is_small_tree = False
        for node, parent in enumerate(self.parents):
            is_root = parent < 0
            if is_root:
                num_tokens = self.stops[node] - self.bounds[node]
                is_small_tree = num_tokens <= SMALL_TREE
            if not is_root and (is_small_tree or parent == node - 1):
                first_nodes.append(first_nodes[-1])
            else:
                first_nodes.append(node)
        return first_nodes

    @cached_property
    def stops(self) -> list[int]:
        """For each node, the position after its last descendant."""
        stops = self.bounds[1:]
        for node in reversed(range(len(self.parents))):
            parent = self.parents[node]
            if parent >= 0:
                stops[parent] = max(stops[parent], stops[node])
        return stops

    @cached_property
    def calls(self) -> list[KernelCall]:
        """The calls of the kernel: first those of chains, each chain in one, then the branches."""
        chain_groups = _groups_of_chains(self._chain_spans())
        chain_calls = [self._chain_call(group) for group in chain_groups]
        return chain_calls + self._branch_calls()

    def _chain_spans(self) -> list["_Span"]:
        """Return the tokens of each chain, in their order."""
        bounds = [
            self.bounds[node]
            for node, first_of_chain in enumerate(self.chains)
            if node == first_of_chain
        ]
        bounds.append(self.bounds[-1])
        return [_Span(end - begin, begin) for begin, end in pairwise(bounds)]

    def _branch_calls(self) -> list[KernelCall]:
        """Return the call of each node with children outside its chain."""
        chains = self.chains
        bounds = self.bounds
        branch_calls = dict[int, KernelCall]()
        for node, parent in enumerate(self.parents):
            is_outside_chain = parent >= 0 and chains[parent] != chains[node]
            if not is_outside_chain or parent in branch_calls:
                continue
            first_of_chain = chains[parent]
            branch_calls[parent] = KernelCall(
                rows=1,
                queries=slice(bounds[node], self.stops[parent]),
                keys=slice(bounds[first_of_chain], bounds[parent + 1]),
                is_branch=True,
            )
        return [*branch_calls.values()]

    def _chain_call(self, spans: list["_Span"]) -> KernelCall:
        """Return the call of chains, the longest first."""
        length_B = np.array([span.num_tokens for span in spans])
        begin_B = np.array([span.begin for span in spans])
        length_B1 = length_B[:, None]
        begin_B1 = begin_B[:, None]
        column_W = np.arange(spans[0].num_tokens)
        position_BW = begin_B1 + np.minimum(column_W, length_B1 - 1)
        positions = _as_slice(position_BW.reshape(-1))
        call = KernelCall(rows=len(spans), queries=positions, keys=positions)
        if length_B1.min() < len(column_W):
            is_token_BW = torch.from_numpy(column_W < length_B1)
            call.is_token = is_token_BW[:, None, :, None]
        if len(column_W) < MIN_UNPADDED:
            call.attn_mask = self._branch_mask(position_BW, begin_B1 + column_W)
        return call

    def _branch_mask(self, query_BW: np.ndarray, key_BW: np.ndarray) -> Tensor | None:
        """Return the mask of small trees, as in KernelCall; None if no chain has branches.

        Args:
            query_BW: Positions of the queries.
            key_BW: Positions of the keys.
        """
        stop_N = np.repeat(self.stops, np.diff(self.bounds))
        stop_BW = stop_N[query_BW]
        last_query_B1 = query_BW[:, -1:]
        if not (stop_BW <= last_query_B1).any():
            return None
        key_B1W = key_BW[:, None]
        query_BW1 = query_BW[:, :, None]
        is_earlier_BWW = key_B1W <= query_BW1
        is_descendant_BWW = query_BW1 < stop_BW[:, None]
        is_seen_BWW = torch.from_numpy(is_earlier_BWW & is_descendant_BWW)
        is_seen_B1WW = is_seen_BWW[:, None]
        mask_B1WW = torch.zeros(is_seen_B1WW.shape)
        return mask_B1WW.masked_fill_(~is_seen_B1WW, -torch.inf)


class _Span(NamedTuple):
    """The tokens of a chain."""

    num_tokens: int
    begin: int
    """Position of the first token."""


def _groups_of_chains(spans: list[_Span]) -> list[list[_Span]]:
    """Divide chains into calls of the kernel; in each call, the longest chain is the first."""
    groups = list[list[_Span]]()
    short_chains = list[_Span]()
    for num_tokens, run_of_spans in groupby(spans, key=lambda span: span.num_tokens):
        run = list(run_of_spans)
        if len(run) * num_tokens >= MIN_UNPADDED:
            groups.append(run)
        else:
            short_chains += run
    short_chains.sort(key=lambda span: -span.num_tokens)
    while short_chains:
        min_tokens = (1 - MAX_PADDING) * short_chains[0].num_tokens
        group = [span for span in short_chains if span.num_tokens >= min_tokens]
        groups.append(group)
        short_chains = short_chains[len(group) :]
    return groups


def _as_slice(positions: np.ndarray) -> Positions:
    """Return positions as a slice if they are consecutive, else as a tensor."""
    begin = int(positions[0])
    end = int(positions[-1]) + 1
    consecutive = np.arange(begin, begin + positions.size)
    if (positions == consecutive).all():
        return slice(begin, end)
    return torch.from_numpy(positions)


class TreeAttention(torch.autograd.Function):
    """Causal attention within prefix trees: query, key and value [N, heads, D] to [N, heads, D]."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        """Attend; the inputs are query, key, value, the KernelCalls and the scale."""
        query, key, value, kernel, scale = inputs
        wide_dtype = torch.promote_types(query.dtype, torch.float32)
        wide_inputs = [query.to(wide_dtype), key.to(wide_dtype), value.to(wide_dtype)]
        out = torch.empty_like(wide_inputs[0])
        lse = query.new_empty(query.shape[:2], dtype=wide_dtype)
        for call in kernel.calls:
            positions = call.queries, call.keys, call.keys
            kernel_inputs = map(call.to_rows, wide_inputs, positions)
            options = call.kernel_options(wide_dtype, scale)
            part_out, part_lse = map(call.from_rows, _forward(*kernel_inputs, **options))
            tokens = call.drop_padding(call.queries)
            if call.is_branch:
                part_out, part_lse = _merged(out[tokens], lse[tokens], part_out, part_lse)
            out[tokens] = part_out
            lse[tokens] = part_lse
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.options = kernel, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of query, key and value.

        The gradients of a partial result need only the merged output and the merged log-sum-exp.
        """
        kernel, scale = ctx.options
        query, key, value, out, lse = ctx.saved_tensors
        wide_dtype = lse.dtype
        wide_inputs = [
            tensor.to(wide_dtype) for tensor in (grads[0].contiguous(), query, key, value, out, lse)
        ]
        wide_grads = [torch.empty_like(tensor) for tensor in wide_inputs[1:4]]
        for call in kernel.calls:
            at_q = call.queries
            at_k = call.keys
            positions = at_q, at_q, at_k, at_k, at_q, at_q
            grad_out, *kernel_inputs = map(call.to_rows, wide_inputs, positions)
            if call.is_token is not None:
                grad_out = grad_out * call.is_token
            options = call.kernel_options(wide_dtype, scale)
            part_grads = _backward(grad_out, *kernel_inputs, **options)
            grad_positions = at_q, at_k, at_k
            for grad, part, at in zip(wide_grads, part_grads, grad_positions, strict=True):
                tokens = call.drop_padding(at)
                part = call.from_rows(part)
                if call.is_branch:
                    part = grad[tokens].add_(part)
                grad[tokens] = part
        dtype = grads[0].dtype
        grad_query, grad_key, grad_value = (grad.to(dtype) for grad in wide_grads)
        return grad_query, grad_key, grad_value, None, None


def _merged(
    out: Tensor,
    lse: Tensor,
    part_out: Tensor,
    part_lse: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the output [tokens, heads, D] and the log-sum-exp of two partial results."""
    total_lse = torch.logaddexp(lse, part_lse)
    weight = (lse - total_lse).exp_()[..., None]
    part_weight = (part_lse - total_lse).exp_()[..., None]
    merged_out = out * weight
    return merged_out.addcmul_(part_out, part_weight), total_lse
