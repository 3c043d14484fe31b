"""Logprobs and entropies of given tokens from hidden states, without all logits in memory.

Plain autograd would keep [N, V] logits and probabilities for the backward pass. This autograd
function keeps one number per token and recomputes the logits chunk by chunk. Shapes: N = tokens,
H = hidden size, V = vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def token_logprobs(
    hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, *, temperature_N: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """Return differentiable logprobs and entropies under softmax(hidden · weightᵀ / temperature).

    Args:
        hidden_NH: Hidden states before the head.
        weight_VH: Weight of the head.
        targets_N: int64, the token whose logprob is wanted.
        temperature_N: Sampling temperature of each token.
        chunk: Tokens whose logits are computed at a time, in the forward and the backward pass.

    Returns:
        (logprobs, entropies), float32 [N] each. Logits are converted to float32.
    """
    apply: Callable[..., tuple[Tensor, Tensor]] = _TokenLogprobs.apply  # pyright: ignore
    return apply(hidden_NH, weight_VH, targets_N, temperature_N, chunk)


def _log_softmax(hidden: Tensor, weight: Tensor, temperature: Tensor) -> Tensor:
    logits = (hidden @ weight.T).float()
    return torch.log_softmax(logits.div_(temperature[:, None]), dim=-1)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        logprobs = hidden.new_empty(len(targets), dtype=torch.float32)
        entropy = torch.empty_like(logprobs)
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            logp = _log_softmax(hidden[part], weight, temperature[part])
            logprobs[part] = logp.gather(1, targets[part, None])[:, 0]
            entropy[part] = logp.exp().mul_(logp).sum(-1).neg_()
        ctx.save_for_backward(hidden, weight, targets, temperature, entropy)
        ctx.chunk = chunk
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        # With z the scaled logits, ∂logp_t/∂z = 1_t − p and ∂entropy/∂z = −p (log p + entropy).
        hidden, weight, targets, temperature, entropy = ctx.saved_tensors
        grad_logp, grad_entropy = grads
        grad_hidden = torch.empty_like(hidden)
        wanted = ctx.needs_input_grad[1]
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wanted else None
        for start in range(0, len(targets), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logp = _log_softmax(hidden[part], weight, temperature[part])
            # In place: the peak is two logit chunks, besides the gradient of the head.
            if grad_entropy is None:
                assert grad_logp is not None
                grad_z = logp.exp_().mul_(-grad_logp[part, None])
            else:
                grad_z = logp.exp()
                slope = logp.add_(entropy[part, None]).mul_(grad_entropy[part, None])
                slope = slope if grad_logp is None else slope.add_(grad_logp[part, None])
                grad_z.mul_(slope.neg_())
            if grad_logp is not None:
                grad_z.scatter_add_(1, targets[part, None], grad_logp[part, None])
            grad_z = grad_z.div_(temperature[part, None]).to(hidden.dtype)
            grad_hidden[part] = grad_z @ weight
            if grad_weight is None:
                continue
            if grad_z.dtype == torch.float32:
                grad_weight.addmm_(grad_z.T, hidden[part])
            else:
                grad_weight += grad_z.T @ hidden[part]
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None
