"""Low-rank adapters of peft: added to a model, merged into its weights, written as a folder.

peft is imported only where adapters are configured. Its layers hold several adapters, each under a
key: `DEFAULT` for the adapter of the config, `key_of(name)` for an adapter that is added by name.
"""

import math
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from arealite.api.engine import Head
from arealite.api.engine_config import LoRAConfig
from arealite.api.engine_extension import Full
from arealite.base.errors import UserError, one_line
from arealite.base.extras import extra_requirement, import_optional
from arealite.base.log import get
from arealite.base.model_folder import ModelTensors, weight_files
from arealite.ext.models.adapter_folder import EXPERTS, PREFIX, counted
from arealite.impl.engine.loading import fill
from arealite.impl.engine.model import decoder_of
from arealite.impl.weights.float_file import write_floats

log = get(__name__)
BASE = ".base_layer."
ADAPTER = ".lora_"
DEFAULT = "default"
ALL = "all-linear"
LINEAR = (nn.Linear, Conv1D)


def inject(
    module: Any,
    config: LoRAConfig,
    head: Head,
    folder: Path | None = None,
    *,
    key: str = DEFAULT,
) -> Any:
    """Freeze `module`, put adapters beside its `targets`, and return peft's config of them.

    The adapters are float32 and on the meta device. A value head is trained as well.

    Args:
        module: The model, perhaps with other adapters.
        config: Rank, alpha and targets.
        head: The model's head.
        folder: An adapter whose adapter_config.json replaces `config`.
        key: The key of the adapter in peft's layers.

    Raises:
        UserError: peft is not installed, or no module has the name of a target; some of the default
            targets may have no module. Or such a module is no linear layer of the decoder, or the
            model reads its weight directly, so that an adapter would have no effect.
    """
    peft = import_optional("peft", extra_requirement("lora"))
    if folder:
        peft_config = peft.LoraConfig.from_pretrained(str(folder))
        peft_config.inference_mode = False
        peft_config.init_lora_weights = True
        option = f"model.adapter={folder}"
        advice = "Merge the adapter into a model folder"
    else:
        peft_config = _peft_config(module, config, head)
        option = f"engine.fsdp.lora.targets {config.targets}"
        advice = f"Name other layers, or use targets=[{ALL}]"
    try:
        if not folder:
            _check_targets(module, config.targets)
        with warnings.catch_warnings(action="ignore"):  # GPT-2 has weights [inputs, outputs]
            peft.inject_adapter_in_model(
                peft_config,
                module,
                adapter_name=key,
                low_cpu_mem_usage=True,
            )
    except ValueError as error:
        reason = one_line(error).partition(". ")[0]
        raise UserError(f"{option}: {reason}. {advice}.") from error
    for param in _matrices(module).values():
        param.requires_grad_(True)  # peft leaves the first adapter on its own
    for name, layer in _adapted(module, key):
        reason = _refusal_reason(module, name, layer)
        if reason is not None:
            raise UserError(f"{option}: '{name}' {reason}. {advice}.")
    if head == "value":
        module.score.requires_grad_(True)
    return peft_config


def _peft_config(module: Any, config: LoRAConfig, head: Head) -> Any:
    """Return peft's config of new adapters."""
    peft = import_optional("peft", extra_requirement("lora"))
    targets = list(config.targets)
    if targets == [ALL]:
        targets = _all_linear(module)
    decoder = decoder_of(module)
    decoder_name = next(name for name, part in module.named_modules() if part is decoder)
    parent, _, leaf = decoder_name.rpartition(".")
    # Layers outside the decoder read images.
    outside_decoder = rf"{parent}\.(?!{leaf}\.).*" if parent else None
    return peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=targets,
        exclude_modules=outside_decoder,
        task_type="SEQ_CLS" if head == "value" else "CAUSAL_LM",
    )


def _check_targets(module: Any, targets: list[str]) -> None:
    """Raise ValueError if a target has no module; some of the default targets may have none."""
    if targets in ([ALL], LoRAConfig().targets):
        return
    leaves = {_leaf(name) for name, _ in module.named_modules()}
    absent = [target for target in targets if _leaf(target) not in leaves]
    if absent:
        raise ValueError(f"Target modules {absent} not found in the base model")


def _refusal_reason(
    module: Any,
    name: str,
    layer: Any,
) -> str | None:
    """Return the reason for which a layer cannot have an adapter; None if it can."""
    base = layer.get_base_layer()
    if not hasattr(base, "weight"):
        return (
            "holds all its experts in one parameter, which cannot be adapted "
            "(gate_proj, up_proj, down_proj)"
        )
    is_head = layer is module.get_output_embeddings()
    if is_head or not isinstance(base, LINEAR):
        return "is no linear layer inside the decoder, and gets no adapter"
    if _ignores(module, name):
        return "is read without its forward, and gets no adapter"
    return None


def key_of(name: str) -> str:
    """Return the key of a named adapter in peft's layers, which no attribute of a module has."""
    return f"named_{name}"


def layers_of(module: Any) -> list[tuple[str, Any]]:
    """List the names and layers that have adapters."""
    return [(name, layer) for name, layer in module.named_modules() if hasattr(layer, "lora_A")]


