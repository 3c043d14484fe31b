"""The divergence of policy and teacher at each sampled token, over the top k of one of them.

All other tokens count as one more token, the tail. So the divergence is a lower bound of that of
the whole vocabulary, and equal to it if the top k are all tokens.

Shapes: T = tokens of a row, N = loss tokens, K = the top k, M = K + 1: with the tail.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from arealite.api.hooks import LossChange
from arealite.api.trainer import PPOConfig
from arealite.ext.distillation.config import DistillationConfig
from arealite.ext.distillation.teacher_scores import TOP_IDS, TOP_LOGPROBS
from arealite.ext.distillation.teacher_trial import options_of
from arealite.impl.trainer.batch import Trajectory

if TYPE_CHECKING:
    from torch import Tensor

    from arealite.api.engine import LossFn, LossInput

LEAST_TAIL = 1e-6
"""Least probability of a tail."""


def add_top_tokens(trajectory: Trajectory, top_k: int) -> None:
    """Make the top k an output of the engine at each sampled token, and add the teacher's scores.

    A trajectory without scores, from before the option was set, gets none.
    """
    for row, segment in zip(trajectory.rows, trajectory.segments, strict=True):
        shape = len(row.tokens), top_k
        ids_TK = np.full(shape, -1, np.int32)
        logprobs_TK = np.full(shape, -np.inf, np.float32)
        for turn in segment.turns:
            extras = turn.node.extras
            ids = np.frombuffer(extras.get(TOP_IDS) or extras.get("top_ids", b""), "<i4")
            logprobs = np.frombuffer(extras.get(TOP_LOGPROBS, b""), "<f4")
            if not turn.length or not len(ids) == len(logprobs) == turn.length * top_k:
                continue
            span = slice(turn.start, turn.start + turn.length)
            ids_TK[span] = ids.reshape(-1, top_k)
            logprobs_TK[span] = logprobs.reshape(-1, top_k)
        row.top_ids = ids_TK
        row.fields[TOP_LOGPROBS] = logprobs_TK


def loss_change(config: PPOConfig) -> LossChange | None:
    """Return what adds the divergence to the loss; None without. Hook `loss_change`."""
    options = options_of(config)
    if not (options.is_on and options.top_k):
        return None
    return lambda loss_fn: with_divergence(options, loss_fn)


def with_divergence(options: DistillationConfig, loss_fn: LossFn) -> LossFn:
    """Return a loss with Σ loss_weight · coef · divergence."""

    def with_teacher(batch: LossInput) -> tuple[Tensor, dict[str, Tensor]]:
        loss, stats = loss_fn(batch)
        weight_N = batch.fields["loss_weight"]
        policy_NK = batch.outputs["top_logprobs"]
        teacher_NK = batch.fields[TOP_LOGPROBS]
        divergence_N = divergence(policy_NK, teacher_NK, options.kl)
        sum_of_kl = (weight_N * divergence_N).sum()
        loss = loss + options.coef * sum_of_kl
        stats["loss"] = loss.detach()
        stats["teacher_kl"] = sum_of_kl.detach()
        return loss, stats

    return with_teacher


def divergence(policy_NK: Tensor, teacher_NK: Tensor, kind: str) -> Tensor:
    """Return KL(teacher ‖ policy) (`forward`) or KL(policy ‖ teacher) (`reverse`) [N].

    Args:
        policy_NK: Log-probabilities of the top k under the policy.
        teacher_NK: Under the teacher; -inf where there is no further token.
        kind: Which of both.
    """
    import torch

    is_token_NK = teacher_NK > -torch.inf

    def with_tail(logprobs_NK: Tensor) -> Tensor:
        """Return logprobs [N, M] with the tail; 0 in the place of no token."""
        finite_NK = logprobs_NK.masked_fill(~is_token_NK, 0.0)
        probs_NK = finite_NK.exp() * is_token_NK
        mass_N1 = probs_NK.sum(-1, keepdim=True)
        tail_N1 = (1.0 - mass_N1).clamp(min=LEAST_TAIL)
        return torch.cat([finite_NK, tail_N1.log()], dim=-1)

    policy_NM = with_tail(policy_NK)
    teacher_NM = with_tail(teacher_NK)
    if kind == "forward":
        first_NM = teacher_NM
        second_NM = policy_NM
    else:
        first_NM = policy_NM
        second_NM = teacher_NM
    terms_NM = first_NM.exp() * (first_NM - second_NM)
    return terms_NM.sum(-1)
