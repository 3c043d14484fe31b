"""Causal attention over packed prefix trees, as an attention function of transformers.

The function has its own name, because transformers builds masks only for its own attention
functions. For packed rows, transformers therefore builds no [tokens × tokens] mask.
"""

import copy
import inspect
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from arealite.base.errors import UserError
from arealite.base.log import get
from arealite.impl.engine.batch import collate
from arealite.impl.engine.head import decoder_of
from arealite.impl.engine.tree_attention import PrefixTree, TreeAttention

log = get(__name__)
NAME = "arealite_packed"
LOW = torch.bfloat16, torch.float16
FIX = "use engine.fsdp.layout=padded."
KERNEL_WIDTHS = range(8, 257, 8)
"""Widths of heads that flash attention supports."""
HAS_FLASH_ATTN = find_spec("flash_attn") is not None
KNOWN = inspect.signature(varlen_attn).parameters
"""Parameters of varlen_attn; torch 2.11 has no enable_gqa."""


def choose(layout: str, model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> str:
    """Return `packed` or `padded` for `layout`, and set the attention of `model` accordingly.

    `auto` packs on a CPU and in 16 bits on CUDA, where packing is fast, if the model supports it.

    Raises:
        UserError: `layout` is packed, but tokens of the model depend on each other outside
            attention, or its attention does not receive the bounds of rows.
    """
    config = model.config.get_text_config()
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    can = model.is_backend_compatible() and not getattr(model, "_is_stateful", False)
    can = can and layers <= {"full_attention", "sliding_attention"}
    wants_packed = can and (device.type == "cpu" or dtype in LOW)
    if layout == "padded" or (layout == "auto" and not wants_packed):
        return "padded"
    try:
        if not can:
            raise UserError(f"{type(model).__name__} cannot be packed: {FIX}")
        _try_packed(model)
    except UserError:
        if layout == "packed":
            raise
        return "padded"
    model.set_attn_implementation(NAME)
    return "packed"


def _try_packed(model: PreTrainedModel) -> None:
    """Run the decoder of a copy on the meta device, so that `attend` checks its arguments."""
    trial: Any = copy.deepcopy(model)
    trial.to("meta").set_attn_implementation(NAME)
    batch = collate([], torch.device("meta"), "packed")
    try:
        decoder_of(trial)(input_ids=batch.input_ids_BW, use_cache=False, **batch.attention)
    except TypeError as error:
        raise UserError(f"{type(model).__name__} cannot be packed ({error}): {FIX}") from error
    except (RuntimeError, ValueError) as error:  # a layer cannot run on the meta device
        log.debug("packing checked in part", model=type(model).__name__, reason=str(error))


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend within each prefix tree of [1, heads, N, D]; return [1, N, heads, D].

    The caller of the decoder passes `prefix_tree`. A query attends to the earlier tokens of its
    path and to itself. Without `prefix_tree`, this function is transformers' SDPA, for an embedded
    server that shares the model.
    """
    tree = options.get("prefix_tree")
    name = type(module).__name__
    has_window = getattr(getattr(module, "config", None), "sliding_window", None)
    ignores_window = tree is not None and has_window and "sliding_window" not in options
    if (tree is None) == (attention_mask is None) or ignores_window:
        # else a token would attend to another row, or beyond the window
        raise UserError(f"{name} cannot be packed: {FIX}")
    if options.get("position_bias") is not None:
        raise UserError(f"{name} cannot be packed (position_bias): {FIX}")
    softcap = options.get("softcap")
    sinks = options.get("s_aux")
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    changes: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": sinks}
    if tree is None:
        if softcap is None and sinks is None:
            return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        attended = _row(query, key, value, attention_mask, **changes)
        return attended.transpose(1, 2).contiguous(), None
    if query.is_meta:
        return query.new_empty((*query.shape[:-1], value.shape[-1])).transpose(1, 2), None
    window = options.get("sliding_window") or 0
    width = query.shape[-1]
    is_plain = sinks is None and softcap is None and value.shape[-1] <= width
    has_kernel = sinks is None and (softcap is None or HAS_FLASH_ATTN)
    rows = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    flat = [row if row.stride(-1) == 1 else row.contiguous() for row in rows]
    if query.is_cuda and query.dtype in LOW and has_kernel and width in KERNEL_WIDTHS:
        capped = {"softcap": softcap} if softcap else {}
        return _flash(flat, tree, scale=scale, window=window, **capped)[None], None
    longest = max(map(len, tree.paths))
    if is_plain and query.device.type == "cpu" and not 0 < window < longest:
        flat[2] = pad(flat[2], (0, width - value.shape[-1]))  # the kernel needs one width
        return TreeAttention.apply(*flat, tree, scale)[None, ..., : value.shape[-1]], None
    parts = list[Tensor]()
    for path, (begin, end) in zip(tree.paths, pairwise(tree.bounds), strict=True):
        total = len(path)
        places = tree.put(path)
        mask = query.new_ones(end - begin, total, dtype=torch.bool)
        mask = mask.tril(total - end + begin).triu(total - end + begin + 1 - (window or total))
        q = query[:, :, begin:end]
        k = key[:, :, places]
        v = value[:, :, places]
        parts.append(_row(q, k, v, mask, **changes))
    return torch.cat(parts, 2).transpose(1, 2).contiguous(), None


def _flash(
    qkv: list[Tensor], tree: PrefixTree, *, scale: float, window: int, **capped: float
) -> Tensor:
    """Attend over [N, heads, D] with flash_attn if it is installed, else with torch.

    A node is a row of the kernel. The keys of the row are the tokens of the node's path. The
    queries are the tokens of the node, which end the path. Both kernels align the causal mask to
    the last query and the last key of a row.
    """
    query, key, value = qkv
    width = value.shape[-1]
    value = pad(value, (0, query.shape[-1] - width))  # the kernels need one width
    if tree.keys is not None:
        key = key[tree.keys]
        value = value[tree.keys]
    query, key, value = (tensor.contiguous() for tensor in (query, key, value))
    bounds = tree.flash_bounds
    # A window of w tokens sees itself and w − 1 to the left; −1 sees all.
    sides = (window - 1 if window else -1, 0)
    if HAS_FLASH_ATTN:
        from flash_attn import flash_attn_varlen_func  # pyright: ignore

        options = {"softmax_scale": scale, "causal": True, "window_size": sides}
        return flash_attn_varlen_func(query, key, value, *bounds, **options, **capped)[..., :width]
    options: dict[str, Any] = {"scale": scale, "window_size": sides}
    if "enable_gqa" in KNOWN:
        options["enable_gqa"] = True
    else:
        groups = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
    attended: Any = varlen_attn(query, key, value, *bounds, **options)
    return attended[..., :width]


def _row(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend over [B, heads, N, D] under a boolean or added mask; None: causally.

    Scores are capped by softcap · tanh. A sink is a further score of its head without a value.
    """
    if softcap is None and sinks is None:
        return scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    scores = (query @ key.mT * scale).float()
    scores = scores if softcap is None else (scores / softcap).tanh() * softcap
    if mask is not None:
        scores = (
            scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        )
    if sinks is not None:
        sink = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], -1)
    return scores.softmax(-1).to(value.dtype)[..., : key.shape[2]] @ value


AttentionInterface.register(NAME, attend)
