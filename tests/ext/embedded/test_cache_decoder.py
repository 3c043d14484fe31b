"""Compare every decoder with plain forward passes, and check which one a model gets."""

from __future__ import annotations

import re
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from transformers import AutoModelForCausalLM

from arealite.base.errors import UserError
from arealite.ext.embedded import cache_decoder
from arealite.ext.embedded.cache_decoder import CacheDecoder, PlainDecoder, make_decoder
from arealite.ext.embedded.decoder import Decoder
from arealite.ext.embedded.generation import Generation, SamplingParams
from arealite.ext.embedded.weight_loading import load_model
from tests.models import MIXTURES, tiny_model

WINDOW: dict[str, Any] = {"sliding_window": 8}
MIXED = WINDOW | {"layer_types": ["full_attention", "sliding_attention"]}
GEMMA = MIXED | {"head_dim": 8}
LINEAR = {name: value for name, value in MIXTURES["qwen3_next"].items() if "expert" not in name}
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
SHARED_KV: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 8,
}
FAST: dict[str, dict[str, Any]] = {
    "mistral": WINDOW,
    "ministral": GEMMA,
    "gemma2": GEMMA | {"query_pre_attn_scalar": 8},
    "gemma3_text": GEMMA,
    "gemma4_text": GEMMA | SHARED_KV | {"global_head_dim": 16},
    "cohere2": MIXED,
    "exaone4": GEMMA,
    "gpt_oss": GEMMA | {"num_local_experts": 4},
    "deepseek_v3": MIXTURES["deepseek_v3"],
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2},
}
CACHED: dict[str, dict[str, Any]] = {
    "qwen3_next": MIXTURES["qwen3_next"],
    "qwen3_5_text": LINEAR,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "granitemoehybrid": MAMBA
    | {
        "num_local_experts": 4,
        "shared_intermediate_size": 32,
        "layer_types": ["mamba", "attention"],
    },
    "falcon_h1": MAMBA | {"mamba_d_ssm": 64, "head_dim": 8},
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "mamba2": {
        "state_size": 8,
        "num_heads": 4,
        "head_dim": 16,
        "n_groups": 1,
        "chunk_size": 8,
    },
    "llama4_text": {
        "head_dim": 8,
        "num_local_experts": 4,
        "intermediate_size_mlp": 64,
        "attention_chunk_size": 8,
        "num_hidden_layers": 4,
        "no_rope_layers": [1, 1, 1, 0],
    },
    "bloom": {"n_head": 4},
    "gpt_neo": {
        "attention_types": [[["global", "local"], 1]],
        "num_layers": 2,
        "num_heads": 4,
        "window_size": 4,
    },
}
PLAIN: dict[str, dict[str, Any]] = {
    "zamba2": {
        "num_hidden_layers": 2,
        "layers_block_type": ["mamba", "hybrid"],
        "mamba_d_state": 8,
        "n_mamba_heads": 4,
        "mamba_ngroups": 1,
        "chunk_size": 8,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_mem_blocks": 1,
    },
    "rwkv": {"attention_hidden_size": 32, "context_length": 512},
}
CASES = [
    *((Decoder, family, options) for family, options in FAST.items()),
    *((CacheDecoder, family, options) for family, options in CACHED.items()),
    *((PlainDecoder, family, options) for family, options in PLAIN.items()),
]


def family_model(
    folder: Path, family: str, options: dict[str, Any], *, dtype: str = "float32", **more: Any
) -> Any:
    settings = {"family": family, "tie_word_embeddings": False} | options | more
    return load_model(str(tiny_model(folder, **settings)), dtype=dtype, device="cpu")[0]


def request(prompt: list[int], limit: int) -> Generation:
    return Generation(
        rid="", prompt=prompt, sampling=SamplingParams(), limit=limit, stops=frozenset()
    )


