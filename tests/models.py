"""Tiny random models with a character tokenizer for tests, created in a fraction of a second.

`tiny_model(path, seed=0)` writes a Hugging Face folder: config, tokenizer, safetensors.
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

SPECIAL = ["<pad>", "<bos>", "<eos>"]
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEF +-*/=()<>,.:?!#\n"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
MIXTURES: dict[str, dict[str, Any]] = {
    "deepseek_v3": EXPERTS
    | {
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    },
    "glm4_moe": EXPERTS | {"head_dim": 8},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "head_dim": 8,
    },
    "qwen3_next": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
}
"""Configs of small mixtures of experts by family; their folders hold a tensor for each expert."""


def tiny_mixture(path: Path | str, family: str, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a random mixture of experts to `path` and return it; see `tiny_model`."""
    settings = MIXTURES[family] | {"tie_word_embeddings": False} | overrides
    return tiny_model(path, seed=seed, family=family, **settings)


def tiny_tokenizer(vocab: int = 64) -> Any:
    """Return a character tokenizer of exactly `vocab` ids; pad 0, bos 1, eos 2.

    A byte-level BPE without merges, in Qwen2's class: transformers reads every Qwen2 folder with
    that class, independent of its tokenizer_config.
    """
    from transformers import Qwen2Tokenizer

    written = {" ": "\u0120", "\n": "\u010a"}
    pieces = (SPECIAL + [written.get(letter, letter) for letter in CHARACTERS])[:vocab]
    pieces += [f"<extra_{i}>" for i in range(vocab - len(pieces))]
    tokenizer = Qwen2Tokenizer(
        vocab={piece: index for index, piece in enumerate(pieces)},
        merges=[],
        unk_token="<pad>",
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


_written: dict[str, dict[str, bytes]] = {}
"""The files of each model that this process has written, by name, by arguments of `tiny_model`."""


def tiny_model(path: Path | str, *, seed: int = 0, vocab: int = 64, **overrides: Any) -> Path:
    """Write a random model to `path` and return it.

    The default is a Qwen2 of 2 layers, hidden 32, fp32, context 512; `overrides` are fields of its
    config, and `family` is another model type, as in `family="llama"`. Persistent buffers are
    drawn, too. The same seed gives the same weights.
    """
    folder, arguments = Path(path), repr((seed, vocab, sorted(overrides.items())))
    if arguments not in _written:
        with tempfile.TemporaryDirectory() as made:
            _write_model(Path(made), seed=seed, vocab=vocab, **overrides)
            _written[arguments] = {file.name: file.read_bytes() for file in Path(made).iterdir()}
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in _written[arguments].items():
        (folder / name).write_bytes(content)
    return folder


def _write_model(folder: Path, *, seed: int, vocab: int, **overrides: Any) -> None:
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    family = overrides.pop("family", "qwen2")
    init_std = overrides.pop("init_std", 0.2)
    settings: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "initializer_range": init_std,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    } | overrides
    config = CONFIG_MAPPING[family](**settings)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        for name, tensor in model.state_dict().items():
            if name not in parameters:
                tensor.normal_()
    model.save_pretrained(folder)
    tiny_tokenizer(settings["vocab_size"]).save_pretrained(folder)
