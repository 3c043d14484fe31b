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

from arealite.algo.logprobs import MatrixProducts
from arealite.api.engine_extension import EngineExtension, EngineSetup
from arealite.base.host import CPU_INFO, first_value

USES_ONEDNN = (
    first_value(CPU_INFO, "vendor_id") == "AuthenticAMD" and torch.backends.mkldnn.is_available()
)
"""Whether float32 products on the CPU are computed by oneDNN instead of torch's default."""


class OneDNNProducts(MatrixProducts):
    """Products in float32 on a CPU by oneDNN; all others by torch."""

    def linear(
        self,
        hidden: Tensor,
        weight_NK: Tensor,
        bias_N: Tensor | None = None,
    ) -> Tensor:
        """Return hidden · weightᵀ + bias; see MatrixProducts."""
        if hidden.ndim < 2 or not _is_for_onednn(hidden, weight_NK):
            return super().linear(hidden, weight_NK, bias_N)
        rows_MK = hidden.flatten(0, -2).contiguous()
        apply: Callable[..., Tensor] = _Linear.apply  # pyright: ignore
        output_MN = apply(rows_MK, weight_NK, bias_N)
        return output_MN.view(*hidden.shape[:-1], -1)

    def product(self, left_MK: Tensor, right_NK: Tensor) -> Tensor:
        """Return left · rightᵀ; see MatrixProducts."""
        if _is_for_onednn(left_MK, right_NK):
            return _product(left_MK, right_NK)
        return super().product(left_MK, right_NK)

    def add_product(self, total_MN: Tensor, left_MK: Tensor, right_NK: Tensor) -> None:
        """Add left · rightᵀ to a sum; see MatrixProducts."""
        if _is_for_onednn(left_MK, right_NK):
            self.add_blocks(total_MN, left_MK, right_NK)
        else:
            super().add_product(total_MN, left_MK, right_NK)


class FastLinear(EngineExtension):
    """Makes the linear layers of an engine's model compute by oneDNN."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def finish_loading(self) -> None:
        """Modify the linear layers."""
        use_fast_linear(self._module)


def fast_products() -> OneDNNProducts | None:
    """Return the products of a processor of AMD (hook `matrix_products`)."""
    return OneDNNProducts() if USES_ONEDNN else None


def fast_linear(setup: EngineSetup) -> FastLinear | None:
    """Return the extension on a processor of AMD (hook `engine_extension`)."""
    return FastLinear(setup.module) if USES_ONEDNN else None


class BatchInvariantProducts(OneDNNProducts):
    """Products of which a row does not depend on the number of rows.

    oneDNN adds the terms of a sum in one order for two rows and more, and in another for one.
    """

    def linear(
        self,
        hidden: Tensor,
        weight_NK: Tensor,
        bias_N: Tensor | None = None,
    ) -> Tensor:
        """Return hidden · weightᵀ + bias; see MatrixProducts."""
        num_inputs = weight_NK.shape[1]
        if hidden.numel() != num_inputs:
            return super().linear(hidden, weight_NK, bias_N)
        output_2N = super().linear(hidden.expand(2, *hidden.shape), weight_NK, bias_N)
        return output_2N[0]


def use_fast_linear(model: nn.Module, products: OneDNNProducts | None = None) -> None:
    """Make the linear layers of a model compute by oneDNN.

    Args:
        model: The model.
        products: What computes them; None: OneDNNProducts, on a processor of AMD.
    """
    if products is None and not USES_ONEDNN:
        return
    products = products or OneDNNProducts()
    for layer in model.modules():
        has_own_forward = "forward" in vars(layer)
        if type(layer) is nn.Linear and not has_own_forward:
            layer.forward = partial(_forward, products, layer)


def _forward(products: OneDNNProducts, layer: nn.Linear, input: Tensor) -> Tensor:
    return products.linear(input, layer.weight, layer.bias)


def _is_for_onednn(left: Tensor, right: Tensor) -> bool:
    if left.device.type != "cpu" or not torch.backends.mkldnn.is_available():
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
