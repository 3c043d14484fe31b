"""Random models in the shapes of Qwen2.5, and the number of operations of their training."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from arealite.ext.demo.tiny_model import PRINTABLE, make_tokenizer

VOCAB = 151_936
CONTEXT = 2048
"""Longest sequence of the models, in tokens."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a Qwen2 model under their names in its config.json; embedding and head are tied."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int = VOCAB

    @property
    def matrix_parameters(self) -> int:
        """Parameters of the layers that multiply each token: without biases, norms and head."""
        key_value_share = self.num_key_value_heads / self.num_attention_heads
        attention = 2 * self.hidden_size**2 * (1 + key_value_share)
        mlp = 3 * self.hidden_size * self.intermediate_size
        return self.num_hidden_layers * round(attention + mlp)


SHAPES = {
    "0.5B": Shape(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
    ),
    "1.5B": Shape(
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
    ),
    "tiny": Shape(
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
    ),
}
"""The shapes of Qwen2.5, and one with which a CPU tests the tools."""


def training_operations(
    shape: Shape, *, computed_tokens: int, trained_tokens: int, keys: float
) -> float:
    """Count the floating-point operations of forward and backward, without recomputation.

    6 for each parameter that multiplies a token, and 12 · width of a layer for each key that a
    token attends to (Chowdhery et al. 2022, PaLM, appendix B). The engine computes the head for
    trained tokens only.

    Args:
        shape: The model.
        computed_tokens: Tokens that pass through the layers; a shared prefix counts once.
        trained_tokens: Tokens in the loss.
        keys: Sum over the computed tokens of the tokens that each attends to.
    """
    layers = 6 * shape.matrix_parameters * computed_tokens
    head = 6 * shape.vocab_size * shape.hidden_size * trained_tokens
    attention = 12 * shape.num_hidden_layers * shape.hidden_size * keys
    return layers + head + attention


def make_model(folder: Path, shape: Shape, *, device: str) -> Path:
    """Write a random bfloat16 model with a tokenizer of characters, unless the folder exists.

    Args:
        folder: Hugging Face folder to write.
        shape: Its shape.
        device: Device that draws the weights. A GPU is much faster for a model of 1.5 B.
    """
    if folder.exists():
        return folder
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = make_tokenizer(PRINTABLE, context=CONTEXT)
    settings: dict[str, Any] = asdict(shape)
    config = Qwen2Config(
        **settings,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(unfinished)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    return unfinished.rename(folder)
