"""Configs of tiny models, one or several for each family of causal language models.

A window is 8 tokens, shorter than most rows. Biases, scales and multipliers differ from their
neutral values, so that a step that omits one changes the logprobs.
"""

from __future__ import annotations

from typing import Any

Settings = dict[str, Any]

COMMON: Settings = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW: Settings = {"sliding_window": 8}
ALTERNATING = ["sliding_attention", "full_attention"]
EXPERTS: Settings = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL_EXPERTS: Settings = {"num_local_experts": 4, "num_experts_per_tok": 2}
DEEPSEEK: Settings = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.7,
}
LATENT: Settings = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
# More heads make equal index scores rarer. We suspect that topk breaks such ties by the width of a
# batch; this is not proved.
INDEX: Settings = {
    "index_topk": 8,
    "index_head_dim": 16,
    "index_n_heads": 16,
    "mlp_layer_types": ["dense", "sparse"],
}
DELTA: Settings = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
MAMBA: Settings = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}
GRANITE: Settings = {
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.3,
    "logits_scaling": 2.0,
}
UNTIED: Settings = {"tie_word_embeddings": False}
TIED: Settings = {"tie_word_embeddings": True}

SEES: Settings = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
TOWER: Settings = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
}
"""Configs of the part that reads images."""

CONFIGS: dict[str, Settings] = {
    "llama": {"attention_bias": True, "mlp_bias": True, "head_dim": 16},
    "llama, tied": {**TIED},
    "mistral": {"head_dim": 8, "sliding_window": None},
    "mistral, window": {"head_dim": 8, **WINDOW},
    "ministral": {"head_dim": 8, **WINDOW, "layer_types": ALTERNATING},
    "ministral3": {"head_dim": 8},
    "qwen2": {**TIED},
    "qwen2, window": {**WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    "qwen3": {"head_dim": 16, **TIED},
    "qwen3_5_text": {**DELTA},
    "phi": {"partial_rotary_factor": 0.5, "num_key_value_heads": 4},
    "phi3": {"sliding_window": None, "resid_pdrop": 0.0},
    "phi3, window": {**WINDOW},
    "phi3, partial": {"partial_rotary_factor": 0.5, **TIED},
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8, **WINDOW, "layer_types": ALTERNATING, "query_pre_attn_scalar": 16},
    "gemma3_text": {"head_dim": 8, **WINDOW, "layer_types": ALTERNATING},
    "gemma3n_text": {
        "head_dim": 8,
        **WINDOW,
        "num_hidden_layers": 4,
        "layer_types": [*ALTERNATING, *ALTERNATING],
        "vocab_size_per_layer_input": 64,
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 2,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "gemma4_text": {
        "head_dim": 8,
        **WINDOW,
        "layer_types": ALTERNATING,
        "vocab_size_per_layer_input": 64,
        "hidden_size_per_layer_input": 8,
        "per_layer_config": {"1": {"head_dim": 16}},
    },
    "cohere": {"logit_scale": 0.5, "use_qk_norm": True},
    "cohere2": {"logit_scale": 0.5, **WINDOW, "layer_types": ALTERNATING, "head_dim": 8},
    "granite": {**GRANITE},
    "granite_swa": {**GRANITE, **WINDOW, "layer_types": ALTERNATING},
    "olmo": {"clip_qkv": 1.0},
    "olmo2": {},
    "olmo3": {**WINDOW, "layer_types": ALTERNATING},
    "glm": {"head_dim": 8, "attention_bias": True},
    "glm4": {"head_dim": 8, "attention_bias": True},
    "exaone4": {**WINDOW, "layer_types": ALTERNATING},
    "smollm3": {"no_rope_layers": [1, 0]},
    "starcoder2": {**WINDOW, "use_bias": True},
    "stablelm": {"partial_rotary_factor": 0.25, "qk_layernorm": True, "use_qkv_bias": True},
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8, "num_layers": 2},
    "gpt_neox": {"rotary_pct": 0.25},
    "gptj": {"rotary_dim": 4},
    "codegen": {"rotary_dim": 4, "n_head": 4},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
    "falcon, alibi": {"alibi": True, "new_decoder_architecture": False, "multi_query": True},
    "bloom": {},
    "mpt": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "seed_oss": {"head_dim": 8, "attention_bias": True},
    "hunyuan_v1_dense": {"head_dim": 8},
    "ernie4_5": {"head_dim": 8, "use_bias": True},
    "arcee": {"head_dim": 8},
    "nemotron": {"partial_rotary_factor": 0.5},
    "apertus": {},
    "helium": {"head_dim": 8},
    "persimmon": {"num_key_value_heads": 4},
    "minicpm3": {**LATENT, "scale_emb": 3, "dim_model_base": 16},
    "diffllama": {"head_dim": 8},
    "llama4_text": {
        "head_dim": 8,
        "num_local_experts": 4,
        "intermediate_size_mlp": 48,
        "attention_chunk_size": 8,
        "no_rope_layers": [1, 0],
        "moe_layers": [1],
        "floor_scale": 16,
    },
    "vaultgemma": {"head_dim": 8, **WINDOW, "layer_types": ALTERNATING},
    "nanochat": {},
    "internlm3": {"head_dim": 8},
    "jais2": {},
    "cwm": {"head_dim": 8, **WINDOW, "layer_types": ALTERNATING},
    "xglm": {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 64},
    "biogpt": {},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "granitemoeshared": {**LOCAL_EXPERTS, **GRANITE, "shared_intermediate_size": 16},
    "granitemoe_swa": {**LOCAL_EXPERTS, **GRANITE, **WINDOW, "layer_types": ALTERNATING},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2, "num_shared_expert": 1},
    "jetmoe": {**LOCAL_EXPERTS, "kv_channels": 8},
    "longcat_flash": {
        **LATENT,
        "num_layers": 2,
        "moe_topk": 2,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
        "ffn_hidden_size": 64,
        "expert_ffn_hidden_size": 16,
        "head_dim": 8,
    },
    "deepseek_v32": {**DEEPSEEK, **LATENT, **INDEX},
    "glm_moe_dsa": {**DEEPSEEK, **LATENT, **INDEX},
    "exaone_moe": {**DEEPSEEK, **WINDOW, "layer_types": ALTERNATING, "head_dim": 8},
    "afmoe": {
        **EXPERTS,
        **WINDOW,
        "layer_types": ALTERNATING,
        "head_dim": 8,
        "num_local_experts": 4,
        "num_dense_layers": 1,
    },
    "solar_open": {**DEEPSEEK, "head_dim": 8},
    "olmo_hybrid": {},
    "lfm3": {},
    "xlstm": {},
    "rwkv": {},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {**EXPERTS, "head_dim": 8},
    "qwen3_moe, tied": {**EXPERTS, "head_dim": 8, "norm_topk_prob": True, **TIED},
    "mixtral": {**LOCAL_EXPERTS},
    "mixtral, window": {**LOCAL_EXPERTS, **WINDOW},
    "deepseek_v2": {**DEEPSEEK, **LATENT, "topk_method": "group_limited_greedy"},
    "deepseek_v3": {**DEEPSEEK, **LATENT},
    "glm4_moe": {**DEEPSEEK, "head_dim": 8, "use_qk_norm": True},
    "glm4_moe_lite": {**DEEPSEEK, **LATENT, "mlp_layer_types": ["dense", "sparse"]},
    "gpt_oss": {**LOCAL_EXPERTS, "head_dim": 8, **WINDOW, "layer_types": ALTERNATING},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 1.0},
    "granitemoe": {**LOCAL_EXPERTS, **GRANITE},
    "ernie4_5_moe": {
        "moe_k": 2,
        "moe_num_experts": 4,
        "moe_num_shared_experts": 1,
        "moe_intermediate_size": 16,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 1,
        "use_bias": True,
    },
    "dots1": {**DEEPSEEK, **WINDOW, "head_dim": 8, "layer_types": ALTERNATING},
    "minimax_m2": {**LOCAL_EXPERTS, "head_dim": 8},
    "phimoe": {**LOCAL_EXPERTS, "attention_bias": True, "lm_head_bias": True},
    "qwen3_5_moe_text": {**EXPERTS, **DELTA, "shared_expert_intermediate_size": 16},
    "qwen3_next": {**EXPERTS, **DELTA, "shared_expert_intermediate_size": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {**EXPERTS, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    "granitemoehybrid": {
        **LOCAL_EXPERTS,
        **GRANITE,
        **MAMBA,
        "shared_intermediate_size": 32,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "falcon_h1": {
        **MAMBA,
        "mamba_d_ssm": 64,
        "head_dim": 8,
        "lm_head_multiplier": 0.5,
        "embedding_multiplier": 2.0,
        "key_multiplier": 0.7,
    },
    "jamba": {
        **EXPERTS,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "nemotron_h": {
        **DEEPSEEK,
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "head_dim": 8,
        "ssm_state_size": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 1,
        "chunk_size": 16,
        "moe_shared_expert_intermediate_size": 16,
    },
    "zamba2": {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "mamba_d_state": 16,
        "mamba_ngroups": 1,
        "n_mamba_heads": 8,
        "chunk_size": 16,
        "adapter_rank": 8,
        "num_key_value_heads": 4,
    },
    "minimax": {
        **LOCAL_EXPERTS,
        "head_dim": 8,
        "block_size": 16,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_attn_alpha_factor": 1.5,
    },
    "kimi_linear": {
        **LATENT,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "moe_intermediate_size": 16,
        "num_shared_experts": 1,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "mamba2": {
        "num_heads": 8,
        "head_dim": 8,
        "state_size": 16,
        "n_groups": 1,
        "chunk_size": 16,
    },
    "mamba": {"state_size": 8, "time_step_rank": 4},
    "falcon_mamba": {"state_size": 8, "time_step_rank": 4},
    "recurrent_gemma": {
        "num_hidden_layers": 3,
        "lru_width": 32,
        "attention_window_size": 8,
        "head_dim": 8,
    },
}
"""Fields of config.json by name; the text before a comma is the family."""


def with_images(family: str, vision: Settings, **others: Any) -> Settings:
    """Return the config of a model that reads images, whose text part is `family`."""
    return {"text_config": COMMON | CONFIGS[family], "vision_config": vision, **others}


CONFIGS |= {
    "gemma3, images": with_images("gemma3_text", SEES, mm_tokens_per_image=4),
    "gemma4, images": with_images("gemma4_text", SEES),
    "qwen3_5, images": with_images("qwen3_5_text", TOWER),
    "qwen3_5_moe, images": with_images("qwen3_5_moe_text", TOWER),
    "llama4, images": with_images("llama4_text", SEES),
}
