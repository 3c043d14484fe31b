"""Make a tiny, randomly initialised Qwen2 model with a character-level tokenizer.

Demo, tests and benchmarks use it: they need a Hugging Face folder without a network.
"""

import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arealite.base.files import follow_umask

PAD = "<pad>"
EOS = "<eos>"
PRINTABLE = string.digits + string.ascii_letters + string.punctuation + " \n"

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}"
CHAT_TEMPLATE += "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
"""Chat template: concatenated contents, the assistant's ended by EOS. A longer conversation extends
the tokens of a shorter one."""


@dataclass(frozen=True, kw_only=True)
class TinyModel:
    """The shape of the model; the defaults have 0.1 M parameters."""

    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int | None = None
    """None: as many as heads."""
    alphabet: str = PRINTABLE
    """Characters of the tokenizer; other characters are dropped."""
    words: tuple[str, ...] = ()
    """Texts that are one token each."""
    vocab_size: int | None = None
    """Rows of the embedding; None: just the tokens. More leaves unused ids at the end."""
    context: int = 512
    seed: int = 1
    init_std: float = 0.02
    """Standard deviation of the weights."""


def make_tiny_model(folder: Path | str, shape: TinyModel | None = None) -> Path:
    """Write config, fp32 weights and tokenizer into `folder`; equal shapes give equal bytes."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder = Path(folder)
    shape = shape or TinyModel()
    tokenizer = make_tokenizer(shape.alphabet, context=shape.context, words=shape.words)
    tokens = len(tokenizer)
    vocab_size = shape.vocab_size or tokens
    if vocab_size < tokens:
        raise ValueError(f"vocab_size {vocab_size} is below the tokenizer's {tokens} tokens")
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=shape.hidden,
        intermediate_size=4 * shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads or shape.heads,
        max_position_embeddings=shape.context,
        initializer_range=shape.init_std,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(shape.seed)
        model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    follow_umask(folder.glob("*.safetensors"))
    tokenizer.save_pretrained(folder)
    return folder


def make_tokenizer(alphabet: str, *, context: int = 512, words: Sequence[str] = ()) -> Any:
    """Return a tokenizer with a token a character (a byte beyond ASCII), after <pad> 0 and <eos> 1.

    A byte-level BPE without merges, in Qwen2's class, with which transformers reads Qwen2 folders.
    """
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    written = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(alphabet)
    tokens = [PAD, EOS, *dict.fromkeys("".join(piece for piece, _ in written))]
    ids = {token: index for index, token in enumerate(tokens)}
    tokenizer = Qwen2Tokenizer(
        vocab=ids, merges=[], pad_token=PAD, eos_token=EOS, unk_token=PAD, model_max_length=context
    )
    tokenizer.add_tokens([*words])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
