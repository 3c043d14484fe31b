"""The random models of `arealite check --machine`."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from arealite.cli.machine.bench import Bench
from arealite.impl.demo.tiny_model import TinyModel, make_tiny_model

LARGE_GPU = 40 << 30
"""Bytes of a GPU that trains the largest model."""


def make_models(bench: Bench) -> None:
    """Write `dense`, `window` (every other layer has a window), and `large` for measurements.

    Weights have a scale at which attention is not uniform, so that a wrong mask is seen. No token
    ends an answer: a generation has exactly the length that is requested.
    """
    logging.disable_progress_bar()
    hidden, layers = (64, 2) if bench.quick else (256, 4)
    scale = 1.2 / hidden**0.5
    shape = TinyModel(
        hidden=hidden, layers=layers, heads=4, kv_heads=2, context=4096, init_std=scale
    )
    kinds = ["sliding_attention" if layer % 2 == 0 else "full_attention" for layer in range(layers)]
    window = {"use_sliding_window": True, "sliding_window": 8, "layer_types": kinds}
    for name, changes in {"dense": {}, "window": window}.items():
        folder = make_tiny_model(bench.folder / name, shape)
        _edit(folder / "config.json", **changes)
        for file in ("config.json", "generation_config.json"):
            _edit(folder / file, eos_token_id=None)
        _edit(folder / "tokenizer_config.json", eos_token=None)
    hidden, layers, vocabulary = (256, 4, 4000) if bench.quick else (512, 8, 8000)
    if bench.device.type == "cuda" and not bench.quick:
        memory = torch.cuda.get_device_properties(bench.device).total_memory
        hidden, layers, vocabulary = 1024 << (memory > LARGE_GPU), 16, 32_000
    heads = hidden // 64
    sizes = {"hidden": hidden, "layers": layers, "vocab_size": vocabulary}
    large = TinyModel(heads=heads, kv_heads=max(1, heads // 4), context=4096, **sizes)
    make_tiny_model(bench.folder / "large", large)


def _edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
