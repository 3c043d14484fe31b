"""Linear layers in float32 that are fast on processors of AMD.

torch contains two libraries for products of matrices in float32 on a CPU. It calls MKL, which uses
AVX-512 on processors of Intel only. On one core of an AMD EPYC with AVX-512, oneDNN computes the
products of SmolLM2-135M in half the time, and without AVX-512 in about the same time (torch 2.13).

Shape letters: M = rows, K = inputs of a layer, N = outputs.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from arealite.base.host import cpu_vendor

USES_ONEDNN = cpu_vendor() == "AuthenticAMD" and torch.backends.mkldnn.is_available()
"""Whether float32 products on the CPU are computed by oneDNN instead of torch's default."""
BLOCK = 4096
"""Rows of a product that is added to a sum, so that the product needs little memory."""


def linear(
    hidden: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
) -> Tensor:
    """Return hidden · weightᵀ + bias [..., N] of hidden states [..., K]."""
    if hidden.ndim < 2 or not _is_for_onednn(hidden, weight_NK):
        return nn.functional.linear(hidden, weight_NK, bias_N)
    rows_MK = hidden.flatten(0, -2).contiguous()
    apply: Callable[..., Tensor] = _Linear.apply  # pyright: ignore
    output_MN = apply(rows_MK, weight_NK, bias_N)
    return output_MN.view(*hidden.shape[:-1], -1)


def product(left_MK: Tensor, right_NK: Tensor) -> Tensor:
    """Return left · rightᵀ [M, N], without gradients; both may be transposed views."""
    if _is_for_onednn(left_MK, right_NK):
        return _product(left_MK, right_NK)
    return left_MK @ right_NK.T


def add_product(
    total_MN: Tensor,
    left_MK: Tensor,
    right_NK: Tensor,
) -> None:
    """Add left · rightᵀ to a float32 sum, in place."""
    if left_MK.dtype == torch.float32 and not _is_for_onednn(left_MK, right_NK):
        total_MN.addmm_(left_MK, right_NK.T)
        return
    for start in range(0, len(total_MN), BLOCK):
        rows = slice(start, start + BLOCK)
        total_MN[rows] += product(left_MK[rows], right_NK)


def use_fast_linear(model: nn.Module) -> None:
    """Make the linear layers of a model compute by `linear`."""
    if not USES_ONEDNN:
        return
    for layer in model.modules():
        has_own_forward = "forward" in vars(layer)
        if type(layer) is nn.Linear and not has_own_forward:
            layer.forward = partial(_forward, layer)


def _forward(layer: nn.Linear, input: Tensor) -> Tensor:
    return linear(input, layer.weight, layer.bias)


def _is_for_onednn(left: Tensor, right: Tensor) -> bool:
    if not USES_ONEDNN or left.device.type != "cpu":
        return False
    is_float32 = left.dtype == right.dtype == torch.float32
    return is_float32 and left.numel() > 0


def _product(
    left_MK: Tensor,
    right_NK: Tensor,
    bias_N: Tensor | None = None,
) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(left_MK, right_NK, bias_N, "none", [], "")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        rows_MK, weight_NK, bias_N = inputs
        wants_rows, wants_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(
            rows_MK if wants_weight else None,
            weight_NK if wants_rows else None,
        )
        return _product(rows_MK, weight_NK, bias_N)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows_MK, weight_NK = ctx.saved_tensors
        grad_MN = grads[0].contiguous()  # oneDNN misreads strides of 0
        wants_rows, wants_weight, wants_bias = ctx.needs_input_grad
        grad_rows = _product(grad_MN, weight_NK.T) if wants_rows else None
        grad_weight = _product(grad_MN.T, rows_MK.T) if wants_weight else None
        grad_bias = grad_MN.sum(0) if wants_bias else None
        return grad_rows, grad_weight, grad_bias
