"""Logprobs and entropies of given tokens from hidden states, without all logits in memory.

Plain autograd would keep [N, V] logits and probabilities for the backward pass. This autograd
function keeps one number per token and, without a softcap, the last chunk. It computes the other
chunks again. The last chunk costs no memory: the backward pass begins with a chunk in memory.
Shapes: N = tokens, H = hidden size, V = vocabulary.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from arealite.api.hooks import MatrixProductsMaker
from arealite.base import entries

BLOCK = 4096
"""Rows of a product that is added to a sum, so that the product needs little memory."""


class MatrixProducts:
    """Products of matrices by torch. An extension may compute them faster.

    Shapes: M = rows, K = inputs of a layer, N = outputs.
    """

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


class LogitChange(NamedTuple):
    """The logits of a model from the product of its head: scaled, then capped by a tanh."""

    scale: float = 1.0
    softcap: float = 0.0
    """0: no cap."""

    def apply(self, logits: Tensor) -> Tensor:
        """Apply the change to `logits` in place, and return them."""
        if self.scale != 1.0:
            logits.mul_(self.scale)
        if self.softcap:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits


class OutputHead(NamedTuple):
    """The output head of a model."""

    weight_VH: Tensor
    bias_V: Tensor | None = None
    change: LogitChange = LogitChange()

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [N, V] before the temperature."""
        logits_NV = products().linear(hidden, self.weight_VH, self.bias_V).float()
        return self.change.apply(logits_NV)


def token_logprobs(
    hidden_NH: Tensor,
    head: OutputHead,
    targets_N: Tensor,
    *,
    temperature_N: Tensor,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Return differentiable logprobs and entropies under softmax(logits / temperature).

    Args:
        hidden_NH: Hidden states before the head.
        head: Weight, bias and change of the logits.
        targets_N: int64, the token whose logprob is wanted.
        temperature_N: Sampling temperature of each token.
        chunk: Tokens whose logits are computed at a time, in the forward and the backward pass.

    Returns:
        (logprobs, entropies), float32 [N] each. Logits are converted to float32.
    """
    apply: Callable[..., tuple[Tensor, Tensor]] = _TokenLogprobs.apply  # pyright: ignore
    weight, bias, change = head
    hidden_NH = hidden_NH.to(weight.dtype)  # Mamba's last norm returns float32 in every dtype
    return apply(hidden_NH, weight, bias, targets_N, temperature_N, (change, chunk))


def _log_softmax(logits: Tensor, temperature: Tensor) -> Tensor:
    return torch.log_softmax(logits.div_(temperature[:, None]), dim=-1)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        hidden, weight, bias, targets, temperature, (change, chunk) = inputs
        head = OutputHead(weight, bias, change)
        logp = None
        logprobs = hidden.new_empty(len(targets), dtype=torch.float32)
        entropy = torch.empty_like(logprobs)
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            logp = None  # frees the chunk before
            logp = _log_softmax(head.logits(hidden[part]), temperature[part])
            logprobs[part] = logp.gather(1, targets[part, None])[:, 0]
            entropy[part] = logp.exp().mul_(logp).sum(-1).neg_()
        ctx.save_for_backward(hidden, weight, bias, targets, temperature, entropy)
        ctx.options = change, chunk
        ctx.last_logp = None
        if any(ctx.needs_input_grad) and not change.softcap:
            # The slope of a softcap needs the logits themselves.
            ctx.last_logp = logp
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, temperature, entropy = ctx.saved_tensors
        change, chunk = ctx.options
        head = OutputHead(weight, bias, change)
        grad_logp, grad_entropy = grads
        _, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if wants_bias else None
        for start in reversed(range(0, len(targets), chunk)):
            part = slice(start, start + chunk)
            logp = ctx.last_logp
            ctx.last_logp = None
            slope = None
            if logp is None:
                logp, slope = _logp_and_slope(head, hidden[part], temperature[part])
            grad_z = _grad_z(
                logp,
                targets[part, None],
                entropy[part, None],
                grad_logp=None if grad_logp is None else grad_logp[part, None],
                grad_entropy=None if grad_entropy is None else grad_entropy[part, None],
            )
            grad_z = grad_z.div_(temperature[part, None] / change.scale)
            if slope is not None:
                grad_z = grad_z.mul_(slope)
            grad_z = grad_z.to(hidden.dtype)
            grad_hidden[part] = products().product(grad_z, weight.T)
            if grad_weight is not None:
                products().add_product(grad_weight, grad_z.T, hidden[part].T)
            if grad_bias is not None:
                grad_bias += grad_z.sum(0, dtype=torch.float32)
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        if grad_bias is not None:
            grad_bias = grad_bias.to(weight.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None


def _logp_and_slope(
    head: OutputHead,
    hidden: Tensor,
    temperature: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Return the log-probabilities of a chunk, and the slope of its softcap; None: no softcap."""
    logits = head.logits(hidden)
    softcap = head.change.softcap
    slope = None
    if softcap:
        # ∂ cap · tanh(x / cap) / ∂x = 1 − tanh²
        slope = 1 - logits.div(softcap).square_()
    return _log_softmax(logits, temperature), slope


def _grad_z(
    logp: Tensor,
    targets: Tensor,
    entropy: Tensor,
    *,
    grad_logp: Tensor | None,
    grad_entropy: Tensor | None,
) -> Tensor:
    """Return the gradient of z, the logits of a chunk after the temperature; overwrite `logp`.

    ∂logp_t/∂z = 1_t − p and ∂entropy/∂z = −p (log p + entropy). In place: the peak is two logit
    chunks (with a softcap three), besides the gradient of the head.
    """
    if grad_entropy is None:
        assert grad_logp is not None
        grad_z = logp.exp_().mul_(-grad_logp)
    else:
        grad_z = logp.exp()
        factor = logp.add_(entropy).mul_(grad_entropy)
        if grad_logp is not None:
            factor.add_(grad_logp)
        grad_z.mul_(factor.neg_())
    if grad_logp is not None:
        grad_z.scatter_add_(1, targets, grad_logp)
    return grad_z
