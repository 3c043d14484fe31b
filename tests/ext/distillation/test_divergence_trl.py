"""Compares the divergence from the teacher with TRL's: values and gradients."""

from __future__ import annotations

import pytest
import torch

from arealite.ext.distillation.token_divergence import divergence

pytestmark = [pytest.mark.peers, pytest.mark.part, pytest.mark.filterwarnings("ignore")]
BETA = {"forward": 0.0, "reverse": 1.0}


def drawn(vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    policy_NV = 2 * torch.randn(64, vocabulary, dtype=torch.float64)
    teacher_NV = 2 * torch.randn(64, vocabulary, dtype=torch.float64)
    return policy_NV.requires_grad_(), teacher_NV


def ours(policy_NV: torch.Tensor, teacher_NV: torch.Tensor, top_k: int, kind: str) -> torch.Tensor:
    top_NK, ids_NK = teacher_NV.log_softmax(-1).topk(top_k)
    return divergence(policy_NV.log_softmax(-1).gather(1, ids_NK), top_NK, kind)


@pytest.mark.parametrize("kind", BETA)
@pytest.mark.parametrize("top_k", [1, 5, 20])
def test_top_k_with_a_tail_is_trls(top_k: int, kind: str) -> None:
    from trl.experimental.sdpo.loss_utils import add_tail_bucket, compute_divergence

    policy_NV, teacher_NV = drawn(40)
    ours_N = ours(policy_NV, teacher_NV, top_k, kind)
    (ours_grad,) = torch.autograd.grad(ours_N.sum(), policy_NV)
    top_NK, ids_NK = teacher_NV.log_softmax(-1).topk(top_k)
    policy_NK = policy_NV.log_softmax(-1).gather(1, ids_NK)
    tails = [add_tail_bucket(logprobs) for logprobs in (policy_NK, top_NK)]
    theirs_N = compute_divergence(*tails, BETA[kind])
    (their_grad,) = torch.autograd.grad(theirs_N.sum(), policy_NV)
    torch.testing.assert_close(ours_N, theirs_N, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(ours_grad, their_grad, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("kind", BETA)
def test_all_tokens_are_the_loss_of_gkd(kind: str) -> None:
    from trl.experimental.gkd import GKDTrainer

    policy_NV, teacher_NV = drawn(12)
    ours_N = ours(policy_NV, teacher_NV, 11, kind)
    theirs = GKDTrainer.generalized_jsd_loss(
        policy_NV[None], teacher_NV[None], beta=BETA[kind], reduction="sum"
    )
    torch.testing.assert_close(ours_N.sum(), theirs)
