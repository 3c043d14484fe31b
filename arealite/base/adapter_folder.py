"""Read and check a LoRA adapter that peft wrote, without torch and peft."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from arealite.base.errors import RoleError, UserError
from arealite.base.model_folder import Shapes, read_json, read_shapes

PREFIX = "base_model.model."
"""Begins the names of tensors in a folder of peft."""
KNOWN = {
    *("r", "lora_alpha", "target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"),
    *("layers_to_transform", "layers_pattern", "use_rslora", "fan_in_fan_out", "task_type"),
    *("base_model_name_or_path", "revision", "peft_type", "peft_version", "auto_mapping"),
    *("init_lora_weights", "inference_mode", "lora_dropout", "runtime_config"),
    *("loftq_config", "megatron_core", "qalora_group_size"),
}
"""Fields of adapter_config.json that the engine honours, or that have no effect on a trained
adapter. Any other field must be off."""

NOT_ADAPTED = re.compile(r"embed|lm_head|wte|wpe|score|\.experts\.|vision|visual|audio")
"""Matches matrices that get no adapter: embeddings, heads, experts, parts for images and audio."""
EXPERTS = {"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
"""Names of linear layers that peft takes for experts, in a model that has experts."""
UNCHANGED_BASE = True, False, "gaussian", "orthogonal", "eva"
"""Values of init_lora_weights under which the base model kept its weights."""


def adapted(model: Shapes, targets: Sequence[str]) -> dict[str, bool]:
    """Return the linear layers of a model folder, and whether they get an adapter."""
    matrices = [name.removesuffix(".weight") for name, shape in model.items() if len(shape) == 2]
    linear = [name for name in matrices if not NOT_ADAPTED.search(name)]
    leaves = {name: name.rpartition(".")[2] for name in linear}
    if [*targets] == ["all-linear"]:
        has_experts = any(".experts." in name for name in model)
        targets = [*{*leaves.values()} - (EXPERTS if has_experts else set[str]())]
    return {name: leaf in targets for name, leaf in leaves.items()}


def counted(names: Iterable[str]) -> str:
    """Return names and how often each occurs, as in `q_proj ×28, v_proj ×28`."""
    return ", ".join(f"{name} ×{count}" for name, count in Counter(names).items())


def read_adapter(path: str, model: Shapes, key: str = "model.adapter") -> dict[str, Any]:
    """Check the adapter folder that option `key` names; return its adapter_config.json.

    Args:
        path: The folder.
        model: Shapes of the tensors of the model that it adapts; {}: unknown.

    Raises:
        UserError: The folder has no plain LoRA adapter, or the adapter is of another model.
    """
    folder = Path(path).expanduser()
    config = read_json(folder, "adapter_config.json")
    what = f"{key}={path}"
    if config.get("peft_type") != "LORA":
        fix = "Name a folder with adapter_config.json and adapter_model.safetensors."
        raise UserError(f"{what} is no LoRA adapter that peft wrote. {fix}")
    for name, kind in ("r", int), ("lora_alpha", int | float):
        value: Any = config.get(name)
        if not isinstance(value, kind) or value <= 0:
            raise UserError(f"{what} has {name}={value!r}. It must be a positive number.")
    odd = [
        name for name in config.keys() - KNOWN if config[name] not in (None, False, {}, [], "none")
    ]
    if config.get("init_lora_weights", True) not in UNCHANGED_BASE:
        odd = ["init_lora_weights"]
    if odd:
        fix = "Only plain LoRA is supported: merge this adapter into a model folder."
        raise UserError(f"{what} has {min(odd)}={config[min(odd)]}. {fix}")
    try:
        shapes = read_shapes(folder)
    except RoleError as error:
        raise UserError(f"{what}: {error}") from error
    if not shapes:
        raise UserError(f"{what} has no adapter_model.safetensors. Save the adapter with peft.")
    for name, shape in shapes.items():
        layer, _, side = name.removeprefix(PREFIX).removesuffix(".weight").rpartition(".")
        axis = {"lora_A": 1, "lora_B": 0}.get(side)
        known = model.get(f"{layer}.weight")
        if axis is not None and known and shape[axis] not in known:
            what = f"{what}: {name} has shape {shape}"
            raise UserError(f"{what}, but {layer} {[*known]} in model.path.")
    return config
