"""Low-rank adapters of peft: added to a model, merged into its weights, written as a folder.

Servers and exports get merged weights under the names of the Hugging Face folder. peft is imported
only where adapters are configured.
"""

import math
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.pytorch_utils import Conv1D

from arealite.api.engine import Head
from arealite.api.engine_config import LoRAConfig
from arealite.base.adapter_folder import EXPERTS, PREFIX, counted
from arealite.base.errors import UserError, one_line
from arealite.base.extras import extra_requirement, import_optional
from arealite.base.files import follow_umask
from arealite.base.log import get
from arealite.base.model_folder import weight_files
from arealite.impl.engine.head import decoder_of

log = get(__name__)
BASE = ".base_layer."
ADAPTER = ".lora_"
NAME = "default"
ALL = "all-linear"
LINEAR = (nn.Linear, Conv1D)
Full = Callable[[torch.Tensor], torch.Tensor]
"""Gathers a parameter's shards, on all ranks."""


def inject(module: Any, config: LoRAConfig, head: Head, folder: Path | None = None) -> Any:
    """Freeze `module`, put adapters beside its `targets`, and return peft's config of them.

    The adapters are float32 and on the meta device. A value head is trained as well.

    Args:
        module: The model.
        config: Rank, alpha and targets.
        head: The model's head.
        folder: An adapter whose adapter_config.json replaces `config`.

    Raises:
        UserError: peft is not installed, or no module has the name of a target; some of the default
            targets may have no module. Or such a module is no linear layer of the decoder, or the
            model reads its weight directly, so that an adapter would have no effect.
    """
    peft = import_optional("peft", extra_requirement("lora"))
    if folder:
        made = peft.LoraConfig.from_pretrained(str(folder))
        key = f"model.adapter={folder}"
        made.inference_mode = False
        made.init_lora_weights = True
        fix = "Merge the adapter into a model folder"
    else:
        size = {"r": config.rank, "lora_alpha": config.alpha}
        targets = _all_linear(module) if config.targets == [ALL] else list(config.targets)
        task = "SEQ_CLS" if head == "value" else "CAUSAL_LM"
        own = next(name for name, part in module.named_modules() if part is decoder_of(module))
        base, _, own = own.rpartition(".")
        # Layers outside the decoder read images.
        size["exclude_modules"] = rf"{base}\.(?!{own}\.).*" if base else None
        made = peft.LoraConfig(**size, target_modules=targets, task_type=task)
        key = f"engine.fsdp.lora.targets {config.targets}"
        fix = f"Name other layers, or use targets=[{ALL}]"
    try:
        leaves = {_leaf(name) for name, _ in module.named_modules()}
        odd = [] if folder or config.targets in ([ALL], LoRAConfig().targets) else config.targets
        if absent := [name for name in odd if _leaf(name) not in leaves]:
            raise ValueError(f"Target modules {absent} not found in the base model")
        with warnings.catch_warnings(action="ignore"):  # GPT-2 has weights [inputs, outputs]
            peft.inject_adapter_in_model(made, module, adapter_name=NAME, low_cpu_mem_usage=True)
    except ValueError as error:
        what = one_line(error).partition(". ")[0]
        raise UserError(f"{key}: {what}. {fix}.") from error
    for name, layer in _adapted(module):
        base = layer.get_base_layer()
        if not hasattr(base, "weight"):
            what = f"'{name}' holds all its experts in one parameter, which cannot be adapted"
            raise UserError(f"{key}: {what} (gate_proj, up_proj, down_proj). {fix}.")
        is_linear = layer is not module.get_output_embeddings() and isinstance(base, LINEAR)
        if not is_linear or _ignores(module, name):
            what = "read without its forward" if is_linear else "no linear layer inside the decoder"
            raise UserError(f"{key}: '{name}' is {what}, and gets no adapter. {fix}.")
    if head == "value":
        module.score.requires_grad_(True)
    return made


def _adapted(module: Any) -> list[tuple[str, Any]]:
    """List the names and layers that have an adapter."""
    return [(name, layer) for name, layer in module.named_modules() if hasattr(layer, "lora_A")]


def _linear(module: Any) -> list[tuple[str, Any]]:
    """List the names and linear layers, without the head."""
    heads = module.get_output_embeddings(), getattr(module, "score", None)
    parts = module.named_modules()
    return [(name, part) for name, part in parts if isinstance(part, LINEAR) and part not in heads]


def _stacks(module: Any) -> list[str]:
    """List the parameters that hold the matrices of several experts, [experts, rows, columns]."""
    # The kernels of a convolution have a dimension of 1.
    return [name for name, p in module.named_parameters() if p.ndim == 3 and min(p.shape) > 1]


