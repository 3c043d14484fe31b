"""Causal attention over rows packed end to end, as an attention function of transformers.

The function has its own name, because transformers builds masks only for its own attention
functions. Packed rows therefore never need a dense [tokens × tokens] mask.
"""

import inspect
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from arealite.base.errors import UserError

NAME = "arealite_packed"
LOW = torch.bfloat16, torch.float16
HAS_FLASH_ATTN = find_spec("flash_attn") is not None
KNOWN = inspect.signature(varlen_attn).parameters
"""Parameters of varlen_attn; torch 2.11 and 2.12 have no enable_gqa."""


def choose(layout: str, model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> str:
    """Return `packed` or `padded` for `layout`, and set the attention of `model` accordingly.

    auto is packed in 16 bits on CUDA, where packing is fast, if the model supports it.

    Raises:
        UserError: packed is wanted, but tokens of the model depend on each other outside attention.
    """
    config = model.config.get_text_config()
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    can = model.is_backend_compatible() and not getattr(model, "_is_stateful", False)
    can = can and layers <= {"full_attention", "sliding_attention"}
    if layout == "auto":
        layout = "packed" if can and device.type == "cuda" and dtype in LOW else "padded"
    if layout == "packed":
        if not can:
            name = type(model).__name__
            raise UserError(f"{name} cannot be packed: use engine.fsdp.layout=padded.")
        model.set_attn_implementation(NAME)
    return layout


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend within each row of [1, heads, N, D]; return [1, N, heads, D].

    `cu_seq_lens_q` (int32: where rows begin, and N) and `max_length_q` come from the decoder's
    caller. Without them this is transformers' SDPA, for an embedded server that shares the model.
    """
    starts = options.get("cu_seq_lens_q")
    has_window = getattr(getattr(module, "config", None), "sliding_window", None)
    ignores_window = starts is not None and has_window and "sliding_window" not in options
    if (starts is None) == (attention_mask is None) or ignores_window:
        name = type(module).__name__  # packed rows would read each other, or past the window
        raise UserError(f"{name} cannot be packed: use engine.fsdp.layout=padded.")
    if starts is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    for name in ("s_aux", "softcap", "position_bias"):
        if options.get(name) is not None:
            raise UserError(f"Packed rows know no {name}: use engine.fsdp.layout=padded.")
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    window = options.get("sliding_window") or 0
    if query.is_cuda and query.dtype in LOW:
        flat = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
        longest = int(options["max_length_q"])
        return _flash(flat, starts, longest, scale=scale, window=window)[None], None
    lengths = starts.diff().tolist()
    rows = zip(*(tensor.split(lengths, 2) for tensor in (query, key, value)), strict=True)
    attended = [_row(q, k, v, scale=scale, window=window) for q, k, v in rows]
    return torch.cat(attended, 2).transpose(1, 2), None


def _flash(qkv: list[Tensor], starts: Tensor, longest: int, *, scale: float, window: int) -> Tensor:
    """Attend over [N, heads, D] by flash attention: the package's where installed, or torch's."""
    query, key, value = (tensor.contiguous() for tensor in qkv)
    bounds = starts, starts, longest, longest
    # A window of w tokens sees itself and w − 1 to the left; −1 sees all.
    sides = (window - 1 if window else -1, 0)
    if HAS_FLASH_ATTN:
        from flash_attn import flash_attn_varlen_func  # pyright: ignore

        options = {"softmax_scale": scale, "causal": True, "window_size": sides}
        return flash_attn_varlen_func(query, key, value, *bounds, **options)
    options: dict[str, Any] = {"scale": scale, "window_size": sides}
    if "enable_gqa" in KNOWN:
        options["enable_gqa"] = True
    else:
        groups = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
    attended: Any = varlen_attn(query, key, value, *bounds, **options)
    return attended


def _row(query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int) -> Tensor:
    mask = None
    if 0 < window < query.shape[2]:
        mask = query.new_ones(query.shape[2], query.shape[2], dtype=torch.bool)
        mask = mask.tril().triu(1 - window)
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )


AttentionInterface.register(NAME, attend)
