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

from arealite.base.processor import cpu_vendor

USES_ONEDNN = cpu_vendor() == "AuthenticAMD" and torch.backends.mkldnn.is_available()
"""Whether this module computes by oneDNN. Else it calls torch's own functions."""


def linear(hidden: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Return hidden · weightᵀ + bias [..., N] of hidden states [..., K]."""
    is_float32 = hidden.dtype == weight_NK.dtype == torch.float32
    if not (USES_ONEDNN and is_float32 and hidden.device.type == "cpu" and hidden.numel()):
        return nn.functional.linear(hidden, weight_NK, bias_N)
    rows_MK = hidden.flatten(0, -2).contiguous()
    apply: Callable[..., Tensor] = _Linear.apply  # pyright: ignore
    return apply(rows_MK, weight_NK, bias_N).view(*hidden.shape[:-1], -1)


def product(left_MK: Tensor, right_NK: Tensor) -> Tensor:
    """Return left · rightᵀ [M, N]; both may be transposed views."""
    is_float32 = left_MK.dtype == right_NK.dtype == torch.float32
    if USES_ONEDNN and is_float32 and left_MK.device.type == "cpu" and left_MK.numel():
        return _product(left_MK, right_NK)
    return left_MK @ right_NK.T


def speed_up(model: nn.Module) -> None:
    """Make the linear layers of a model compute by `linear`; for a model on a CPU."""
    for layer in model.modules() if USES_ONEDNN else ():
        if type(layer) is nn.Linear and "forward" not in vars(layer):
            layer.forward = partial(_forward, layer)


def _forward(layer: nn.Linear, input: Tensor) -> Tensor:
    return linear(input, layer.weight, layer.bias)


def _product(left_MK: Tensor, right_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(left_MK, right_NK, bias_N, "none", [], "")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        rows_MK, weight_NK, bias_N = inputs
        ctx.save_for_backward(rows_MK, weight_NK)
        return _product(rows_MK, weight_NK, bias_N)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows_MK, weight_NK = ctx.saved_tensors
        grad_MN = grads[0].contiguous()  # oneDNN does not read expanded tensors
        wants_rows, wants_weight, wants_bias = ctx.needs_input_grad
        return (
            _product(grad_MN, weight_NK.T) if wants_rows else None,
            _product(grad_MN.T, rows_MK.T) if wants_weight else None,
            grad_MN.sum(0) if wants_bias else None,
        )
