"""Read and check a LoRA adapter that peft wrote, without torch and peft."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from arealite.base.errors import RoleError, UserError
from arealite.base.model_folder import Header, Shapes, read_headers, read_json

PREFIX = "base_model.model."
"""Begins the names of tensors in a folder of peft."""
KNOWN = {
    "r",
    "lora_alpha",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "fan_in_fan_out",
    "init_lora_weights",
    "lora_dropout",
    "inference_mode",
    "task_type",
    "base_model_name_or_path",
    "revision",
    "peft_type",
    "peft_version",
    "auto_mapping",
    "runtime_config",
    "loftq_config",
    "megatron_core",
    "qalora_group_size",
}
"""Fields of adapter_config.json that the engine honours, or that have no effect on a trained
adapter. Any other field must be off."""

NOT_ADAPTED = re.compile(r"embed|lm_head|wte|wpe|score|\.experts\.|vision|visual|audio")
"""Matches matrices that get no adapter: embeddings, heads, experts, parts for images and audio."""
EXPERTS = {"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
"""Names of linear layers that peft takes for experts, in a model that has experts."""
OFF: tuple[Any, ...] = (None, False, {}, [], "none")
"""Values of a field that switch it off."""
SHARED_AXIS = {"lora_A": 1, "lora_B": 0}
"""The axis of an adapter's matrix that has a size of the matrix which it adapts."""
UNCHANGED_BASE = True, False, "gaussian", "orthogonal", "eva"
"""Values of init_lora_weights under which the base model kept its weights."""


def adapted(model: Shapes, targets: Sequence[str]) -> dict[str, bool]:
    """Return the linear layers of a model folder, and whether they get an adapter."""
    matrices = [name.removesuffix(".weight") for name, shape in model.items() if len(shape) == 2]
    linear = [name for name in matrices if not NOT_ADAPTED.search(name)]
    leaves = {name: name.rpartition(".")[2] for name in linear}
    adapted_leaves = {*targets}
    if [*targets] == ["all-linear"]:
        adapted_leaves = {*leaves.values()}
        has_experts = any(".experts." in name for name in model)
        if has_experts:
            adapted_leaves -= EXPERTS
    return {name: leaf in adapted_leaves for name, leaf in leaves.items()}


def counted(names: Iterable[str]) -> str:
    """Return names and how often each occurs, as in `q_proj ×28, v_proj ×28`."""
    return ", ".join(f"{name} ×{count}" for name, count in Counter(names).items())


def read_adapter(path: str, model: Shapes) -> dict[str, Any]:
    """Check the adapter folder that `model.adapter` names; return its adapter_config.json.

    Args:
        path: The folder.
        model: Shapes of the tensors of the model that it adapts; {}: unknown.

    Raises:
        UserError: The folder has no plain LoRA adapter, or the adapter is of another model.
    """
    option = f"model.adapter={path}"
    folder = Path(path).expanduser()
    config = read_adapter_config(folder, option)
    for name, header in read_adapter_headers(folder, option).items():
        module_name = name.removeprefix(PREFIX).removesuffix(".weight")
        layer, _, side = module_name.rpartition(".")
        axis = SHARED_AXIS.get(side)
        layer_shape = model.get(f"{layer}.weight")
        if axis is not None and layer_shape and header.shape[axis] not in layer_shape:
            raise UserError(
                f"{option}: {name} has shape {header.shape}, "
                f"but {layer} {[*layer_shape]} in model.path."
            )
    return config


def read_adapter_config(folder: Path, option: str) -> dict[str, Any]:
    """Return the adapter_config.json of an adapter folder; `option` names the folder in errors.

    Raises:
        UserError: It is not that of a plain LoRA adapter.
    """
    config = read_json(folder, "adapter_config.json")
    if config.get("peft_type") != "LORA":
        raise UserError(
            f"{option} is no LoRA adapter that peft wrote. "
            "Name a folder with adapter_config.json and adapter_model.safetensors."
        )
    for name, kind in ("r", int), ("lora_alpha", int | float):
        value: Any = config.get(name)
        if not isinstance(value, kind) or value <= 0:
            raise UserError(f"{option} has {name}={value!r}. It must be a positive number.")
    unsupported = _unsupported_fields(config)
    if unsupported:
        first = min(unsupported)
        raise UserError(
            f"{option} has {first}={config[first]}. "
            "Only plain LoRA is supported: merge this adapter into a model folder."
        )
    return config


def read_adapter_headers(folder: Path, option: str) -> dict[str, Header]:
    """Return the header of each tensor of an adapter folder; `option` names the folder in errors.

    Raises:
        UserError: It has no tensors.
    """
    try:
        headers = read_headers(folder)
    except RoleError as error:
        raise UserError(f"{option}: {error}") from error
    if not headers:
        raise UserError(f"{option} has no adapter_model.safetensors. Save the adapter with peft.")
    return headers


def _unsupported_fields(config: dict[str, Any]) -> list[str]:
    """Return the fields of an adapter_config.json that ask for more than plain LoRA."""
    if config.get("init_lora_weights", True) not in UNCHANGED_BASE:
        return ["init_lora_weights"]
    return [name for name in config.keys() - KNOWN if config[name] not in OFF]
