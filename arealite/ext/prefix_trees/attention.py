"""Causal attention over packed prefix trees, as an attention function of transformers.

The function has its own name, because transformers builds masks only for its own attention
functions. For packed rows, transformers therefore builds no [tokens × tokens] mask.
"""

import copy
import inspect
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from arealite.base.errors import UserError
from arealite.base.log import get
from arealite.ext.prefix_trees.packed_rows import PackedRows, PrefixTree
from arealite.impl.engine.micro_batches import collate
from arealite.impl.engine.model import decoder_of

log = get(__name__)
NAME = "arealite_packed"
LOW_PRECISION = torch.bfloat16, torch.float16
KERNEL_WIDTHS = range(8, 257, 8)
"""Widths of heads that flash attention supports."""
HAS_FLASH_ATTN = find_spec("flash_attn") is not None
KNOWN = inspect.signature(varlen_attn).parameters
"""Parameters of varlen_attn; torch 2.11 has no enable_gqa."""


class ScoreOptions(NamedTuple):
    """How attention scores are computed from the products of queries and keys."""

    scale: float
    softcap: float | None = None
    """Scores are capped by softcap · tanh; None: no cap."""
    sinks: Tensor | None = None
    """A further score of each head, without a value; None: no sinks."""

    @property
    def are_plain(self) -> bool:
        """Whether scores are only scaled."""
        return self.softcap is None and self.sinks is None


def check_packable(model: PreTrainedModel) -> None:
    """Check that rows of a model can be packed.

    Raises:
        UserError: Tokens of the model depend on each other outside attention, or its attention does
            not receive the bounds of rows.
    """
    config = model.config.get_text_config()
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    has_only_attention = layer_types <= {"full_attention", "sliding_attention"}
    is_stateful = getattr(model, "_is_stateful", False)
    if not model.is_backend_compatible() or is_stateful or not has_only_attention:
        raise _refusal(type(model).__name__)
    _try_packed(model)


def _try_packed(model: PreTrainedModel) -> None:
    """Run the decoder of a copy on the meta device, so that `attend` checks its arguments."""
    trial: Any = copy.deepcopy(model)
    trial.to("meta").set_attn_implementation(NAME)
    meta = torch.device("meta")
    batch = collate([], meta, PackedRows(meta))
    decoder = decoder_of(trial)
    model_name = type(model).__name__
    try:
        decoder(input_ids=batch.input_ids_BW, use_cache=False, **batch.attention)
    except TypeError as error:
        raise _refusal(model_name, f" ({error})") from error
    except (RuntimeError, ValueError) as error:  # a layer cannot run on the meta device
        log.debug("packing checked in part", model=model_name, reason=str(error))


def _refusal(module_name: str, reason: str = "") -> UserError:
    return UserError(f"{module_name} cannot be packed{reason}: use engine.fsdp.layout=padded.")


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
    _check_arguments(module, attention_mask, options)
    tree: PrefixTree | None = options.get("prefix_tree")
    scores = ScoreOptions(
        scale=options.get("scaling") or query.shape[-1] ** -0.5,
        softcap=options.get("softcap"),
        sinks=options.get("s_aux"),
    )
    if tree is None:
        if scores.are_plain:
            return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        attended = _row(query, key, value, attention_mask, scores)
        return attended.transpose(1, 2).contiguous(), None
    if query.is_meta:
        attended = query.new_empty((*query.shape[:-1], value.shape[-1]))
        return attended.transpose(1, 2), None
    window = options.get("sliding_window") or 0
    return _attend_packed(query, key, value, tree, scores, window), None


def _check_arguments(
    module: torch.nn.Module,
    attention_mask: Tensor | None,
    options: dict[str, Any],
) -> None:
    """Raise UserError if a token would attend to another row, or beyond the window."""
    module_name = type(module).__name__
    has_tree = options.get("prefix_tree") is not None
    has_mask = attention_mask is not None
    if has_tree == has_mask:
        raise _refusal(module_name)
    has_window = getattr(getattr(module, "config", None), "sliding_window", None)
    if has_tree and has_window and "sliding_window" not in options:
        raise _refusal(module_name)
    if options.get("position_bias") is not None:
        raise _refusal(module_name, " (position_bias)")


