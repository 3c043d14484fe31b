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
from arealite.api.engine_extension import EngineExtension, MicroBatch
from arealite.base.errors import UserError
from arealite.ext.models.parallel_options import check_context_parallel
from arealite.ext.prefix_trees import attention
from arealite.impl.engine.micro_batches import NO_RECORD
from arealite.impl.engine.model import decoder_of

MIXERS = re.compile("Indexer|Compressor|Mamba|Delta|Conv1d|ShortConv|LinearAttention|Recurrent")
"""Matches the names of modules in which tokens depend on each other outside attention."""
MASKS: dict[str, Any] = {"sdpa": sdpa_mask, "eager": eager_mask}
"""Functions that make the masks of transformers' own attention functions, by their names."""


class ContextGroup(EngineExtension):
    """The `size` neighbouring ranks that share their rows' tokens."""

    def __init__(
        self,
        size: int,
        model: PreTrainedModel,
        device: torch.device,
    ) -> None:
        self.size = size
        self.rank = dist.get_rank() % size
        self.num_sharing = size
        self.is_counted = self.rank == 0
        self._model = model
        self._device = device

    def change_layers(self) -> None:
        """Put exchanges of heads and tokens around the current attention function of the model.

        Raises:
            UserError: `size` does not divide the ranks or the heads, or tokens of the model depend
                on each other outside attention.
        """
        size = self.size
        model = self._model
        ranks = dist.get_world_size()
        config = model.config.get_text_config()
        check_context_parallel(config.to_dict(), size=size, ranks=ranks)
        inner_name: str = config._attn_implementation or ""
        _check_shareable(model, inner_name)
        mesh = init_device_mesh(
            self._device.type,
            mesh_shape=(ranks // size, size),
            mesh_dim_names=("groups", "context"),
        )
        self.group = mesh.get_group("context")
        name = f"arealite_context_{inner_name}_{size}"
        attend = partial(_attend, inner_name, self.group)
        AttentionInterface.register(name, attend)
        if inner_name in MASKS:
            mask = partial(_mask, MASKS[inner_name], size)
            AttentionMaskInterface.register(name, mask)
        model.set_attn_implementation(name)

    def gather_rows(self, rows: list[Sequence]) -> tuple[list[Sequence], int]:
        """Return the rows of all ranks of the group, and the index of the first of `rows`."""
        rows_of_ranks: list[list[Sequence]] = [[]] * self.size
        dist.all_gather_object(rows_of_ranks, rows, group=self.group)
        rows_of_ranks[self.rank] = rows
        begin = sum(map(len, rows_of_ranks[: self.rank]))
        return [*chain(*rows_of_ranks)], begin

    def changed_batch(self, batch: MicroBatch) -> MicroBatch:
        """Return this rank's share of the tokens and loss tokens of the group's micro-batch."""
        width = batch.input_ids_BW.shape[1]
        local_width = -(-width // self.size)
        num_padding = local_width * self.size - width
        begin = self.rank * local_width
        local = slice(begin, begin + local_width)
        input_ids_BW = pad(batch.input_ids_BW, (0, num_padding))
        routing_BWR = batch.routing_BWR
        if routing_BWR is not None:
            routing_BWR = pad(routing_BWR, (0, 0, 0, num_padding), value=NO_RECORD)
            routing_BWR = routing_BWR[:, local]
        row_N = batch.index_N // width
        column_N = batch.index_N % width
        is_own_N = column_N // local_width == self.rank
        own_N = is_own_N.nonzero()[:, 0]
        top_ids_NK = batch.top_ids_NK
        is_truncated_N = batch.is_truncated_N
        local_index_N = row_N * local_width + column_N - begin
        return replace(
            batch,
            input_ids_BW=input_ids_BW[:, local],
            attention=_split_attention(batch, num_padding, local),
            index_N=local_index_N[own_N],
            targets_N=batch.targets_N[own_N],
            temperature_N=batch.temperature_N[own_N],
            top_ids_NK=None if top_ids_NK is None else top_ids_NK[own_N],
            is_truncated_N=None if is_truncated_N is None else is_truncated_N[own_N],
            own_N=own_N,
            routing_BWR=routing_BWR,
        )

    def gather_outputs(self, outputs: dict[str, Tensor], batch: MicroBatch) -> dict[str, Tensor]:
        """Return the outputs of all loss tokens of the group; those of this rank have gradients.

        Every rank computes the same loss from them. The gradients of all ranks therefore sum to
        the gradient of that loss.
        """
        if batch.own_N is None:
            return outputs
        gathered = dict[str, Tensor]()
        for name, values in outputs.items():
            values_N = values.new_zeros((len(batch.rows_N), *values.shape[1:]))
            values_N.index_copy_(0, batch.own_N, values.detach())
            dist.all_reduce(values_N, group=self.group)
            gathered[name] = values_N.index_copy(0, batch.own_N, values)
        return gathered


def _check_shareable(model: PreTrainedModel, attention_name: str) -> None:
    """Raise UserError if tokens of the model depend on each other outside attention."""
    module_types = dict.fromkeys(type(module) for module in decoder_of(model).modules())
    mixers = [module_type for module_type in module_types if _mixes_tokens(module_type)]
    can_wrap = attention_name in MASKS or attention_name == attention.NAME
    is_stateful = getattr(model, "_is_stateful", False)
    if not mixers and can_wrap and model.is_backend_compatible() and not is_stateful:
        return
    reason = f": {mixers[0].__name__} needs all of them" if mixers else ""
    raise UserError(
        f"{type(model).__name__} cannot share a row's tokens{reason}. "
        "Use engine.fsdp.context_parallel=1."
    )


def _mixes_tokens(module_type: type[nn.Module]) -> bool:
    """Return whether a module needs all tokens of a row, outside the attention function.

    Some attention modules compute positions themselves, as Llama-4's does.
    """
    name = module_type.__name__
    if MIXERS.search(name):
        return True
    return "Attention" in name and "arange" in inspect.getsource(module_type.forward)


def _split_attention(
    batch: MicroBatch,
    num_padding: int,
    local: slice,
) -> dict[str, object]:
    """Return the arguments of the decoder for a rank's columns `local` of the padded rows."""
    attention_options = dict(batch.attention)
    position_ids: Any = attention_options.get("position_ids")
    if position_ids is None:  # they continue in the padding: a restart would mean packed rows
        padded_width = batch.input_ids_BW.shape[1] + num_padding
        position_ids = torch.arange(padded_width, device=batch.input_ids_BW.device)[None]
    else:
        position_ids = pad(position_ids, (0, num_padding))
    attention_options["position_ids"] = position_ids[:, local]
    tree: Any = attention_options.get("prefix_tree")
    if tree is not None and num_padding:
        attention_options["prefix_tree"] = tree.padded(num_padding)
    return attention_options


def exchange(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return [B, a / N, b · N, D] of [B, a, b, D] on each of N ranks: dimension 1 is divided among
    the ranks, and their parts of dimension 2 are joined. The all-to-all has a gradient."""
    parts = torch.stack(tensor.chunk(group.size(), 1))
    received = all_to_all_single_autograd(parts, None, None, group)
    return torch.cat(received.unbind(), 2)


def _attend(
    inner_name: str,
    group: dist.ProcessGroup,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend from [B, heads, W / N, D] to [B, W / N, heads, D] over all tokens of the group."""
    size = group.size()
    num_heads = query.shape[1]
    num_key_heads = key.shape[1]
    if num_heads % size:
        raise UserError(
            f"{type(module).__name__} has {num_heads} heads, which {size} ranks cannot share: "
            f"use an engine.fsdp.context_parallel that divides {num_heads}."
        )
    # Each rank needs the key heads of its queries: few of them are copied.
    repeats = math.lcm(num_key_heads, size) // num_key_heads
    if repeats > 1:
        key = key.repeat_interleave(repeats, 1)
        value = value.repeat_interleave(repeats, 1)
    local = copy(module)  # attention functions read these sizes from the module
    local.__dict__["num_key_value_groups"] = num_heads // key.shape[1]
    sinks = options.get("s_aux")
    if sinks is not None:
        local_sinks = sinks.chunk(size)[group.rank()]
        local.__dict__["sinks"] = local_sinks
        options["s_aux"] = local_sinks
    modeling_code = sys.modules[type(module).__module__]
    eager: Any = getattr(modeling_code, "eager_attention_forward", None)
    inner = AttentionInterface().get_interface(inner_name, eager)
    query, key, value = (exchange(tensor, group) for tensor in (query, key, value))
    attended, _ = inner(local, query, key, value, attention_mask, **options)
    return exchange(attended, group), None


def _mask(
    inner: Any,
    size: int,
    *,
    q_length: int,
    kv_length: int,
    **options: Any,
) -> Any:
    """Return the mask of all tokens of the group."""
    return inner(
        q_length=q_length * size,
        kv_length=kv_length * size,
        **options,
    )
