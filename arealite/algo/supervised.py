"""Cross entropy as a weighted sum over loss tokens: supervised fine-tuning, and world models.

Here as a pure function beside the policy losses. N = loss tokens.
"""

from __future__ import annotations

import torch

from arealite.api.engine import LossInput


def cross_entropy(batch: LossInput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return −Σ w · log π, with w = `loss_weight`, which sums to 1 over the global batch.

    `is_answer` (1 for what the assistant wrote, 0 for what followed) only splits the sum in the
    stats: `answer` + `next_state` = `loss`.
    """
    weight_N, is_answer_N = batch.fields["loss_weight"], batch.fields["is_answer"]
    terms_N = -weight_N * batch.outputs["logprobs"]
    loss = terms_N.sum()
    with torch.no_grad():
        answer = (terms_N * is_answer_N).sum()
        entropy = (weight_N * batch.outputs["entropy"]).sum()
    stats = {"loss": loss.detach(), "answer": answer, "next_state": loss.detach() - answer}
    return loss, stats | {"entropy": entropy}
