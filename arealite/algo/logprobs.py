"""Logprobs and entropies of given tokens from hidden states, without all logits in memory.

Plain autograd would keep [N, V] logits and probabilities for the backward pass. This autograd
function keeps one number per token and, without a softcap, the last chunk. It computes the other
chunks again. The last chunk costs no memory: the backward pass begins with a chunk in memory.
Shapes: N = tokens, M = ids of a token, H = hidden size, V = vocabulary.
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
NO_LOGPROB = -1e4
"""Logprob of the id -1. exp of it is 0, and 0 times it is 0: with -inf that would be NaN."""


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
    ids: Tensor,
    *,
    temperature_N: Tensor,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Return differentiable logprobs and entropies under softmax(logits / temperature).

    Args:
        hidden_NH: Hidden states before the head.
        head: Weight, bias and change of the logits.
        ids: int64 [N] or [N, M], the ids whose logprobs are wanted. The logprob of -1 is
            NO_LOGPROB, without a gradient.
        temperature_N: Sampling temperature of each token.
        chunk: Tokens whose logits are computed at a time, in the forward and the backward pass.

    Returns:
        (logprobs like `ids`, entropies [N]), float32. Logits are converted to float32.
    """
    apply: Callable[..., tuple[Tensor, Tensor]] = _TokenLogprobs.apply  # pyright: ignore
    weight, bias, change = head
    hidden_NH = hidden_NH.to(weight.dtype)  # Mamba's last norm returns float32 in every dtype
    return apply(hidden_NH, weight, bias, ids, temperature_N, (change, chunk))


def kept_set_logprobs(logprobs_NM: Tensor, is_truncated_N: Tensor) -> Tensor:
    """Return logprobs under the policy that is truncated as the sampler was.

    A truncated sampler draws from a kept set S, and log π(y | S) = log π(y) − log Σ_S π. Source:
    arXiv 2512.02556, section 3.1.

    Args:
        logprobs_NM: Logprobs of the sampled token, then of the ids of S; -1 where S has fewer.
        is_truncated_N: Whether the sampler was truncated; the other tokens keep their logprobs.
    """
    set_logprob_N1 = logprobs_NM[:, 1:].logsumexp(-1, keepdim=True)
    return torch.where(is_truncated_N[:, None], logprobs_NM - set_logprob_N1, logprobs_NM)


def _columns(values: Tensor) -> Tensor:
    """Return values [N] or [N, M] as [N, M]."""
    return values[:, None] if values.dim() == 1 else values


def _log_softmax(logits: Tensor, temperature: Tensor) -> Tensor:
    return torch.log_softmax(logits.div_(temperature[:, None]), dim=-1)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        hidden, weight, bias, ids, temperature, (change, chunk) = inputs
        head = OutputHead(weight, bias, change)
        logp = None
        logprobs = hidden.new_empty(ids.shape, dtype=torch.float32)
        logprobs_NM = _columns(logprobs)
        ids_NM = _columns(ids).clamp(min=0)
        entropy = hidden.new_empty(len(ids), dtype=torch.float32)
        for start in range(0, len(ids), chunk):
            part = slice(start, start + chunk)
            logp = None  # frees the chunk before
            logp = _log_softmax(head.logits(hidden[part]), temperature[part])
            logprobs_NM[part] = logp.gather(1, ids_NM[part])
            entropy[part] = logp.exp().mul_(logp).sum(-1).neg_()
        logprobs.masked_fill_(ids < 0, NO_LOGPROB)
        ctx.save_for_backward(hidden, weight, bias, ids, temperature, entropy)
        ctx.options = change, chunk
        ctx.last_logp = None
        if any(ctx.needs_input_grad) and not change.softcap:
            # The slope of a softcap needs the logits themselves.
            ctx.last_logp = logp
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, ids, temperature, entropy = ctx.saved_tensors
        change, chunk = ctx.options
        head = OutputHead(weight, bias, change)
        grad_logp, grad_entropy = grads
        if grad_logp is not None:
            grad_logp = _columns(grad_logp.masked_fill(ids < 0, 0.0))
        ids_NM = _columns(ids).clamp(min=0)
        _, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if wants_bias else None
        for start in reversed(range(0, len(ids), chunk)):
            part = slice(start, start + chunk)
            logp = ctx.last_logp
            ctx.last_logp = None
            slope = None
            if logp is None:
                logp, slope = _logp_and_slope(head, hidden[part], temperature[part])
            grad_z = _grad_z(
                logp,
                ids_NM[part],
                entropy[part, None],
                grad_logp=None if grad_logp is None else grad_logp[part],
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
    ids: Tensor,
    entropy: Tensor,
    *,
    grad_logp: Tensor | None,
    grad_entropy: Tensor | None,
) -> Tensor:
    """Return the gradient of z, the logits of a chunk after the temperature; overwrite `logp`.

    ∂logp_t/∂z = 1_t − p, summed over the ids t of a token, and ∂entropy/∂z = −p (log p + entropy).
    In place: the peak is two logit chunks (with a softcap three), besides the gradient of the head.
    """
    if grad_entropy is None:
        assert grad_logp is not None
        grad_z = logp.exp_().mul_(-grad_logp.sum(-1, keepdim=True))
    else:
        grad_z = logp.exp()
        factor = logp.add_(entropy).mul_(grad_entropy)
        if grad_logp is not None:
            factor.add_(grad_logp.sum(-1, keepdim=True))
        grad_z.mul_(factor.neg_())
    if grad_logp is not None:
        grad_z.scatter_add_(1, ids, grad_logp)
    return grad_z
