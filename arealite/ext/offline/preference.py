"""Losses of the offline trainers: DPO and its variants, Bradley–Terry, cross entropy.

Pure functions, tested against hand-computed numbers. N = loss tokens of a micro-batch, R = its
rows, P = its pairs; the rows of pairs alternate: chosen, rejected, chosen, …
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from arealite.api.engine import LossFn, LossInput
from arealite.ext.offline.config import DPOConfig


def dpo_terms(margins: Tensor, config: DPOConfig) -> Tensor:
    """Return the loss of each margin h = log (π/π_ref)(chosen) − log (π/π_ref)(rejected).

    sigmoid: −log σ(βh) (arXiv 2305.18290 eq. 7). hinge: max(0, 1 − βh) (SLiC, arXiv 2305.10425,
    as a loss of βh). ipo: (h − 1/(2β))² (arXiv 2310.12036 eq. 17). Label smoothing ε assumes that a
    label is wrong with probability ε: the loss is (1 − ε) l(h) + ε l(−h).

    Args:
        margins: The margins, of any shape.
        config: Options of DPO.
    """
    terms = _unsmoothed_terms(margins, config)
    if not config.label_smoothing:
        return terms
    terms_of_wrong_labels = _unsmoothed_terms(-margins, config)
    return torch.lerp(terms, terms_of_wrong_labels, config.label_smoothing)


def _unsmoothed_terms(margins: Tensor, config: DPOConfig) -> Tensor:
    beta = config.beta
    if config.loss == "sigmoid":
        return -logsigmoid(beta * margins)
    if config.loss == "hinge":
        return torch.relu(1.0 - beta * margins)
    target = 1.0 / (2.0 * beta)
    return (margins - target).square()


def make_dpo_loss(config: DPOConfig) -> LossFn:
    """Create the loss Σ loss_weight · dpo_terms over pairs; loss_weight is constant in a row.

    The loss reads the field `ref_logprobs`, unless `reference_free`: then π_ref is treated as 1 (as
    in TRL; a uniform π_ref differs by a term of the lengths). Log-ratios are sums over a row's
    tokens. For ipo they are means, so that long answers do not weigh more (as in TRL, by advice of
    the paper's authors).
    """

    def loss_fn(batch: LossInput) -> tuple[Tensor, dict[str, Tensor]]:
        log_ratio_N = batch.outputs["logprobs"]
        if not config.reference_free:
            log_ratio_N = log_ratio_N - batch.fields["ref_logprobs"]
        log_ratio_R = _row_sums(batch, log_ratio_N)
        if config.loss == "ipo":
            length_R = _row_sums(batch, torch.ones_like(log_ratio_N))
            log_ratio_R = log_ratio_R / length_R
        return _pair_loss(
            batch,
            log_ratio_R,
            reward_scale=config.beta,
            terms=partial(dpo_terms, config=config),
        )

    return loss_fn


def bradley_terry(batch: LossInput) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the loss −Σ loss_weight · log σ(r_chosen − r_rejected) over pairs.

    P(chosen ≻ rejected) = σ(r_chosen − r_rejected) (Bradley & Terry 1952; arXiv 2203.02155 eq. 1).
    Each row has one loss token, whose value is the reward r.
    """
    rewards_R = _row_sums(batch, batch.outputs["values"])
    return _pair_loss(
        batch,
        rewards_R,
        reward_scale=1.0,
        terms=lambda margins_P: -logsigmoid(margins_P),
    )


def _row_sums(batch: LossInput, values_N: Tensor) -> Tensor:
    """Sum the values of each row's tokens, [R]."""
    num_rows = int(batch.rows_N[-1]) + 1
    zeros_R = values_N.new_zeros(num_rows)
    return zeros_R.index_add(0, batch.rows_N, values_N)


def _pair_loss(
    batch: LossInput,
    scores_R: Tensor,
    *,
    reward_scale: float,
    terms: Callable[[Tensor], Tensor],
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the weighted loss of the pairs and their stats.

    Args:
        batch: The micro-batch.
        scores_R: Score of each row.
        reward_scale: Rewards are scores times this number.
        terms: Computes the loss of each margin, the difference of the scores of a pair.
    """
    weight_R = torch.zeros_like(scores_R)
    weight_R[batch.rows_N] = batch.fields["loss_weight"]
    weight_P = weight_R[::2]
    chosen_P = scores_R[::2]
    rejected_P = scores_R[1::2]
    margins_P = chosen_P - rejected_P
    loss = (weight_P * terms(margins_P)).sum()
    with torch.no_grad():
        stats_P = {
            "accuracy": (margins_P > 0).float(),
            "margin": reward_scale * margins_P,
            "chosen": reward_scale * chosen_P,
            "rejected": reward_scale * rejected_P,
        }
        stats = {"loss": loss.detach()}
        for name, stat_P in stats_P.items():
            stats[name] = (weight_P * stat_P).sum()
    return loss, stats


def cross_entropy(batch: LossInput) -> tuple[Tensor, dict[str, Tensor]]:
    """Return −Σ w · log π, with w = `loss_weight`, which sums to 1 over the global batch.

    `is_answer` is 1 for tokens of the assistant and 0 for the tokens that follow. It only splits
    the sum in the stats: `answer` + `next_state` = `loss`.
    """
    weight_N = batch.fields["loss_weight"]
    is_answer_N = batch.fields["is_answer"]
    terms_N = -weight_N * batch.outputs["logprobs"]
    loss = terms_N.sum()
    with torch.no_grad():
        answer = (terms_N * is_answer_N).sum()
        entropy = (weight_N * batch.outputs["entropy"]).sum()
    return loss, {
        "loss": loss.detach(),
        "answer": answer,
        "next_state": loss.detach() - answer,
        "entropy": entropy,
    }
