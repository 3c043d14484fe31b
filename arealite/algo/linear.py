"""Products of matrices, which an extension may compute faster than torch does.

Shape letters: M = rows, K = inputs of a layer, N = outputs.
"""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from arealite.api.hooks import MatrixProductsMaker
from arealite.base import entries

BLOCK = 4096
"""Rows of a product that is added to a sum, so that the product needs little memory."""


class MatrixProducts:
    """Products of matrices by torch."""

    def linear(
        self,
        hidden: Tensor,
        weight_NK: Tensor,
        bias_N: Tensor | None = None,
    ) -> Tensor:
        """Return hidden · weightᵀ + bias [..., N] of hidden states [..., K]."""
        return functional.linear(hidden, weight_NK, bias_N)

    def product(self, left_MK: Tensor, right_NK: Tensor) -> Tensor:
        """Return left · rightᵀ [M, N], without gradients; both may be transposed views."""
        return left_MK @ right_NK.T

    def add_product(self, total_MN: Tensor, left_MK: Tensor, right_NK: Tensor) -> None:
        """Add left · rightᵀ to a float32 sum, in place."""
        if left_MK.dtype == torch.float32:
            total_MN.addmm_(left_MK, right_NK.T)
        else:
            self.add_blocks(total_MN, left_MK, right_NK)

    def add_blocks(self, total_MN: Tensor, left_MK: Tensor, right_NK: Tensor) -> None:
        """Add left · rightᵀ to a sum of another dtype, in place, BLOCK rows at a time."""
        for start in range(0, len(total_MN), BLOCK):
            rows = slice(start, start + BLOCK)
            total_MN[rows] += self.product(left_MK[rows], right_NK)


@cache
def products() -> MatrixProducts:
    """Return the products of this machine (hook `matrix_products`)."""
    makers: list[MatrixProductsMaker] = entries.hooks("matrix_products")
    return entries.first_result(makers) or MatrixProducts()
