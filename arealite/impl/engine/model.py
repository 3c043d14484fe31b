"""A Hugging Face model under FSDP2 whose forward pass returns logprobs or values of loss tokens.

The base model and the head run inside one root module, because FSDP2 gathers the head's weight only
inside the root's forward.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from arealite.algo.logprobs import Head as OutputHead
from arealite.algo.logprobs import token_logprobs
from arealite.base.errors import UserError
from arealite.impl.engine.batch import MicroBatch
from arealite.impl.engine.head import decoder_of, logit_change
from arealite.impl.engine.loading import keeps_float32


class LogprobModel(nn.Module):
    """A causal language model as the root; its head computes only the loss tokens."""

    def __init__(self, module: Any, *, logits_chunk: int = 2**25) -> None:
        super().__init__()
        self.module = module
        self.change = logit_change(module)
        vocabulary = module.get_output_embeddings().weight.shape[0]
        self.chunk = max(1, logits_chunk // vocabulary)

    def forward(self, batch: MicroBatch) -> dict[str, torch.Tensor]:
        """Return logprobs and entropy, float32 [N]."""
        hidden_NH = _hidden(self.module, batch)
        output = self.module.get_output_embeddings()
        head = OutputHead(output.weight, output.bias, self.change)
        targets_N = batch.targets_N
        temperature_N = batch.temperature_N
        logprobs_N, entropy_N = token_logprobs(
            hidden_NH, head, targets_N, temperature_N=temperature_N, chunk=self.chunk
        )
        return {"logprobs": logprobs_N, "entropy": entropy_N}


class ValueModel(nn.Module):
    """A sequence classifier of one label as the root: its float32 head scores each loss token."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module
        if not isinstance(getattr(module, "score", None), nn.Linear):
            raise UserError(f"{type(module).__name__} has no linear head `score`: not supported.")

    def forward(self, batch: MicroBatch) -> dict[str, torch.Tensor]:
        """Return values, float32 [N]."""
        return {"values": self.module.score(_hidden(self.module, batch).float()).sum(-1)}


def _hidden(module: PreTrainedModel, batch: MicroBatch) -> torch.Tensor:
    """Return the last hidden states [N, H] that predict the loss tokens."""
    # Padded rows need no mask and no position ids: padding is on the right, so under causal
    # attention no real token sees it and positions count from 0; SDPA takes its causal fast path.
    output = decoder_of(module)(input_ids=batch.input_ids_BW, use_cache=False, **batch.attention)
    states = output.last_hidden_state.flatten(0, 1)
    # Rows of one prompt read the same state. index_select adds their gradients in a fixed order.
    return states.index_select(0, batch.index_N)


def layers_of(module: PreTrainedModel) -> nn.ModuleList:
    """Return the transformer layers of a Hugging Face model; UserError where it has none."""
    decoder = decoder_of(module)
    parts = (getattr(decoder, "layers", None), *decoder.children())
    layers = next((part for part in parts if isinstance(part, nn.ModuleList)), None)
    if layers is None:
        raise UserError(f"{type(module).__name__} has no list of layers: not supported.")
    return layers


def recompute(module: PreTrainedModel) -> None:
    """Enable gradient checkpointing: the backward pass computes each layer again."""
    for layer in layers_of(module):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def make_mesh(device: torch.device, shard_size: int) -> DeviceMesh:
    """Return the mesh of all ranks, or a mesh of (copies, shards of one copy)."""
    size = dist.get_world_size()
    shard_size = shard_size or size
    if size % shard_size:
        what = f"engine.fsdp.shard_size {shard_size} does not divide the {size} trainer ranks"
        raise UserError(f"{what}. Use a divisor of {size}, or 0 to share one copy among all.")
    if shard_size == size:
        return init_device_mesh(device.type, (size,))
    names = ("copies", "shards")
    return init_device_mesh(device.type, (size // shard_size, shard_size), mesh_dim_names=names)


def shard(
    model: LogprobModel | ValueModel, mesh: DeviceMesh, *, dtype: torch.dtype, offload: bool
) -> None:
    """Shard every transformer layer, then the rest, over `mesh`; gradients become SUMS over ranks.

    Master parameters, gradients and reduction stay float32; `dtype` is that of the compute.
    `offload`: shards and their gradients stay in the host's memory.
    """
    low = None if dtype == torch.float32 else dtype
    policy = fsdp.MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
    home = fsdp.OffloadPolicy()
    if offload:
        home = fsdp.CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    split = partial(fsdp.fully_shard, mesh=mesh, offload_policy=home)
    for layer in layers_of(model.module):
        split(layer, mp_policy=policy, reshard_after_forward=mesh.size() > 1 or offload)
    if isinstance(model, ValueModel):
        full = fsdp.MixedPrecisionPolicy(reduce_dtype=torch.float32)
        split(model.module.score, mp_policy=full, reshard_after_forward=False)
    # The root's inputs are ids and float32 temperatures: casting them would round.
    policy = replace(policy, cast_forward_inputs=False)
    split(model, mp_policy=policy, reshard_after_forward=False)
    for module in fsdp_modules(model):
        # Loss weights are shares of the global minibatch already; gloo has no averaging reduction.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


@contextmanager
def low_precision(model: LogprobModel | ValueModel, dtype: torch.dtype) -> Iterator[None]:
    """Compute in `dtype` with copies of the parameters within the context.

    The gradients of the copies are added to those of the float32 parameters, in float32. Layers get
    their inputs in `dtype`. FSDP2 does both for sharded parameters; the context is then a no-op.
    """
    copies = dict[nn.Parameter, nn.Parameter]()
    modules = [] if fsdp_modules(model) else model.module.named_modules()
    replaced = [
        (module, name, param)
        for path, module in modules
        for name, param in module.named_parameters(recurse=False)
        if param.dtype != dtype and not keeps_float32(f"{path}.{name}")
    ]
    for _, _, param in replaced:
        if param not in copies:
            copy = nn.Parameter(param.detach().to(dtype), requires_grad=param.requires_grad)
            if param.requires_grad:
                copy.register_post_accumulate_grad_hook(partial(_move_gradient, param))
            copies[param] = copy
    layers = layers_of(model.module) if replaced else ()
    to_dtype = partial(_cast_inputs, dtype)
    hooks = [layer.register_forward_pre_hook(to_dtype, with_kwargs=True) for layer in layers]
    for module, name, param in replaced:
        setattr(module, name, copies[param])
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module, name, param in replaced:
            setattr(module, name, param)


def _cast_inputs(dtype: torch.dtype, layer: nn.Module, args: Any, options: Any) -> Any:
    """Return the inputs of a layer, floating-point tensors in `dtype`."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return tree_map_only(torch.Tensor, cast, (args, options))


def _move_gradient(param: torch.Tensor, copy: torch.Tensor) -> None:
    """Add the gradient of a copy to that of its parameter, and free it."""
    gradient = copy.grad
    assert gradient is not None
    copy.grad = None
    if param.grad is None:
        param.grad = gradient.to(param.dtype)
    else:
        param.grad.add_(gradient)


def fsdp_modules(model: nn.Module) -> list[fsdp.FSDPModule]:
    """List the sharded units, root first; none where one rank holds plain parameters."""
    return [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Free gathered parameters, which would be outdated after a change of their shards."""
    for module in fsdp_modules(model):
        module.reshard()