def _adapted(module: Any, key: str = DEFAULT) -> list[tuple[str, Any]]:
    """List the names and layers that have the adapter of a key."""
    return [(name, layer) for name, layer in layers_of(module) if key in layer.lora_A]


def _matrices(module: Any, key: str = "") -> dict[str, nn.Parameter]:
    """Return the matrices of the adapter of a key, or of all adapters, by their names."""
    matrices = dict[str, nn.Parameter]()
    for name, param in module.named_parameters():
        _, _, place = name.partition(ADAPTER)
        if place and key in ("", place.split(".")[1]):
            matrices[name] = param
    return matrices


def _linear(module: Any) -> list[tuple[str, Any]]:
    """List the names and linear layers, without the head; a layer may have adapters."""
    heads = module.get_output_embeddings(), getattr(module, "score", None)
    linear_layers = list[tuple[str, Any]]()
    for name, part in module.named_modules():
        is_inside_adapted = ADAPTER in name or f"{name}.".endswith(BASE)
        layer = part.get_base_layer() if hasattr(part, "lora_A") else part
        if isinstance(layer, LINEAR) and layer not in heads and not is_inside_adapted:
            linear_layers.append((name, layer))
    return linear_layers


def _stacks(module: Any) -> list[str]:
    """List the parameters that hold the matrices of several experts, [experts, rows, columns]."""
    return [
        name
        for name, param in module.named_parameters()
        if param.ndim == 3 and min(param.shape) > 1  # kernels of a convolution have a size of 1
    ]


def _all_linear(module: Any) -> list[str]:
    """Return the targets of the linear layers that peft can adapt."""
    names = [name for name, _ in _linear(module)]
    targets = {_leaf(name) for name in names}
    unsupported = {_leaf(name) for name in names if _ignores(module, name)}
    if _stacks(module):  # peft takes these names for experts in one parameter
        unsupported |= EXPERTS
    return sorted(targets - unsupported)


def _ignores(module: Any, name: str) -> bool:
    """Return whether a model may read the weight of a layer directly, without its adapter."""
    parent_name, _, leaf = name.rpartition(".")
    parent = module.get_submodule(parent_name)
    layer = module.get_submodule(name)
    class_names = type(parent).__name__ + type(layer).__name__
    if "Router" in class_names:
        return True
    if leaf not in ("x_proj", "dt_proj", "out_proj"):
        return False
    return re.search("Mamba|H1Mixer", class_names) is not None


def _leaf(name: str) -> str:
    """Return the last part of a name; if it is a number, the last two, as in `experts.0`."""
    *_, parent, leaf = ["", *name.split(".")]
    if leaf.isdigit():
        return f"{parent}.{leaf}"
    return leaf


def coverage(module: Any) -> tuple[str, str]:
    """Return the layers with and without an adapter, as in `q_proj ×28, v_proj ×28`."""
    adapted_names = [name for name, _ in _adapted(module)]
    without_adapter = [_leaf(name) for name, _ in _linear(module) if name not in adapted_names]
    without_adapter += [_leaf(name) for name in _stacks(module)]
    return counted(map(_leaf, adapted_names)), counted(without_adapter)


def report(module: Any, targets: list[str]) -> None:
    """Log which layers have adapters; a warning if layers without one may be unintended."""
    with_adapter, without_adapter = coverage(module)
    log.info("adapters", layers=with_adapter, without=without_adapter)
    if without_adapter and targets == LoRAConfig().targets:
        log.warning(
            "layers without adapter",
            layers=without_adapter,
            fix=f"engine.fsdp.lora.targets=[{ALL}] adapts all layers that peft can adapt",
        )


def load_adapter(module: nn.Module, folder: Path, key: str = DEFAULT) -> None:
    """Copy the adapter of a folder that peft wrote into an adapter of `module`.

    Raises:
        UserError: The folder has other tensors than the adapter.
    """
    stored = dict[str, torch.Tensor]()
    for file in weight_files(folder):
        stored |= load_file(file)
    params = trained_parameters(module, key)
    trained = {name: param.detach() for name, param in params.items()}
    expected = ModelTensors(shapes=_shapes(trained), owner="its config on this model")
    difference = expected.difference(_shapes(stored))
    if difference:
        raise UserError(f"model.adapter={folder}: {difference}. Use another.")
    for name, tensor in trained.items():
        fill(tensor, stored[name])


def _shapes(tensors: dict[str, torch.Tensor]) -> dict[str, list[int]]:
    return {name: [*tensor.shape] for name, tensor in tensors.items()}


def trained_parameters(module: nn.Module, key: str = DEFAULT) -> dict[str, nn.Parameter]:
    """Return the parameters of an adapter by their names in peft's file."""
    owners = parameter_owners(module, key)
    return {name: getattr(owner, attribute) for name, (owner, attribute) in owners.items()}