def requests(seed: int = 0) -> list[Generation]:
    """Prompts shorter and longer than the windows; equal prompts, and others of equal length."""
    draws = torch.Generator().manual_seed(seed)

    def prompt(length: int) -> list[int]:
        return torch.randint(3, 64, (length,), generator=draws).tolist()

    same = prompt(5)
    wanted = [same, same, prompt(5), same, prompt(14), prompt(1), prompt(14), prompt(9)]
    return [request(each, 12 - row) for row, each in enumerate(wanted)]


@torch.inference_mode()
def run(decoder: Any, waiting: deque[Generation], *, steps: int = 10**6) -> None:
    while (waiting or decoder.running) and steps:
        if waiting and len(decoder.running) < decoder.max_rows:
            decoder.prefill(waiting)
            decoder.remove_ended()
        if decoder.running:
            decoder.decode()
            decoder.remove_ended()
        steps -= 1


@torch.inference_mode()
def check(model: Any, generation: Generation, start: int = 0, end: int | None = None) -> None:
    """Compare log-probabilities of the tokens `start` to `end` with a plain forward pass."""
    ids = torch.tensor([generation.prompt + generation.output])
    plain = model(ids, use_cache=False).logits[0, len(generation.prompt) - 1 : -1]
    plain = plain.double().log_softmax(-1)[torch.arange(len(generation.output)), generation.output]
    actual = torch.tensor(generation.logprobs).double()
    torch.testing.assert_close(actual[start:end], plain[start:end], atol=5e-5, rtol=0)


