"""Writes model folders of tests as GGUF files, as the converter of llama.cpp does."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize
from transformers import AutoModelForCausalLM, AutoTokenizer

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers": "blk",
}
"""The name in a GGUF file of each part of a tensor's name in Llama and Qwen2."""

MERGED = "01"
"""The last token of the file: a GGUF file has at least one merge."""


@dataclass(kw_only=True)
class Content:
    """Options of a GGUF file of a test."""

    quantisation: str = "F32"
    """Type of the matrices; vectors are F32."""
    pre: str | None = "qwen2"
    eot_token: int | None = None
    without: Collection[str] = ()
    """Tensors that are left out."""
    extra: Collection[str] = ()
    """Tensors that are added."""
    architecture: str | None = None
    """None: that of the model."""


def write_gguf(model_folder: Path, file: Path, content: Content | None = None) -> Path:
    """Write the Llama or Qwen2 model in a folder, and its tokenizer, as a GGUF file."""
    content = content or Content()
    model: Any = AutoModelForCausalLM.from_pretrained(model_folder)
    config = model.config
    writer = GGUFWriter(file, content.architecture or config.model_type)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer, model_folder, content)
    for hub_name, weights in model.state_dict().items():
        name = hub_name
        for part, short in NAMES.items():
            name = name.replace(part, short)
        if name in content.without or (name == "output.weight" and config.tie_word_embeddings):
            continue
        if config.model_type == "llama" and name.endswith(("attn_q.weight", "attn_k.weight")):
            is_query = name.endswith("attn_q.weight")
            heads = config.num_attention_heads if is_query else config.num_key_value_heads
            weights = _interleaved(weights, heads)
        _add_tensor(writer, name, weights.numpy(), content.quantisation)
    for name in content.extra:
        writer.add_tensor(name, np.ones(8, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add_tokenizer(writer: GGUFWriter, folder: Path, content: Content) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    special = {*tokenizer.all_special_tokens}
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    tokens[-1] = MERGED
    writer.add_tokenizer_model("gpt2")
    if content.pre is not None:
        writer.add_tokenizer_pre(content.pre)
    writer.add_token_list(tokens)
    writer.add_token_types(
        [TokenType.CONTROL if token in special else TokenType.NORMAL for token in tokens]
    )
    writer.add_token_merges([" ".join(MERGED)] * 2)  # transformers 5.17 fails with a list of one
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_unk_token_id(tokenizer.pad_token_id)
    if content.eot_token is not None:
        writer.add_eot_token_id(content.eot_token)
    writer.add_chat_template(tokenizer.chat_template)


def _interleaved(weights: torch.Tensor, heads: int) -> torch.Tensor:
    """Return query or key weights in the order in which llama.cpp rotates them."""
    rows, columns = weights.shape
    halves = weights.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns).contiguous()


def _add_tensor(writer: GGUFWriter, name: str, weights: np.ndarray, quantisation: str) -> None:
    kind = GGMLQuantizationType[quantisation]
    if weights.ndim == 1 or kind == GGMLQuantizationType.F32:
        writer.add_tensor(name, weights.astype(np.float32))
    else:
        writer.add_tensor(name, quantize(weights.astype(np.float32), kind), raw_dtype=kind)
