"""A Hugging Face model under FSDP2 whose forward pass returns logprobs or values of loss tokens.

The base model and the head run inside one root module, because FSDP2 gathers the head's weight only
inside the root's forward.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from arealite.algo.logprobs import LogitChange, OutputHead, kept_set_logprobs, token_logprobs
from arealite.api.engine_extension import MicroBatch
from arealite.api.hooks import LogitChangeMaker
from arealite.base import entries
from arealite.base.errors import UserError


class LogprobModel(nn.Module):
    """A causal language model as the root; its head computes only the loss tokens."""

    def __init__(self, module: Any, *, logits_chunk: int = 2**25) -> None:
        super().__init__()
        self.module = module
        makers: list[LogitChangeMaker] = entries.hooks("logit_change")
        self.change: LogitChange = entries.first_result(makers, module) or LogitChange()
        vocabulary = module.get_output_embeddings().weight.shape[0]
        self.chunk = max(1, logits_chunk // vocabulary)

    def forward(self, batch: MicroBatch) -> dict[str, torch.Tensor]:
        """Return logprobs and entropy, float32 [N]; with top ids also top_logprobs [N, K]."""
        hidden_NH = _hidden(self.module, batch)
        layer = self.module.get_output_embeddings()
        head = OutputHead(
            weight_VH=layer.weight,
            bias_V=layer.bias,
            change=self.change,
        )
        ids = batch.targets_N
        if batch.top_ids_NK is not None:
            ids = torch.cat([ids[:, None], batch.top_ids_NK], dim=1)
        logprobs, entropy_N = token_logprobs(
            hidden_NH,
            head,
            ids,
            temperature_N=batch.temperature_N,
            chunk=self.chunk,
        )
        if batch.top_ids_NK is None:
            return {"logprobs": logprobs, "entropy": entropy_N}
        if batch.is_truncated_N is not None:
            logprobs = kept_set_logprobs(logprobs, batch.is_truncated_N)
        return {  # copies: FSDP2 puts its hooks on outputs that are no views
            "logprobs": logprobs[:, 0].clone(),
            "entropy": entropy_N,
            "top_logprobs": logprobs[:, 1:].clone(),
        }


class ValueModel(nn.Module):
    """A sequence classifier of one label as the root: its float32 head scores each loss token."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module
        head = getattr(module, "score", None)
        if not isinstance(head, nn.Linear):
            raise UserError(f"{type(module).__name__} has no linear head `score`: not supported.")

    def forward(self, batch: MicroBatch) -> dict[str, torch.Tensor]:
        """Return values, float32 [N]."""
        hidden_NH = _hidden(self.module, batch).float()
        values_N1 = self.module.score(hidden_NH)
        return {"values": values_N1.sum(-1)}


def _hidden(module: PreTrainedModel, batch: MicroBatch) -> torch.Tensor:
    """Return the last hidden states [N, H] that predict the loss tokens."""
    # Padded rows need no mask and no position ids: padding is on the right, so under causal
    # attention no real token sees it and positions count from 0; SDPA takes its causal fast path.
    decoder = decoder_of(module)
    output = decoder(input_ids=batch.input_ids_BW, use_cache=False, **batch.attention)
    states = output.last_hidden_state.flatten(0, 1)
    # Rows of one prompt read the same state. index_select adds their gradients in a fixed order.
    return states.index_select(0, batch.index_N)


def decoder_of(module: Any) -> Any:
    """Return the part of a causal language model that ends before its head."""
    decoder = module.get_decoder()
    if decoder is module:
        return getattr(module, "model", decoder)
    return decoder


def layers_of(module: PreTrainedModel) -> nn.ModuleList:
    """Return the transformer layers of a Hugging Face model; UserError where it has none."""
    decoder = decoder_of(module)
    candidates = (getattr(decoder, "layers", None), *decoder.children())
    for candidate in candidates:
        if isinstance(candidate, nn.ModuleList):
            return candidate
    raise UserError(f"{type(module).__name__} has no list of layers: not supported.")