def _attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tree: PrefixTree,
    scores: ScoreOptions,
    window: int,
) -> Tensor:
    """Return [1, N, heads, D], from the fastest kernel that supports the options.

    Args:
        query: [1, heads, N, D], as `key` and `value`, which may have fewer heads.
        key: The keys.
        value: The values.
        tree: The prefix trees of the N tokens.
        scores: How scores are computed.
        window: Number of tokens to which a token attends, with itself; 0: all.
    """
    if _has_flash_kernel(query, scores):
        return _flash(_flattened(query, key, value), tree, scores, window)[None]
    width = query.shape[-1]
    value_width = value.shape[-1]
    longest = max(map(len, tree.paths))
    window_hides_tokens = 0 < window < longest
    is_simple = scores.are_plain and not window_hides_tokens and value_width <= width
    kernel = tree.kernel if is_simple else None
    if kernel is not None:
        flat_query, flat_key, flat_value = _flattened(query, key, value)
        flat_value = pad(flat_value, (0, width - value_width))  # the kernel needs one width
        attended = kernel.attend(flat_query, flat_key, flat_value, scores.scale)
        return attended[None, ..., :value_width]
    return _attend_by_node(query, key, value, tree, scores, window)


def _has_flash_kernel(query: Tensor, scores: ScoreOptions) -> bool:
    if not query.is_cuda or query.dtype not in LOW_PRECISION:
        return False
    if query.shape[-1] not in KERNEL_WIDTHS or scores.sinks is not None:
        return False
    return scores.softcap is None or HAS_FLASH_ATTN


def _flattened(*tensors: Tensor) -> list[Tensor]:
    """Return each tensor [1, heads, N, D] as [N, heads, D], with a contiguous last dimension."""
    flat_tensors = list[Tensor]()
    for tensor in tensors:
        flat = tensor[0].transpose(0, 1)
        flat_tensors.append(flat if flat.stride(-1) == 1 else flat.contiguous())
    return flat_tensors


def _attend_by_node(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tree: PrefixTree,
    scores: ScoreOptions,
    window: int,
) -> Tensor:
    """Attend with one call and one mask for each node; see _attend_packed."""
    outputs = list[Tensor]()
    for path, (begin, end) in zip(tree.paths, pairwise(tree.bounds), strict=True):
        num_keys = len(path)
        num_queries = end - begin
        # The queries end the path. A window hides the keys that are too far to the left.
        last_visible = num_keys - num_queries
        first_visible = last_visible + 1 - (window or num_keys)
        mask = query.new_ones(num_queries, num_keys, dtype=torch.bool)
        mask = mask.tril(last_visible).triu(first_visible)
        path_positions = tree.put(path)
        attended = _row(
            query[:, :, begin:end],
            key[:, :, path_positions],
            value[:, :, path_positions],
            mask,
            scores,
        )
        outputs.append(attended)
    return torch.cat(outputs, 2).transpose(1, 2).contiguous()


def _flash(
    qkv: list[Tensor],
    tree: PrefixTree,
    scores: ScoreOptions,
    window: int,
) -> Tensor:
    """Attend over [N, heads, D] with flash_attn if it is installed, else with torch.

    A node is a row of the kernel. The keys of the row are the tokens of the node's path. The
    queries are the tokens of the node, which end the path. Both kernels align the causal mask to
    the last query and the last key of a row.
    """
    query, key, value = qkv
    value_width = value.shape[-1]
    value = pad(value, (0, query.shape[-1] - value_width))  # the kernels need one width
    if tree.keys is not None:
        key = key[tree.keys]
        value = value[tree.keys]
    query, key, value = (tensor.contiguous() for tensor in (query, key, value))
    # A window of w tokens sees itself and w − 1 to the left; −1 sees all.
    left = window - 1 if window else -1
    if HAS_FLASH_ATTN:
        from flash_attn import flash_attn_varlen_func  # pyright: ignore

        capped = {"softcap": scores.softcap} if scores.softcap else {}
        attended: Any = flash_attn_varlen_func(
            query,
            key,
            value,
            *tree.flash_bounds,
            softmax_scale=scores.scale,
            causal=True,
            window_size=(left, 0),
            **capped,
        )
        return attended[..., :value_width]
    options: dict[str, Any] = {"scale": scores.scale, "window_size": (left, 0)}
    if "enable_gqa" in KNOWN:
        options["enable_gqa"] = True
    else:
        key, value = _repeat_heads(query, key, value)
    attended = varlen_attn(query, key, value, *tree.flash_bounds, **options)
    return attended[..., :value_width]


def _repeat_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return keys and values with as many heads, dimension 1, as the queries."""
    repeats = query.shape[1] // key.shape[1]
    return key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)


def _row(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    options: ScoreOptions,
) -> Tensor:
    """Attend over [B, heads, N, D] under a boolean or added mask; None: causally."""
    if options.are_plain:
        return scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=options.scale,
            enable_gqa=True,
        )
    key, value = _repeat_heads(query, key, value)
    scores = (query @ key.mT * options.scale).float()
    if options.softcap is not None:
        scores = (scores / options.softcap).tanh() * options.softcap
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask
    if options.sinks is not None:
        sink = options.sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], -1)
    weights = scores.softmax(-1).to(value.dtype)
    return weights[..., : key.shape[2]] @ value


AttentionInterface.register(NAME, attend)