@pytest.mark.parametrize(("kind", "family", "options"), CASES, ids=[case[1] for case in CASES])
def test_model_gets_the_fastest_decoder_that_equals_eager_attention(
    kind: type, family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    model = family_model(tmp_path, family, options)
    decoder = make_decoder(model, max_rows=5, seed=1)
    assert type(decoder) is kind
    wanted = requests()
    run(decoder, deque(wanted))
    eager = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for generation in wanted:
        assert len(generation.output) == generation.limit
        check(eager, generation)


def test_cache_decoder_computes_equal_prompts_once_and_equal_lengths_together(
    tmp_path: Path, monkeypatch: Any
) -> None:
    model = family_model(tmp_path, "lfm2", CACHED["lfm2"])
    decoder, sizes = CacheDecoder(model, max_rows=8, seed=0), list[tuple[int, ...]]()
    forward = CacheDecoder._forward

    def counted(self: CacheDecoder, tokens: torch.Tensor, *args: Any) -> Any:
        sizes.append(tuple(tokens.shape))
        return forward(self, tokens, *args)

    monkeypatch.setattr(CacheDecoder, "_forward", counted)
    waiting = deque(requests()[:4])
    run(decoder, waiting, steps=1)
    assert sizes == [(2, 5), (4, 1)]
    assert len({tuple(each.output) for each in decoder.running}) == 4


@pytest.mark.parametrize("family", ["qwen3_5_text", "granitemoehybrid", "gemma3_text"])
@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_weight_update_during_a_pause_changes_the_next_tokens(
    family: str, mode: str, tmp_path: Path
) -> None:
    options = (CACHED | FAST)[family]
    model = family_model(tmp_path / "old", family, options)
    new = family_model(tmp_path / "new", family, options, seed=1).state_dict()
    decoder, wanted = make_decoder(model, max_rows=8, seed=0), requests()
    waiting = deque(wanted)
    run(decoder, waiting, steps=4)
    for generation in wanted:
        check(model, generation)
    tokens = [len(generation.output) for generation in wanted]
    if mode == "retract":
        waiting.extendleft(decoder.clear())
    model.load_state_dict(new)
    run(decoder, waiting)
    for generation, start in zip(wanted, tokens, strict=True):
        if mode == "retract":
            check(model, generation, start)
        elif 0 < start < generation.limit:  # from keys and values of the old weights
            with pytest.raises(AssertionError, match="not close"):
                check(model, generation, start)


def test_probe_restores_the_window_and_logs_the_reason_for_the_decoder(tmp_path: Path) -> None:
    model = family_model(tmp_path, "mistral", WINDOW)
    with capture_logs() as events:
        make_decoder(model, max_rows=1, seed=0)
    assert model.config.sliding_window == 8
    assert [each["why"] for each in events] == ["the fastest"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decoder_that_ignores_the_window_is_not_used(
    dtype: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """The model's window is longer than the rows of the probe."""
    options = GEMMA | {"sliding_window": 256}
    folder = tiny_model(tmp_path, family="gemma3_text", **options)
    model = load_model(str(folder), dtype=dtype, device="cpu")[0]
    assert type(make_decoder(model, max_rows=1, seed=0)) is Decoder
    monkeypatch.setattr("arealite.ext.embedded.decoder.window_of", lambda model: None)
    assert type(make_decoder(model, max_rows=1, seed=0)) is CacheDecoder


class LateDecoder(Decoder):
    """Positions of generated tokens are one too large."""

    def decode(self) -> None:
        forward = self.model.forward

        def late(*args: Any, position_ids: torch.Tensor, **inputs: Any) -> Any:
            return forward(*args, position_ids=position_ids + 1, **inputs)

        self.model.forward = late  # type: ignore[method-assign]
        try:
            super().decode()
        finally:
            del self.model.forward


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_decoder_with_wrong_positions_is_not_used(
    dtype: str, tmp_path: Path, monkeypatch: Any
) -> None:
    model = family_model(tmp_path, "mistral", {}, dtype=dtype, init_std=0.2)
    monkeypatch.setattr(cache_decoder, "Decoder", LateDecoder)
    with capture_logs() as events:
        assert type(make_decoder(model, max_rows=1, seed=0)) is CacheDecoder
    assert re.search(rf"differ by \S+ .* \(\S+ is allowed in {dtype}\)", events[0]["why"])


class EagerDecoder(Decoder):
    """Right, with another arithmetic than plain passes: they differ by rounding."""

    def prefill(self, waiting: deque[Generation]) -> None:
        self.model.set_attn_implementation("eager")
        super().prefill(waiting)
        self.model.set_attn_implementation("sdpa")

    def decode(self) -> None:
        self.model.set_attn_implementation("eager")
        super().decode()
        self.model.set_attn_implementation("sdpa")


def test_right_decoder_of_a_noisy_model_is_used_in_bfloat16(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """Rounding changes the usual log-probability by more than 0.05 nats, a former constant."""
    options = {"num_hidden_layers": 8}
    model = family_model(tmp_path, "mistral", options, dtype="bfloat16", init_std=0.5)
    monkeypatch.setattr(cache_decoder, "Decoder", EagerDecoder)
    with capture_logs() as events:
        assert type(make_decoder(model, max_rows=1, seed=0)) is EagerDecoder
    assert 0.05 < events[0]["off"] < events[0]["bound"]


@pytest.mark.parametrize(("kind", "family", "options"), CASES, ids=[case[1] for case in CASES])
def test_model_gets_the_same_decoder_in_bfloat16(
    kind: type, family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """The measurement of the noise leaves every weight as it was."""
    model = family_model(tmp_path, family, options, dtype="bfloat16", init_std=0.1)
    before = {name: (each.dtype, each.data_ptr()) for name, each in model.state_dict().items()}
    assert type(make_decoder(model, max_rows=1, seed=0)) is kind
    assert before == {n: (each.dtype, each.data_ptr()) for n, each in model.state_dict().items()}


def test_model_that_reads_later_tokens_is_refused(tmp_path: Path) -> None:
    model = family_model(tmp_path, "bert", {"num_key_value_heads": 4})
    with pytest.raises(UserError, match=r"BertLMHeadModel: .*differ by .*sglang"):
        make_decoder(model, max_rows=1, seed=0)


def test_weight_that_is_not_finite_is_named(tmp_path: Path) -> None:
    model = family_model(tmp_path, "mistral", {})
    model.model.layers[1].mlp.up_proj.weight[0, 0] = torch.nan
    named = f"model.path={tmp_path}.*: 'model.layers.1.mlp.up_proj.weight' has NaN or infinity"
    with pytest.raises(UserError, match=named):
        make_decoder(model, max_rows=1, seed=0)