def recompute(module: PreTrainedModel) -> None:
    """Enable gradient checkpointing: the backward pass computes each layer again."""
    for layer in layers_of(module):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def make_mesh(device: torch.device, shard_size: int) -> DeviceMesh:
    """Return the mesh of all ranks, or a mesh of (copies, shards of one copy)."""
    ranks = dist.get_world_size()
    shard_size = shard_size or ranks
    if ranks % shard_size:
        raise UserError(
            f"engine.fsdp.shard_size {shard_size} does not divide the {ranks} trainer ranks. "
            f"Use a divisor of {ranks}, or 0 to share one copy among all."
        )
    if shard_size == ranks:
        return init_device_mesh(device.type, (ranks,))
    return init_device_mesh(
        device.type,
        mesh_shape=(ranks // shard_size, shard_size),
        mesh_dim_names=("copies", "shards"),
    )


def shard(
    model: LogprobModel | ValueModel,
    mesh: DeviceMesh,
    *,
    dtype: torch.dtype,
    offload: bool,
) -> None:
    """Shard every transformer layer, then the rest, over `mesh`; gradients become SUMS over ranks.

    Master parameters, gradients and reduction stay float32; `dtype` is that of the compute.
    `offload`: shards and their gradients stay in the host's memory.
    """
    low_dtype = None if dtype == torch.float32 else dtype
    policy = fsdp.MixedPrecisionPolicy(param_dtype=low_dtype, reduce_dtype=torch.float32)
    offload_policy = fsdp.OffloadPolicy()
    if offload:
        offload_policy = fsdp.CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    fully_shard = partial(fsdp.fully_shard, mesh=mesh, offload_policy=offload_policy)
    reshards = mesh.size() > 1 or offload
    for layer in layers_of(model.module):
        fully_shard(layer, mp_policy=policy, reshard_after_forward=reshards)
    if isinstance(model, ValueModel):
        head_policy = fsdp.MixedPrecisionPolicy(reduce_dtype=torch.float32)
        fully_shard(model.module.score, mp_policy=head_policy, reshard_after_forward=False)
    # The root's inputs are ids and float32 temperatures: casting them would round.
    root_policy = replace(policy, cast_forward_inputs=False)
    fully_shard(model, mp_policy=root_policy, reshard_after_forward=False)
    for module in fsdp_modules(model):
        # Loss weights are shares of the global minibatch already; gloo has no averaging reduction.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


@contextmanager
def low_precision(
    model: LogprobModel | ValueModel,
    dtype: torch.dtype,
    float32_names: Collection[str],
) -> Iterator[None]:
    """Compute in `dtype` with copies of the parameters not in `float32_names` within the context.

    The gradients of the copies are added to those of the float32 parameters, in float32. Layers get
    their inputs in `dtype`. FSDP2 does both for sharded parameters; the context is then a no-op.
    """
    replaced = _params_to_cast(model, dtype, float32_names)
    copies = dict[nn.Parameter, nn.Parameter]()
    for _, _, param in replaced:
        if param not in copies:
            copies[param] = _low_precision_copy(param, dtype)
    layers = layers_of(model.module) if replaced else ()
    cast_inputs = partial(_cast_inputs, dtype)
    hooks = [layer.register_forward_pre_hook(cast_inputs, with_kwargs=True) for layer in layers]
    for module, name, param in replaced:
        setattr(module, name, copies[param])
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module, name, param in replaced:
            setattr(module, name, param)


def _params_to_cast(
    model: LogprobModel | ValueModel,
    dtype: torch.dtype,
    float32_names: Collection[str],
) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """List (module, name in the module, parameter) of the parameters that `low_precision` casts."""
    params = list[tuple[nn.Module, str, nn.Parameter]]()
    if fsdp_modules(model):
        return params
    for path, module in model.module.named_modules():
        for name, param in module.named_parameters(recurse=False):
            if param.dtype != dtype and f"{path}.{name}" not in float32_names:
                params.append((module, name, param))
    return params


def _low_precision_copy(param: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    """Return a copy in `dtype` whose gradient moves to the parameter as soon as it is complete."""
    copy = nn.Parameter(param.detach().to(dtype), requires_grad=param.requires_grad)
    if param.requires_grad:
        copy.register_post_accumulate_grad_hook(partial(_move_gradient, param))
    return copy


def _cast_inputs(
    dtype: torch.dtype,
    layer: nn.Module,
    args: Any,
    options: Any,
) -> Any:
    """Return the inputs of a layer, floating-point tensors in `dtype`."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            return tensor.to(dtype)
        return tensor

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


def set_last_backward(roots: list[fsdp.FSDPModule], *, is_last: bool) -> None:
    """Set whether the next backward pass of the roots is the last one before an update.

    Only the last one reduces the gradients over the copies of the shards.
    """
    for root in roots:
        root.set_requires_all_reduce(is_last)
        root.set_is_last_backward(is_last)


def reshard(model: nn.Module) -> None:
    """Free gathered parameters, which would be outdated after a change of their shards."""
    for module in fsdp_modules(model):
        module.reshard()


def reset(model: nn.Module) -> None:
    """End a failed pass of sharded parameters; drop its gradients that were not reduced yet."""
    for root in fsdp_modules(model)[:1]:
        root_state: Any = root._get_fsdp_state()
        if root_state._is_root is None:  # it failed before its first forward pass
            return
        if hasattr(root, "reset_iter_state"):  # torch 2.13
            root.reset_iter_state()
        else:
            _reset_before_torch_2_13(root_state)
        for state in root_state._state_ctx.all_states:
            for group in _groups_of(state):
                for param in group.fsdp_params:
                    param.unsharded_accumulated_grad = None
                    if hasattr(param, "_unsharded_param"):  # it was gathered before
                        param._unsharded_param.grad = None
    reshard(model)


def _groups_of(state: Any) -> list[Any]:
    """Return the parameter groups of a sharded unit; torch 2.11 has at most one."""
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [state._fsdp_param_group] if state._fsdp_param_group else []


def _reset_before_torch_2_13(root_state: Any) -> None:
    """Do what `reset_iter_state` does in torch 2.13, with the private parts of torch 2.11."""
    for state in root_state._state_ctx.all_states:
        state._training_state = TrainingState.IDLE
        state._modules_to_run_forward.clear()
        for group in _groups_of(state):
            group.finalize_backward()
            group._training_state = TrainingState.IDLE
            group._partial_reduce_output = None
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # the collectives use buffers that are freed next
    communication = root_state._comm_ctx
    communication.post_forward_order.clear()
    communication.all_gather_state = None
    communication.reduce_scatter_state = None
    root_state._state_ctx.iter_forward_root = None
    root_state._state_ctx.post_backward_final_callback_queued = False
