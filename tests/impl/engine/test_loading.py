"""All tensors of a model folder are trained, exported and streamed; others are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma2PreTrainedModel

from arealite.api.engine import Sequence
from arealite.api.engine_config import LoRAConfig
from arealite.base.errors import UserError
from arealite.base.model_folder import ModelTensors, read_shapes
from arealite.ext.embedded.decoder import Decoder
from arealite.ext.embedded.weight_loading import ServedWeights, load_model, stage_weights
from tests.ext.embedded.test_decoder import check_logprobs as check_generated
from tests.ext.embedded.test_decoder import make_generation, prompts
from tests.impl.engine.helpers import LOSS, make_engine, make_rows, weights
from tests.impl.engine.test_fsdp_one_rank import plain
from tests.impl.engine.test_fsdp_ranks import launch, results
from tests.impl.engine.worker import UNEVEN
from tests.models import tiny_mixture, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.usefixtures("group")

BIASED = ("deepseek_v3", "glm4_moe")
"""Families whose routers add a persistent buffer, `e_score_correction_bias`."""
BIAS = "e_score_correction_bias"
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
Tensors = dict[str, torch.Tensor]


def check_logprobs(path: Path, rows: list[Sequence], logprobs: list[np.ndarray]) -> None:
    """Compare with plain transformers."""
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for row, logprob in zip(rows, logprobs, strict=True):
        with torch.no_grad():
            expected = plain(reference, row)[0]
        np.testing.assert_allclose(logprob[row.loss_mask], expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("family", BIASED)
def test_persistent_buffers_are_loaded_exported_and_streamed(family: str, tmp_path: Path) -> None:
    path, rows = tiny_mixture(tmp_path / "model", family), make_rows()
    engine = make_engine(path)
    check_logprobs(path, rows, engine.forward(rows)["logprobs"])
    engine.train_batch(rows, LOSS)
    engine.export(tmp_path / "export")
    streamed, files = weights(engine), load_file(tmp_path / "export" / "model.safetensors")
    given = load_file(path / "model.safetensors")
    biases = [name for name in given if name.endswith(BIAS)]
    assert biases and all(given[name].abs().max() > 0.1 for name in biases)
    assert all(torch.equal(streamed[name], given[name]) for name in biases)
    assert streamed.keys() == files.keys()
    assert all(torch.equal(files[name], tensor) for name, tensor in streamed.items())
    again = make_engine(tmp_path / "export")
    assert again.fingerprint() == engine.fingerprint()
    check_logprobs(tmp_path / "export", rows, engine.forward(rows)["logprobs"])


def test_exported_buffers_keep_their_dtype(tmp_path: Path) -> None:
    path = tiny_mixture(tmp_path / "model", "deepseek_v3")
    streamed = weights(make_engine(path, dtype="bfloat16"))
    dtypes = {name.endswith(BIAS): tensor.dtype for name, tensor in streamed.items()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}


@pytest.mark.processes
@pytest.mark.parametrize("family", BIASED)
def test_two_ranks_load_stream_export_and_save_buffers(family: str, tmp_path: Path) -> None:
    path, rows = tiny_mixture(tmp_path / "model", family), make_rows()
    assert launch("buffers", tmp_path, path, 2) == [0, 0]
    outs, given = results(tmp_path), load_file(path / "model.safetensors")
    for kind in ("shards-0", "shards-1"):
        found: list[dict[str, Any]] = [out[kind] for out in outs]
        for part, indices in zip(found, UNEVEN, strict=True):
            mine = [rows[i] for i in indices]
            check_logprobs(path, mine, part["forward"]["logprobs"])
            assert part["again"] and part["resumed"]
        for when in ("weights", "trained"):
            biases = {n: t for n, t in found[0][when].items() if n.endswith(BIAS)}
            assert biases and all(torch.equal(given[name], t) for name, t in biases.items())
        exported = load_file(tmp_path / kind / "export" / "model.safetensors")
        assert exported.keys() == found[0]["trained"].keys()


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not:RuntimeWarning")
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next", "deepseek_v3"])
def test_lora_on_fused_experts_is_refused(family: str, tmp_path: Path) -> None:
    path = tiny_mixture(tmp_path, family)
    with pytest.raises(UserError, match=r"mlp\.experts' holds all its experts in one parameter"):
        make_engine(path, lora=LoRAConfig(rank=4))


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
def test_lora_on_attention_with_fused_experts_starts_as_the_base_model(
    family: str, tmp_path: Path
) -> None:
    path, rows = tiny_mixture(tmp_path, family), make_rows()
    engine = make_engine(path, lora=LoRAConfig(rank=4, targets=ATTENTION))
    check_logprobs(path, rows, engine.forward(rows)["logprobs"])


def lose(tensors: Tensors) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight"]


def gain(tensors: Tensors) -> None:
    tensors["model.layers.1.mlp.up_proj.bias"] = torch.ones(64)


def cut(tensors: Tensors) -> None:
    tensors["model.norm.weight"] = torch.ones(1)


SPOILED = {
    lose: r"lacks model\.layers\.1\.mlp\.up_proj\.weight \(1 in all\)",
    gain: r"has tensors that the model lacks: model\.layers\.1\.mlp\.up_proj\.bias",
    cut: r"model\.norm\.weight has shape \[1\], the model of its config.json \[32\]",
}


@pytest.mark.parametrize("spoil", SPOILED)
def test_model_folder_with_other_tensors_is_refused(
    spoil: Callable[[Tensors], None], tmp_path: Path
) -> None:
    path = tiny_model(tmp_path)
    tensors = load_file(path / "model.safetensors")
    spoil(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    for lora in (LoRAConfig(), LoRAConfig(rank=2)):
        with pytest.raises(UserError, match=SPOILED[spoil]):
            make_engine(path, lora=lora)


def test_model_folder_without_an_expert_is_refused(tmp_path: Path) -> None:
    path = tiny_mixture(tmp_path, "qwen3_moe")
    tensors = load_file(path / "model.safetensors")
    for projection in ("gate_proj", "up_proj", "down_proj"):
        for expert in range(4):
            del tensors[f"model.layers.1.mlp.experts.{expert}.{projection}.weight"]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"lacks model\.layers\.1\.mlp\.experts"):
        make_engine(path)


def test_unused_tensors_of_a_model_folder_are_ignored(tmp_path: Path) -> None:
    path, rows = tiny_model(tmp_path / "model"), make_rows()
    expected = make_engine(path).forward(rows)["logprobs"]
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    got = make_engine(path).forward(rows)["logprobs"]
    assert all(np.array_equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_model_with_fused_experts_can_be_published(family: str, tmp_path: Path) -> None:
    path, rows = tiny_mixture(tmp_path / "model", family), make_rows()
    original = AutoModelForCausalLM.from_pretrained(path)
    original.save_pretrained(tmp_path / "fused", save_original_format=False)
    engine = make_engine(tmp_path / "fused")
    sent = {name: list(tensor.shape) for name, tensor in weights(engine).items()}
    fused = ModelTensors(shapes=read_shapes(tmp_path / "fused"), owner="the folder")
    assert fused.difference(sent) == ""
    check_logprobs(path, rows, engine.forward(rows)["logprobs"])
    tiny_tokenizer().save_pretrained(tmp_path / "fused")
    served = load_model(str(tmp_path / "fused"), dtype="float32", device="cpu")[0]
    engine.train_batch(rows, LOSS)
    engine.export(tmp_path / "export")
    stage_weights(ServedWeights(served, tmp_path / "fused"), str(tmp_path / "export"))()
    held = served.state_dict()
    assert all(torch.equal(held[name], tensor) for name, tensor in weights(engine).items())


def test_export_keeps_layers_that_predict_further_tokens(tmp_path: Path) -> None:
    """DeepSeek's folders have such layers, which transformers ignores."""
    path = tiny_mixture(tmp_path / "model", "deepseek_v3", num_nextn_predict_layers=2)
    tensors = load_file(path / "model.safetensors")
    extra = {f"model.layers.{n}.embed_tokens.weight": torch.ones(64, 32) for n in (2, 3)}
    save_file(tensors | extra, path / "model.safetensors", {"format": "pt"})
    engine = make_engine(path)
    engine.export(tmp_path / "export")
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert engine.unused_tensors == extra.keys()
    assert exported.keys() == tensors.keys() | extra.keys()
    assert make_engine(tmp_path / "export").fingerprint() == engine.fingerprint()
    sent = {name: list(tensor.shape) for name, tensor in engine.stream_weights()}
    source = ModelTensors(
        shapes=read_shapes(path), owner="the folder", unused=engine.unused_tensors
    )
    assert source.difference(sent) == ""
    served = ServedWeights(load_model(str(path), dtype="float32", device="cpu")[0], path)
    for folder in (path, tmp_path / "export"):
        stage_weights(served, str(folder))()


def test_decoder_generates_from_an_engine_with_experts(tmp_path: Path) -> None:
    path = tiny_mixture(tmp_path, "deepseek_v3")
    decoder = Decoder(make_engine(path).module, max_rows=4, seed=0)
    generations = [make_generation(prompt, 8) for prompt in prompts(4)]
    decoder.run(generations)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for generation in generations:
        check_generated(reference, generation)


def test_capped_scores_are_not_left_to_sdpa(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers 5.17 selects SDPA for Gemma-2, and its SDPA ignores the cap."""
    path = tiny_model(tmp_path, family="gemma2", head_dim=8)
    monkeypatch.setattr(Gemma2PreTrainedModel, "_supports_sdpa", True)
    served, _ = load_model(str(path), dtype="float32", device="cpu")
    for model in make_engine(path, layout="padded").module, served:
        assert model.config._attn_implementation == "eager"
    other = make_engine(tiny_model(tmp_path / "other"), layout="padded").module
    assert other.config._attn_implementation == "sdpa"
