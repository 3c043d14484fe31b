"""Reads a Hugging Face folder into a sharded model.

Beside its shards, a rank has at most one full parameter in memory, and the tensors of the folder
from which this parameter is made: for example one tensor for each expert.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.modeling_utils import PreTrainedModel as Model

from arealite.api.engine import Head
from arealite.api.engine_extension import EngineExtension
from arealite.base.errors import UserError, one_line
from arealite.impl.engine.extensions import state_tensors
from arealite.impl.weights.tensor_names import SCORE, TensorNames

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def compute_dtype(name: str) -> torch.dtype:
    """Return one of DTYPES by its name.

    Raises:
        UserError: There is no such dtype.
    """
    if name not in DTYPES:
        known_names = ", ".join(DTYPES)
        raise UserError(f"Unknown dtype '{name}'. Known: {known_names}.")
    return DTYPES[name]


def empty_model(path: Path, head: Head = "lm") -> Model:
    """Build the model of a Hugging Face folder, parameters on the meta device, in eval mode.

    With the head `value`, it is the folder's decoder as a sequence classifier of one label.

    Raises:
        UserError: transformers cannot build the model, or has no such head.
    """
    auto_class: Any = AutoModelForCausalLM
    if head == "value":
        auto_class = AutoModelForSequenceClassification
    try:  # a head for tokens ignores num_labels
        config = AutoConfig.from_pretrained(path, local_files_only=True, num_labels=1)
        with register_module_parameter_registration_hook(_on_meta):
            model = auto_class.from_config(
                config,
                dtype=torch.float32,
                attn_implementation=attention_of(config),
            )
        return model.eval()
    except Exception as error:  # each model fails in its own way
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise UserError(
            f"'{path}': transformers cannot build a {head} model from config.json "
            f"({reason:.250}). Correct config.json, or use another model."
        ) from error


def attention_of(config: Any) -> str | None:
    """Return `eager` for a model that caps its attention scores; None: transformers' choice.

    transformers before 5.23 chooses SDPA, which ignores the cap without an error.
    """
    softcap = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    return "eager" if softcap else None


def set_dtypes(
    model: nn.Module,
    dtype: torch.dtype,
    own_parameters: Collection[str],
) -> bool:
    """Cast frozen parameters to the compute dtype.

    Returns:
        Whether all parameters now have that dtype. Those of extensions, `own_parameters`, do not
        count: they accept inputs of any dtype and compute in their own.
    """
    is_uniform = True
    for name, param in model.named_parameters():
        if name in own_parameters:
            continue
        if not param.requires_grad and name != SCORE:
            param.data = param.data.to(dtype)
        if param.dtype != dtype:
            is_uniform = False
    return is_uniform


def load_weights(
    model: Model,
    names: TensorNames,
    device: torch.device,
    extensions: EngineExtension,
    *,
    offload: bool = False,
    seed: int = 0,
) -> None:
    """Materialise `model`, and load its parameters or their shards from the folder's safetensors.

    Buffers are on `device`. Parameters are on `device`, or with `offload` on the CPU. A value head
    that the folder lacks is initialised to 0, and the parameters of extensions from `seed`, equally
    on all ranks.

    Raises:
        UserError: config.json ties tensors whose values differ in the folder.
    """
    param_device = torch.device("cpu") if offload else device

    def materialised(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta:
            return torch.empty_like(tensor, device=param_device)
        return tensor.to(device)

    model._apply(materialised)  # like to_empty, except that buffers keep their values
    if not any(isinstance(param, DTensor) for param in model.parameters()):
        model.tie_weights()  # to_empty keeps shared parameters shared under FSDP only

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in state_tensors(model):
            file_name = extensions.file_names.get(name, name)
            if name in extensions.own_parameters:
                full = extensions.first_value(name, tensor.shape, generator)
            elif file_name in names.loadable:
                full = names.load(file_name)
            else:
                full = torch.zeros(tensor.shape)
            fill(tensor, full.to(device))


def fill(tensor: torch.Tensor, full: torch.Tensor) -> None:
    """Copy a full tensor, or this rank's shard of it, into a tensor of the model."""
    if isinstance(tensor, DTensor):
        # src_data_rank=None: every rank cuts its own shard from `full`, without communication.
        full = distribute_tensor(
            full,
            device_mesh=tensor.device_mesh,
            placements=tensor.placements,
            src_data_rank=None,
        ).to_local()
        tensor = tensor.to_local()
    tensor.copy_(full)


def _on_meta(_: nn.Module, __: str, param: nn.Parameter) -> Any:
    """Return a new parameter's replacement on the meta device. Buffers are computed as usual."""
    if param.is_meta:
        return None
    return nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
