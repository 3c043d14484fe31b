"""Tiny random models with a character tokenizer, made in a fraction of a second, for tests.

`tiny_model(path, seed=0)` writes a Hugging Face folder: config, tokenizer, safetensors.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

SPECIAL = ["<pad>", "<bos>", "<eos>"]
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEF +-*/=()<>,.:?!#\n"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def tiny_tokenizer(vocab: int = 64) -> Any:
    """Return a character tokenizer of exactly `vocab` ids; pad 0, bos 1, eos 2.

    A byte-level BPE without merges, in Qwen2's class: transformers reads every Qwen2 folder with
    that class, whatever its tokenizer_config says.
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


def tiny_model(path: Path | str, *, seed: int = 0, vocab: int = 64, **overrides: Any) -> Path:
    """Write a random model to `path` and return it.

    The default is a Qwen2 of 2 layers, hidden 32, fp32, context 512; `overrides` are fields of its
    config, and `family="llama"` makes a Llama. The same seed gives the same weights.
    """
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config
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
    config = (LlamaConfig if family == "llama" else Qwen2Config)(**settings)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    path = Path(path)
    model.save_pretrained(path)
    tiny_tokenizer(settings["vocab_size"]).save_pretrained(path)
    return path
