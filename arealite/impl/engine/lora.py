"""Low-rank adapters of peft: added to a model, merged into its weights, written as a folder.

Servers and exports get merged weights under the names of the Hugging Face folder. peft is imported
only where adapters are configured.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from arealite.api.engine import Head
from arealite.api.engine_config import LoRAConfig
from arealite.base.errors import UserError
from arealite.base.extras import extra_requirement, import_optional

BASE, ADAPTER, NAME = ".base_layer.", ".lora_", "default"
Full = Callable[[torch.Tensor], torch.Tensor]
"""Gathers a parameter's shards, on all ranks."""


def inject(module: Any, config: LoRAConfig, head: Head) -> Any:
    """Freeze `module`, put adapters beside its `targets`, and return peft's config of them.

    The adapters are float32 and on the meta device. A value head is trained as well.

    Raises:
        UserError: peft is not installed, no module has one of these names, or a module holds
            several experts in one parameter.
    """
    peft = import_optional("peft", extra_requirement("lora"))
    size = {"r": config.rank, "lora_alpha": config.alpha}
    task = "SEQ_CLS" if head == "value" else "CAUSAL_LM"
    made = peft.LoraConfig(**size, target_modules=list(config.targets), task_type=task)
    key = f"engine.fsdp.lora.targets {config.targets}"
    try:
        peft.inject_adapter_in_model(made, module, adapter_name=NAME, low_cpu_mem_usage=True)
    except ValueError as error:
        raise UserError(f"{key}: {error}") from error
    layers = [(name, each) for name, each in module.named_modules() if hasattr(each, "lora_A")]
    if fused := [name for name, each in layers if not hasattr(each.get_base_layer(), "weight")]:
        what = f"'{fused[0]}' holds all its experts in one parameter"
        what += ", and adapters of such a parameter cannot be merged"
        raise UserError(f"{key}: {what}. Remove gate_proj, up_proj and down_proj from the targets.")
    if head == "value":
        module.score.requires_grad_(True)
    return made


def file_name(name: str) -> str:
    """Return the name of a parameter in files of the model."""
    return name.replace(BASE, ".")


def state_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a model's files: parameters, tied ones once, and persistent buffers."""
    seen = set[int]()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def first_value(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Return the initial value of a parameter that no file has.

    Matrices A are uniform in ±1/√inputs, as in peft. The others are 0: adapters add 0 at first.
    """
    if ".lora_A." not in name:
        return torch.zeros(shape)
    return torch.empty(shape).uniform_(-1, 1, generator=generator) / math.sqrt(shape[-1])


def merged(module: nn.Module, full: Full, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name in files and the full tensor of each parameter, W + alpha/rank · B·A where it
    has an adapter: added in float32, then rounded to `dtype`. Buffers keep their own dtype."""
    for name, param in state_tensors(module):
        owner, _, leaf = name.rpartition(BASE)
        if ADAPTER in name:
            continue
        if not owner or leaf != "weight":
            kept = dtype if isinstance(param, nn.Parameter) else param.dtype
            yield file_name(name), full(param.detach().to(kept))
            continue
        layer: Any = module.get_submodule(owner)
        up, down = (full(part[NAME].weight.detach()) for part in (layer.lora_B, layer.lora_A))
        weight = full(param.detach()).float()
        yield file_name(name), weight.addmm(up, down, alpha=layer.scaling[NAME]).to(dtype)


def write(module: nn.Module, full: Full, config: Any, folder: Path | None, *, base: Path) -> None:
    """Write the trained parameters as an adapter of `base` for peft; folder None: only gather."""
    tensors = {
        f"base_model.model.{name.replace(f'.{NAME}.', '.')}": full(param.detach()).cpu()
        for name, param in module.named_parameters()
        if param.requires_grad
    }
    if folder:
        folder.mkdir()
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        config.base_model_name_or_path = str(base)
        config.save_pretrained(folder)


@contextmanager
def switched_off(module: nn.Module) -> Iterator[None]:
    """Disable the adapters of `module` within the context."""
    layers: list[Any] = [layer for layer in module.modules() if hasattr(layer, "lora_A")]
    scaling = [layer.scaling[NAME] for layer in layers]
    for layer in layers:
        layer.scaling[NAME] = 0.0
    try:
        yield
    finally:
        for layer, before in zip(layers, scaling, strict=True):
            layer.scaling[NAME] = before
