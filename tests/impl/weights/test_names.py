"""Tensors of a folder and of a model are mapped both ways, and misfits are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from arealite.base.errors import InvariantError, UserError
from arealite.ext.weights.updatable_tensors import UpdatableTensors
from arealite.impl.engine.loading import empty_model
from arealite.impl.weights.tensor_names import TensorNames
from tests.families.configs import CONFIGS
from tests.families.folders import build, write
from tests.models import tiny_mixture, tiny_model

Tensors = dict[str, torch.Tensor]
RULES = (
    *("deepseek_v3", "ernie4_5_moe", "gpt_neox", "granitemoehybrid", "jamba", "kimi_linear"),
    *("lfm2_moe", "minimax_m2", "mixtral", "nemotron_h", "phimoe", "qwen3_5_moe_text"),
)
"""Families with different rules for their names, and the common one of Qwen3 in all the others."""


def names_of(path: Path) -> TensorNames:
    return TensorNames(empty_model(path), path)


def check_both_ways(path: Path) -> Tensors:
    """Load each tensor alone and map it back; return the tensors of the model."""
    names, files = names_of(path), load_file(path / "model.safetensors")
    state = {name: names.load(name) for name in names.loadable}
    back = dict(names.to_folder(state.items()))
    assert back.keys() == files.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in files.items())
    return state


@pytest.mark.parametrize("family", RULES)
def test_folder_is_mapped_to_the_model_of_transformers_and_back(
    family: str, tmp_path: Path
) -> None:
    model = build(family, CONFIGS[family])
    for is_original in (True, False):
        path = write(model, tmp_path / str(is_original), original=is_original)
        expected = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
        for name, tensor in check_both_ways(path).items():
            assert torch.equal(tensor, expected[name]), name


def change(path: Path, edit: Callable[[Tensors], Any]) -> None:
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


HRM: dict[str, Any] = {"head_dim": 8, "num_key_value_heads": 4}
"""A family whose folders join the projections of attention, which its model has apart."""


def test_one_tensor_of_the_folder_that_becomes_several_is_joined_again(tmp_path: Path) -> None:
    path = write(build("hrm_text", HRM), tmp_path)
    files = load_file(path / "model.safetensors")
    assert any(name.endswith("attn.gqkv_proj.weight") for name in files)
    check_both_ways(path)


@pytest.mark.parametrize("prefix", ["", "model.language_model."])
def test_folder_with_another_prefix_keeps_it(prefix: str, tmp_path: Path) -> None:
    """Folders of a base model lack `model.`; those of a model of images add to it."""
    family = "qwen3_5_moe_text" if prefix else "qwen3_moe"
    path = write(build(family, CONFIGS[family]), tmp_path)

    def rename(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith("model.")]:
            tensors[prefix + name.removeprefix("model.")] = tensors.pop(name)

    change(path, rename)
    assert any(
        name.startswith(f"{prefix}layers.0.mlp.experts.0") for name in names_of(path).headers
    )
    check_both_ways(path)


def test_parts_of_a_parameter_wait_for_each_other(tmp_path: Path) -> None:
    path = tiny_mixture(tmp_path, "qwen3_moe")
    names = UpdatableTensors(empty_model(path), path)
    files = load_file(path / "model.safetensors")
    expected, parts, got = check_both_ways(path), {}, Tensors()
    for name in sorted(files, reverse=True):
        got |= names.to_model([(name, files[name])], parts)
    assert not parts and got.keys() == expected.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
    *most, last = sorted(name for name in files if re.search(r"0\.mlp\.experts.*down", name))
    assert names.missing({*most}, whole=False) == [last]
    assert names.missing(files.keys() - {last}) == [last]
    assert not list(names.to_model(((name, files[name]) for name in most), parts))


def test_incomplete_stream_is_an_error(tmp_path: Path) -> None:
    names = names_of(write(build("hrm_text", HRM), tmp_path))
    name = next(name for name in names.loadable if name.endswith("self_attn.q_proj.weight"))
    with pytest.raises(InvariantError, match="without the rest of its group"):
        list(names.to_folder([(name, torch.zeros(32, 32))]))


def skip_an_expert(tensors: Tensors) -> None:
    for name in [name for name in tensors if ".1.mlp.experts.3." in name]:
        tensors[name.replace("experts.3.", "experts.4.")] = tensors.pop(name)


def lose_an_expert(tensors: Tensors) -> None:
    for name in [name for name in tensors if ".1.mlp.experts.3." in name]:
        del tensors[name]


def lose_a_gate(tensors: Tensors) -> None:
    del tensors["model.layers.1.mlp.experts.2.gate_proj.weight"]


def quantize(tensors: Tensors) -> None:
    name = "model.layers.1.mlp.experts.2.gate_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (skip_an_expert, r"experts\.0\.down_proj.weight, .* \(4 in all\) cannot be converted"),
        (lose_an_expert, r"has shape \[3, .*\], the model of its config\.json \[4, "),
        (lose_a_gate, r"experts\.0\.gate_proj\.weight, .* cannot be converted"),
        (quantize, r"dtype F8_E4M3 is quantized, which cannot be trained"),
    ],
)
def test_experts_that_do_not_fit_are_refused(
    spoil: Callable[[Tensors], None], says: str, tmp_path: Path
) -> None:
    path = tiny_mixture(tmp_path, "qwen3_moe")
    change(path, spoil)
    with pytest.raises(UserError, match=says):
        names_of(path)


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def set_tied(path: Path, value: bool) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": value}))


def load_all(path: Path) -> Iterable[str]:
    names = names_of(path)
    return [name for name in names.loadable if names.load(name) is not None]


def test_head_that_differs_from_the_tied_embedding_is_refused(tmp_path: Path) -> None:
    path = tiny_model(tmp_path, tie_word_embeddings=False)
    set_tied(path, True)
    with pytest.raises(UserError, match=r"config\.json ties .*lm_head\.weight, whose values"):
        load_all(path)


def test_tensors_for_images_are_refused_by_name(tmp_path: Path) -> None:
    path = tiny_model(tmp_path)
    change(path, lambda tensors: tensors.update({"model.vision_tower.a": torch.zeros(1)}))
    with pytest.raises(UserError, match=r"model\.vision_tower\.a .*Images are not supported"):
        names_of(path)


def test_untied_model_without_a_head_is_refused(tmp_path: Path) -> None:
    path = tiny_model(tmp_path)
    set_tied(path, False)
    with pytest.raises(UserError, match=r"lacks lm_head\.weight \(1 in all\)"):
        load_all(path)


@pytest.mark.parametrize("held", [(HEAD,), (HEAD, EMBEDDING)])
def test_tied_head_is_read_and_streamed_once(held: tuple[str, ...], tmp_path: Path) -> None:
    path = tiny_model(tmp_path)

    def rename(tensors: Tensors) -> None:
        embedding = tensors.pop(EMBEDDING)
        tensors |= {name: embedding.clone() for name in held}

    change(path, rename)
    names, files = names_of(path), load_file(path / "model.safetensors")
    assert torch.equal(names.load(EMBEDDING), files[held[0]])
    streamed = dict(names.to_folder([(EMBEDDING, files[held[0]])]))
    assert streamed.keys() == {held[-1]}