def _all_linear(module: Any) -> list[str]:
    """Return the targets of the linear layers that peft can adapt."""
    names = [name for name, _ in _linear(module)]
    without = {_leaf(name) for name in names if _ignores(module, name)}
    if _stacks(module):  # peft takes these names for experts in one parameter
        without |= EXPERTS
    return sorted({_leaf(name) for name in names} - without)


def _ignores(module: Any, name: str) -> bool:
    """Return whether a model may read the weight of a layer directly, without its adapter."""
    owner, _, leaf = name.rpartition(".")
    kinds = type(module.get_submodule(owner)).__name__ + type(module.get_submodule(name)).__name__
    is_mixed = leaf in ("x_proj", "dt_proj", "out_proj") and re.search("Mamba|H1Mixer", kinds)
    return "Router" in kinds or bool(is_mixed)


def _leaf(name: str) -> str:
    """Return the last part of a name; if it is a number, the last two, as in `experts.0`."""
    *_, owner, leaf = ["", *name.split(".")]
    return f"{owner}.{leaf}" if leaf.isdigit() else leaf


def coverage(module: Any) -> tuple[str, str]:
    """Return the layers with and without an adapter, as in `q_proj ×28, v_proj ×28`."""
    adapted = _adapted(module)
    inside = {part for _, layer in adapted for part in layer.modules()}
    without = [name for name, part in _linear(module) if part not in inside] + _stacks(module)
    return counted(_leaf(name) for name, _ in adapted), counted(map(_leaf, without))


def report(module: Any, targets: list[str]) -> None:
    """Log which layers have adapters; a warning if layers without one may be unintended."""
    on, off = coverage(module)
    log.info("adapters", layers=on, without=off)
    if off and targets == LoRAConfig().targets:
        fix = f"engine.fsdp.lora.targets=[{ALL}] adapts all layers that peft can adapt"
        log.warning("layers without adapter", layers=off, fix=fix)


def load_adapter(module: nn.Module, folder: Path) -> None:
    """Copy the adapter of a folder that peft wrote into the adapters of `module`.

    Raises:
        UserError: The folder has other tensors than `module`.
    """
    read = {name: t for file in weight_files(folder) for name, t in load_file(file).items()}
    trained = {_peft_name(name): p for name, p in module.named_parameters() if p.requires_grad}
    shapes = [{name: t.shape for name, t in each.items()} for each in (read, trained)]
    if other := sorted({name for name, _ in shapes[0].items() ^ shapes[1].items()}):
        what = f"tensors that differ from its config on this model: {', '.join(other[:3])}"
        raise UserError(f"model.adapter={folder} has {what} ({len(other)} in all). Use another.")
    for name, param in trained.items():
        fill(param.detach(), read[name])


def fill(tensor: torch.Tensor, full: torch.Tensor) -> None:
    """Copy a full tensor, or this rank's shard of it, into a tensor of the model."""
    if isinstance(tensor, DTensor):
        # src_data_rank=None: every rank cuts its own shard from `full`, without communication.
        mesh = tensor.device_mesh
        placements = tensor.placements
        full = distribute_tensor(full, mesh, placements, src_data_rank=None).to_local()
        tensor = tensor.to_local()
    tensor.copy_(full)


def _peft_name(name: str) -> str:
    return f"{PREFIX}{name.replace(f'.{NAME}.', '.')}"


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
        up, down = (down.T, up.T) if layer.fan_in_fan_out else (up, down)
        yield file_name(name), weight.addmm(up, down, alpha=layer.scaling[NAME]).to(dtype)


def write(module: nn.Module, full: Full, config: Any, folder: Path | None, *, base: Path) -> None:
    """Write the trained parameters as an adapter of `base` for peft; folder None: only gather."""
    tensors = {
        _peft_name(name): full(param.detach()).cpu()
        for name, param in module.named_parameters()
        if param.requires_grad
    }
    if folder:
        folder.mkdir()
        file = folder / "adapter_model.safetensors"
        save_file(tensors, file, metadata={"format": "pt"})
        follow_umask([file])
        config.base_model_name_or_path = str(base)
        config.save_pretrained(folder)


def values(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the adapters' shards."""
    return {n: p.detach().clone() for n, p in module.named_parameters() if ADAPTER in n}


@contextmanager
def replaced(module: nn.Module, others: dict[str, torch.Tensor]) -> Iterator[None]:
    """Set the adapters of `module` to `others`, from `values`, within the context; {}: no-op."""
    now = values(module) if others else {}
    named = dict(module.named_parameters())
    for name, value in others.items():
        named[name].data.copy_(value)
    try:
        yield
    finally:
        for name, value in now.items():
            named[name].data.copy_(value)