def parameter_owners(module: nn.Module, key: str = DEFAULT) -> dict[str, tuple[nn.Module, str]]:
    """Return module and attribute of each parameter of an adapter, by its name in peft's file.

    The parameters of the default adapter include a value head.
    """
    owners = dict[str, tuple[nn.Module, str]]()
    matrices = _matrices(module, key)
    for name, param in module.named_parameters():
        is_head = key == DEFAULT and param.requires_grad and ADAPTER not in name
        if name in matrices or is_head:
            layer, _, place = name.rpartition(f".{key}.")
            peft_name = f"{PREFIX}{layer}.{place}" if layer else f"{PREFIX}{name}"
            owner_name, _, attribute = name.rpartition(".")
            owners[peft_name] = module.get_submodule(owner_name), attribute
    return owners


def adapter_names(module: nn.Module) -> frozenset[str]:
    """Return the names of the parameters of all adapters."""
    return frozenset(_matrices(module))


def materialize(
    module: nn.Module,
    key: str,
    *,
    seed: int,
    device: torch.device,
) -> None:
    """Give the matrices of an adapter their initial values, which depend on `seed` alone."""
    generator = torch.Generator().manual_seed(seed)
    for name, param in _matrices(module, key).items():
        full = first_value(name, param.shape, generator)
        owner_name, _, leaf = name.rpartition(".")
        owner = module.get_submodule(owner_name)
        setattr(owner, leaf, nn.Parameter(full.to(device)))


def delete(module: nn.Module, key: str) -> None:
    """Remove an adapter; a layer without another one is as it was before its first one."""
    for name, layer in layers_of(module):
        with warnings.catch_warnings(action="ignore"):  # it was the adapter that peft had chosen
            layer.delete_adapter(key)
        if not layer.lora_A:
            parent_name, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(parent_name), leaf, layer.get_base_layer())
    for param in _matrices(module).values():
        param.requires_grad_(True)  # peft trains one adapter at a time


def file_names(module: nn.Module) -> dict[str, str]:
    """Return the name in files of the model of each tensor beside an adapter."""
    return {name: name.replace(BASE, ".") for name in module.state_dict() if BASE in name}


def first_value(
    name: str,
    shape: torch.Size,
    generator: torch.Generator,
) -> torch.Tensor:
    """Return the initial value of an adapter's matrix.

    Matrices A are uniform in ±1/√inputs, as in peft. Matrices B are 0: adapters add 0 at first.
    """
    if ".lora_A." not in name:
        return torch.zeros(shape)
    return torch.empty(shape).uniform_(-1, 1, generator=generator) / math.sqrt(shape[-1])


def merged(
    module: nn.Module,
    name: str,
    param: torch.Tensor,
    full: Full,
) -> torch.Tensor | None:
    """Return the full weight W + alpha/rank · B·A of a layer, float32; None: no adapter changes it.

    The product is added in float32.
    """
    layer_name, _, leaf = name.rpartition(BASE)
    if not layer_name or leaf != "weight":
        return None
    layer: Any = module.get_submodule(layer_name)
    if DEFAULT not in layer.lora_A:
        return None
    up = full(layer.lora_B[DEFAULT].weight.detach())
    down = full(layer.lora_A[DEFAULT].weight.detach())
    weight = full(param.detach()).float()
    scaling = layer.scaling[DEFAULT]
    return with_product(weight, down, up, scaling, is_transposed=layer.fan_in_fan_out)


def with_product(
    weight: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
    scaling: float,
    *,
    is_transposed: bool,
) -> torch.Tensor:
    """Return a float32 weight [outputs, inputs] + scaling · up · down.

    Args:
        weight: The weight of the layer.
        down: Matrix A, [rank, inputs].
        up: Matrix B, [outputs, rank].
        scaling: The factor of the product.
        is_transposed: The weight is [inputs, outputs], as in GPT-2.
    """
    if is_transposed:
        return weight.addmm(down.T, up.T, alpha=scaling)
    return weight.addmm(up, down, alpha=scaling)


def config_fields(config: Any, base: Path) -> dict[str, object]:
    """Return the content of adapter_config.json of an adapter of `base`, as peft writes it."""
    fields: dict[str, Any] = config.to_dict() | {"base_model_name_or_path": str(base)}
    for name, value in fields.items():
        if isinstance(value, set):
            fields[name] = sorted(value)
    return fields


def write(
    tensors: dict[str, torch.Tensor],
    config: Any,
    folder: Path,
    *,
    base: Path,
) -> None:
    """Write an adapter of `base` for peft."""
    folder.mkdir(exist_ok=True)
    write_floats(folder / "adapter_model.safetensors", tensors)
    config.base_model_name_or_path = str(base)
    config.save_pretrained(folder)


def values(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the default adapter's shards."""
    return {name: param.detach().clone() for name, param in _matrices(module, DEFAULT).items()}


@contextmanager
def replaced(module: nn.Module, others: dict[str, torch.Tensor]) -> Iterator[None]:
    """Set the default adapter to `others`, from `values`, within the context; {}: no-op."""
    originals = values(module) if others else {}
    params = dict(module.named_parameters())
    for name, tensor in others.items():
        params[name].data.copy_(tensor)
    try:
        yield
    finally:
        for name, tensor in originals.items():
            params[name].data.copy_(tensor)
