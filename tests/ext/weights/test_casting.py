"""A model computes in another dtype, and keeps its own weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from arealite.ext.weights.casting import computing_in
from tests.models import tiny_model

IDS = torch.arange(3, 20)[None]


def load(folder: Path, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def places(model: Any) -> dict[str, tuple[torch.dtype, int]]:
    """Return where the model keeps its tensors, buffers of no file included."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: (tensor.dtype, tensor.data_ptr()) for name, tensor in tensors}


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_equal_those_of_a_model_that_is_loaded_in_the_dtype(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    model = load(tiny_model(tmp_path, init_std=0.2), torch.float32)
    wanted = load(tmp_path, dtype)(IDS).logits
    before = places(model)
    with computing_in(model, dtype):
        assert torch.equal(model(IDS).logits, wanted)
    assert places(model) == before
    assert model(IDS).logits.dtype == torch.float32


@torch.inference_mode()
def test_weights_in_16_bits_compute_in_float32(tmp_path: Path) -> None:
    model = load(tiny_model(tmp_path, init_std=0.2), torch.bfloat16)
    wanted = load(tmp_path, torch.bfloat16).float()(IDS).logits
    with computing_in(model, torch.float32):
        assert torch.equal(model(IDS).logits, wanted)
    assert model(IDS).logits.dtype == torch.bfloat16


@torch.inference_mode()
def test_one_layer_is_cast_at_a_time(tmp_path: Path) -> None:
    model = load(tiny_model(tmp_path), torch.float32)
    layers = model.model.layers
    cast_layers = list[list[int]]()

    def note(*_: Any) -> None:
        dtypes = [next(layer.parameters()).dtype for layer in layers]
        cast_layers.append([i for i, each in enumerate(dtypes) if each == torch.bfloat16])

    for layer in layers:
        layer.mlp.register_forward_hook(note)
    with computing_in(model, torch.bfloat16):
        model(IDS)
    assert cast_layers == [[i] for i in range(len(layers))]


@torch.inference_mode()
def test_failed_pass_leaves_the_weights_as_they_were(tmp_path: Path) -> None:
    model = load(tiny_model(tmp_path), torch.float32)
    before = places(model)

    def fail(*_: Any) -> None:
        raise RuntimeError("planted")

    hook = model.model.layers[1].mlp.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="planted"), computing_in(model, torch.bfloat16):
        model(IDS)
    hook.remove()
    assert places(model) == before
    assert not model.model.layers[1]._forward_pre_hooks
