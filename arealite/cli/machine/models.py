"""The random models of `arealite check --machine`."""

import json

import torch

from arealite.cli.machine.bench import Bench
from arealite.impl.demo.tiny_model import TinyModel, make_tiny_model

LARGE_GPU = 40 << 30
"""Bytes of a GPU that trains the largest model."""


def make_models(bench: Bench) -> None:
    """Write `dense`, `window` (a layer with a sliding window) and `large` for measurements.

    Weights have a scale at which attention is not uniform, so that a wrong mask is seen.
    """
    hidden, layers = (64, 2) if bench.quick else (256, 4)
    shape = TinyModel(
        hidden=hidden, layers=layers, heads=4, kv_heads=2, context=4096, init_std=1.2 / hidden**0.5
    )
    for name in ("dense", "window"):
        make_tiny_model(bench.folder / name, shape)
    file = bench.folder / "window" / "config.json"
    kinds = ["sliding_attention" if layer % 2 == 0 else "full_attention" for layer in range(layers)]
    window = {"use_sliding_window": True, "sliding_window": 8, "layer_types": kinds}
    file.write_text(json.dumps(json.loads(file.read_text()) | window))
    hidden, layers, vocabulary = (128, 2, 1000) if bench.quick else (512, 6, 8000)
    if bench.device.type == "cuda" and not bench.quick:
        memory = torch.cuda.get_device_properties(bench.device).total_memory
        hidden, layers, vocabulary = 1024 << (memory > LARGE_GPU), 16, 32_000
    heads = hidden // 64
    large = TinyModel(
        hidden=hidden, layers=layers, heads=heads, kv_heads=max(1, heads // 4),
        vocab_size=vocabulary, context=4096,
    )  # fmt: skip
    make_tiny_model(bench.folder / "large", large)
