"""Read a Hugging Face folder into a sharded model.

Here so that no rank ever holds more than one full parameter beside its shards (models whose files
name parameters differently than their modules, such as some mixtures of experts, are read whole,
one copy a rank).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from arealite.api.engine import Head
from arealite.base.errors import UserError

LOGIT_CHANGES = "final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier"
"""Config fields by which some models (Gemma, Cohere, Granite, Falcon-H1, …) change their logits."""

SCORE = "score.weight"
"""The head for values."""


def empty_model(path: Path, head: Head = "lm") -> Any:
    """Build the model of a Hugging Face folder, parameters on the meta device, in eval mode.

    Head value: the folder's decoder as a sequence classifier of one label.

    Raises:
        UserError: no such folder, or a head whose logits are more than hidden · weightᵀ.
    """
    if not (path / "config.json").is_file():
        raise UserError(f"No model at '{path}': it must be a Hugging Face folder with config.json.")
    config = AutoConfig.from_pretrained(path)
    if head == "value":
        config.num_labels = 1
        if type(config) not in AutoModelForSequenceClassification._model_mapping:
            raise UserError(f"transformers has no {config.model_type} with a head for values.")
        with _parameters_on_meta():
            return AutoModelForSequenceClassification.from_config(
                config, dtype=torch.float32
            ).eval()
    for name in LOGIT_CHANGES:
        if (value := getattr(config.get_text_config(), name, None)) not in (None, 0, 1):
            raise UserError(f"'{path}' changes its logits ({name}={value}): not supported.")
    with _parameters_on_meta():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise UserError(f"'{path}' has a bias in its output head: not supported.")
    return model.eval()


def load_weights(model: Any, path: Path, device: torch.device) -> None:
    """Materialise the sharded `model` on `device` and fill it from the folder's safetensors.

    A head for values that the folder does not have begins as zeros.
    """
    read = _reader(path, {name for name, _ in model.named_parameters()})
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device=device)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
        for name, param in model.named_parameters():
            if (full := read(name)) is None:
                param.zero_()
                continue
            full = full.to(device=device, dtype=param.dtype)
            # src_data_rank=None: every rank cuts its own shard, nothing is sent.
            mesh, placements = param.device_mesh, param.placements
            param.copy_(distribute_tensor(full, mesh, placements, src_data_rank=None))


def _reader(path: Path, names: set[str]) -> Callable[[str], torch.Tensor | None]:
    """Return a function that reads one full parameter, if need be through the whole model."""
    files = [safe_open(file, framework="pt") for file in sorted(path.glob("*.safetensors"))]
    where = {name: file for file in files for name in file.keys()}  # noqa: SIM118
    if names - {SCORE} <= where.keys():
        return lambda name: where[name].get_tensor(name) if name in where else None
    state = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
    return state.get


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Put new parameters on the meta device; buffers, which no file holds, are still computed."""
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
