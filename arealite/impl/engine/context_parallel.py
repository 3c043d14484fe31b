"""Context parallelism: the ranks of a group share the tokens of each row (Ulysses).

Each of the N ranks of a group has W / N neighbouring tokens of every row of a micro-batch. Before
attention, an all-to-all gives each rank all tokens for 1 / N of the heads. After attention, another
all-to-all gives each rank its own tokens with all heads. All other layers compute each token alone.
The trainer gives each rank its own rows, and the group computes the rows of all its ranks.
"""

import inspect
import math
import re
import sys
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask, sdpa_mask

from arealite.api.engine import Sequence
from arealite.base.errors import UserError
from arealite.base.model_folder import check_context_parallel
from arealite.impl.engine import attention
from arealite.impl.engine.batch import MicroBatch
from arealite.impl.engine.head import decoder_of

MIXERS = re.compile("Indexer|Compressor|Mamba|Delta|Conv1d|ShortConv|LinearAttention|Recurrent")
"""Matches the names of modules in which tokens depend on each other outside attention."""


class ContextGroup:
    """The `size` neighbouring ranks that share their rows' tokens; size 1 changes nothing."""

    def __init__(self, size: int, model: PreTrainedModel, device: torch.device) -> None:
        """Put exchanges of heads and tokens around the current attention function of `model`.

        Raises:
            UserError: `size` does not divide the ranks or the heads, or tokens of the model depend
                on each other outside attention.
        """
        self.size = size
        self.rank = dist.get_rank() % size
        ranks = dist.get_world_size()
        if size == 1:
            return
        config = model.config.get_text_config()
        check_context_parallel(config.to_dict(), size=size, ranks=ranks)
        masks: dict[str, Any] = {"sdpa": sdpa_mask, "eager": eager_mask}
        kind: str = config._attn_implementation or ""
        kinds = dict.fromkeys(type(part) for part in decoder_of(model).modules())
        mixing = [each for each in kinds if MIXERS.search(each.__name__) or _counts_tokens(each)]
        is_known = model.is_backend_compatible() and kind in {*masks, attention.NAME}
        if mixing or not is_known or getattr(model, "_is_stateful", False):
            what = f": {mixing[0].__name__} needs all of them" if mixing else ""
            fix = "Use engine.fsdp.context_parallel=1."
            raise UserError(f"{type(model).__name__} cannot share a row's tokens{what}. {fix}")
        names = "groups", "context"
        mesh = init_device_mesh(device.type, (ranks // size, size), mesh_dim_names=names)
        self.group = mesh.get_group("context")
        name = f"arealite_context_{kind}_{self.size}"
        AttentionInterface.register(name, partial(_attend, kind, self.group))
        if kind in masks:
            AttentionMaskInterface.register(name, partial(_mask, masks[kind], self.size))
        model.set_attn_implementation(name)

    def gather_rows(self, rows: list[Sequence]) -> tuple[list[Sequence], slice]:
        """Return the rows of all ranks of the group, and which of them are `rows`."""
        if self.size == 1:
            return rows, slice(None)
        parts: list[list[Sequence]] = [[]] * self.size
        dist.all_gather_object(parts, rows, group=self.group)
        begin = sum(map(len, parts[: self.rank]))
        parts[self.rank] = rows
        return [*chain(*parts)], slice(begin, begin + len(rows))

    def split(self, batch: MicroBatch) -> MicroBatch:
        """Return this rank's share of the tokens and loss tokens of the group's micro-batch."""
        if self.size == 1:
            return batch
        width = batch.input_ids_BW.shape[1]
        part = -(-width // self.size)
        begin = self.rank * part
        missing = part * self.size - width
        mine = slice(begin, begin + part)
        positions: Any = batch.attention.get("position_ids")
        if positions is None:  # they continue in the padding: a restart would mean packed rows
            positions = torch.arange(part * self.size, device=batch.input_ids_BW.device)[None]
        else:
            positions = pad(positions, (0, missing))
        changed: dict[str, object] = {"position_ids": positions[:, mine]}
        tree: Any = batch.attention.get("prefix_tree")
        if tree is not None and missing:
            changed["prefix_tree"] = tree.padded(missing)
        if (routing := batch.routing_BWR) is not None:
            routing = pad(routing, (0, 0, 0, missing), value=255)[:, mine]
        column_N = batch.index_N % width
        own_N = (column_N // part == self.rank).nonzero()[:, 0]
        index_N = batch.index_N // width * part + column_N - begin
        return replace(
            batch,
            input_ids_BW=pad(batch.input_ids_BW, (0, missing))[:, mine],
            attention=batch.attention | changed,
            index_N=index_N[own_N],
            targets_N=batch.targets_N[own_N],
            temperature_N=batch.temperature_N[own_N],
            own_N=own_N,
            routing_BWR=routing,
        )

    def gather(self, outputs: dict[str, Tensor], batch: MicroBatch) -> dict[str, Tensor]:
        """Return the outputs of all loss tokens of the group; those of this rank have gradients.

        Every rank computes the same loss from them. The gradients of all ranks therefore sum to
        the gradient of that loss.
        """
        if batch.own_N is None:
            return outputs
        found = dict[str, Tensor]()
        for name, values in outputs.items():
            whole = values.new_zeros(len(batch.rows_N)).index_copy_(0, batch.own_N, values.detach())
            dist.all_reduce(whole, group=self.group)
            found[name] = whole.index_copy(0, batch.own_N, values)
        return found


def _counts_tokens(kind: type[nn.Module]) -> bool:
    """Return whether an attention module computes positions itself, as Llama-4's does."""
    return "Attention" in kind.__name__ and "arange" in inspect.getsource(kind.forward)


def exchange(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return [B, a / N, b · N, D] of [B, a, b, D] on each of N ranks: dimension 1 is divided among
    the ranks, and their parts of dimension 2 are joined. The all-to-all has a gradient."""
    parts = torch.stack(tensor.chunk(group.size(), 1))
    return torch.cat(all_to_all_single_autograd(parts, None, None, group).unbind(), 2)


def _attend(
    kind: str,
    group: dist.ProcessGroup,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend from [B, heads, W / N, D] to [B, W / N, heads, D] over all tokens of the group."""
    size, rank, (heads, kv_heads) = group.size(), group.rank(), (query.shape[1], key.shape[1])
    if heads % size:
        what = f"{type(module).__name__} has {heads} heads, which {size} ranks cannot share"
        raise UserError(f"{what}: use an engine.fsdp.context_parallel that divides {heads}.")
    # Each rank needs the key heads of its queries: few of them are copied.
    if repeats := math.lcm(kv_heads, size) // kv_heads - 1:
        key, value = (each.repeat_interleave(repeats + 1, 1) for each in (key, value))
    local = copy(module)  # attention functions read these sizes from the module
    local.__dict__["num_key_value_groups"] = heads // key.shape[1]
    if options.get("s_aux") is not None:
        options["s_aux"] = local.__dict__["sinks"] = options["s_aux"].chunk(size)[rank]
    eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    inner = AttentionInterface().get_interface(kind, eager)
    query, key, value = (exchange(each, group) for each in (query, key, value))
    attended, _ = inner(local, query, key, value, attention_mask, **options)
    return exchange(attended, group), None


def _mask(inner: Any, size: int, *, q_length: int, kv_length: int, **options: Any) -> Any:
    """Return the mask of all tokens of the group."""
    return inner(q_length=q_length * size, kv_length=kv_length * size, **options)
