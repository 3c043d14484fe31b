"""Random Hugging Face folders in which no tensor is at its initial value."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.utils import logging

from tests.families.configs import COMMON
from tests.models import tiny_tokenizer

STEP = "dt_bias", "A_log", "dt_proj.bias"
"""Ends of the names of tensors that set the step of a state-space layer."""
TABLES = "slope_rate", "query_decay", "key_decay", "diagonal_decay"
"""Ends of the names of buffers that a model computes from its config; MiniMax's hold its mask."""


def build(name: str, settings: dict[str, Any], *, seed: int = 0) -> Any:
    """Return a random float32 model of the family before the comma in `name`.

    `settings` that have a `text_config` are of a model that also reads images, as on the hub.
    """
    logging.disable_progress_bar()
    config = CONFIG_MAPPING[name.partition(",")[0]](**COMMON | settings)
    kind = AutoModelForImageTextToText if "text_config" in settings else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        model = kind.from_config(config, dtype=torch.float32).eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for key, tensor in model.state_dict().items():
                if tensor.is_floating_point() and not key.endswith(TABLES):
                    tensor.copy_(_draw(key, tensor, generator))
    return model


def _draw(key: str, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(tensor.shape, generator=generator)
    if key.endswith(STEP):
        return 0.5 * noise
    if tensor.dim() > 1:
        return 0.2 * noise
    if key.endswith("bias"):
        return 0.3 * noise
    return 1.0 + 0.3 * noise  # the scale of a norm


def write(model: Any, path: Path, *, original: bool = True) -> Path:
    """Write a model and a tokenizer; `original`: with the names of tensors of the hub."""
    model.save_pretrained(path, save_original_format=original)
    tiny_tokenizer(64).save_pretrained(path)
    return path
