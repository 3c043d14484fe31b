"""The losses of the policy and of the critic, as weighted sums over loss tokens.

Shapes: N = loss tokens of a micro-batch.
"""

import torch

from arealite.algo.centering import centering_terms
from arealite.algo.ratios import MAX_LOG_RATIO, capped_weight, in_interval
from arealite.api.algorithm import CriticConfig, KLConfig, KLEstimator, LossConfig, objectives
from arealite.api.engine import LossFn, LossInput
from arealite.base.errors import UserError

LossStats = dict[str, torch.Tensor]


def make_policy_loss(config: LossConfig, kl: KLConfig | None = None) -> LossFn:
    """Create the loss Σ loss_weight · (w · objective(u, A) − entropy_coef · H + kl.coef · KL).

    Decoupled (arXiv 2505.24298 eq. 5): the ratio is u = π_θ/π_prox, and the behaviour weight w is
    computed from π_prox/π_behav without a gradient (see _behav_weight). Coupled (arXiv 1707.06347):
    u = π_θ/π_behav and w = 1. With `ratio=sequence`, u is one number per row (GSPO, arXiv
    2507.18071). The objective is the part `config.objective`. With `centering`, A · C of
    `centering_terms` is added for each token, also for those that a token-level mask removes: C is
    the expectation over all ids, with the mask of each.

    The loss reads these fields, float32 [N] each: advantages, loss_weight, behav_logprobs;
    prox_logprobs if decoupled; ref_logprobs if the KL is part of the loss; optional keep (M2PO),
    where 0 removes a token from every term. Stats are sums over all tokens, weighted by
    loss_weight.

    Args:
        config: Options of the policy loss.
        kl: Options of the KL penalty; None: no KL term.
    """
    objective = objectives.get(config.objective)
    kl_coef = kl.coef if kl is not None and kl.place == "loss" else 0.0

    def loss_fn(batch: LossInput) -> tuple[torch.Tensor, LossStats]:
        fields = batch.fields
        logprobs_N = batch.outputs["logprobs"]
        entropy_N = batch.outputs["entropy"]
        advantages_N = fields["advantages"]
        weight_N = fields["loss_weight"]
        old_N = fields["prox_logprobs" if config.decoupled else "behav_logprobs"]
        log_ratio_N = _log_ratio(logprobs_N - old_N, batch.rows_N, config.ratio)
        ratio_N = log_ratio_N.exp()
        terms_N = objective(config, ratio_N, logprobs_N, advantages_N)
        _check_terms(terms_N, ratio_N, config.objective)
        stats = _ratio_stats(config, ratio_N.detach(), log_ratio_N.detach(), advantages_N)
        kept_N = weight_N
        w_N = None
        if config.decoupled:
            w_N, mask_N = _behav_weight(config, fields, batch.rows_N, stats)
            terms_N = w_N * terms_N
            kept_N = weight_N if mask_N is None else weight_N * mask_N
        centering_N = None
        if config.centering:
            centering_N, centering_stats = centering_terms(
                config,
                objective,
                batch,
                log_ratio_N=log_ratio_N,
                behav_weight_N=w_N,
            )
            stats |= centering_stats
        keep_N = fields.get("keep")
        if keep_N is not None:
            stats["m2_masked_frac"] = 1.0 - keep_N
            kept_N = kept_N * keep_N
        stats["entropy"] = entropy_N.detach()
        if config.entropy_coef:
            terms_N = terms_N - config.entropy_coef * entropy_N
        if kl is not None and kl_coef:
            kl_N = kl_estimate(logprobs_N - fields["ref_logprobs"], kl.estimator)
            stats["kl_ref"] = kl_N.detach()
            terms_N = terms_N + kl_coef * kl_N
        loss = (kept_N * terms_N).sum()
        if centering_N is not None:
            centering_weight_N = weight_N if keep_N is None else weight_N * keep_N
            loss = loss + (centering_weight_N * centering_N).sum()
        return loss, weighted_sums(stats, weight_N, loss)

    return loss_fn


def _check_terms(terms_N: object, ratio_N: torch.Tensor, name: str) -> None:
    """Refuse an objective that does not return one term for each token, with a gradient.

    Raises:
        UserError: It returns something else; a mean would be trained with a wrong gradient.
    """
    rule = "Return one term for each token, without a sum or a mean."
    if not isinstance(terms_N, torch.Tensor):
        raise UserError(f"loss.objective={name} returned {type(terms_N).__name__}. {rule}")
    if terms_N.shape != ratio_N.shape:
        raise UserError(
            f"loss.objective={name} returned the shape {list(terms_N.shape)} for "
            f"{len(ratio_N)} tokens. {rule}"
        )
    if ratio_N.requires_grad and not terms_N.requires_grad:
        raise UserError(
            f"loss.objective={name} returned terms without a gradient. "
            "Compute them from the ratios or the logprobs."
        )


def kl_estimate(log_ratio_N: torch.Tensor, kind: KLEstimator) -> torch.Tensor:
    """Estimate KL(π ‖ π_ref) of each token, float32 [N] (Schulman, "Approximating KL divergence").

    k1 = x, k2 = ½x², k3 = ρ − 1 − log ρ with ρ = π_ref/π = exp(−x). As a loss, the gradient of k1
    has expectation 0, and the gradient of k2 has the expectation of the KL's gradient.

    Args:
        log_ratio_N: x = log π − log π_ref of tokens sampled from π.
        kind: The estimator.
    """
    if kind == "k1":
        return log_ratio_N
    if kind == "k2":
        return 0.5 * log_ratio_N.square()
    x_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (-x_N).exp() - 1.0 + x_N


def _log_ratio(
    log_ratio_N: torch.Tensor,
    rows_N: torch.Tensor,
    level: str,
) -> torch.Tensor:
    """Return each token's clamped log-ratio; at level `sequence` the mean of its row's."""
    if level == "sequence":
        is_new_row_N = rows_N.diff(prepend=rows_N[:1]) != 0
        index_N = is_new_row_N.cumsum(0)  # rows numbered without gaps
        zeros_N = torch.zeros_like(log_ratio_N)
        means_N = zeros_N.scatter_reduce(0, index_N, log_ratio_N, "mean", include_self=False)
        log_ratio_N = means_N[index_N]
    return log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def ppo(
    config: LossConfig, ratio_N: torch.Tensor, _: torch.Tensor, advantages_N: torch.Tensor
) -> torch.Tensor:
    """Return −min(uA, clip(u, 1 − eps_low, 1 + eps_high)·A) of each token, with ratio u.

    Dual clip (arXiv 1912.09729) bounds it by c·|A| if A < 0.
    """
    clipped_N = clipped(config, ratio_N)
    terms_N = -torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)
    if config.dual_clip is None:
        return terms_N
    bounded_N = torch.minimum(terms_N, -config.dual_clip * advantages_N)
    return torch.where(advantages_N < 0, bounded_N, terms_N)


def clipped(config: LossConfig, ratio_N: torch.Tensor) -> torch.Tensor:
    """Return clip(u, 1 − eps_low, 1 + eps_high)."""
    return ratio_N.clamp(1.0 - config.eps_low, 1.0 + config.eps_high)


def _behav_weight(
    config: LossConfig,
    fields: dict[str, torch.Tensor],
    rows_N: torch.Tensor,
    stats: LossStats,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the behaviour weights w and the mask of kept tokens (None: all); add to `stats`.

    With r = π_prox/π_behav, truncate is w = min(r, cap) (TIS); mask is w = r, without loss outside
    [1/cap, cap] (MIS). With `behav_weight_level=sequence`, r is the geometric mean of the row.
    """
    diff_N = fields["prox_logprobs"] - fields["behav_logprobs"]
    raw_N = _log_ratio(diff_N, rows_N, config.behav_weight_level).exp()
    w_N = capped_weight(config, raw_N)
    mask_N = None
    cap = config.behav_weight_cap
    masks = config.behav_weight == "mask"
    if cap is not None and masks:
        mask_N = in_interval(raw_N, cap)
    changed_stat = "behav_masked_frac" if masks else "behav_capped_frac"
    stats[changed_stat] = w_N != raw_N
    stats["behav_weight"] = w_N
    stats["behav_weight_sq"] = w_N.square()
    stats["prox_behav_abs_diff"] = diff_N.abs()
    return w_N, mask_N


def _ratio_stats(
    config: LossConfig,
    ratio_N: torch.Tensor,
    log_ratio_N: torch.Tensor,
    advantages_N: torch.Tensor,
) -> LossStats:
    """Return stats of the ratio; `clip_frac_*` count tokens whose gradient a clip changes."""
    stats = {
        "ratio": ratio_N,
        "approx_kl": ratio_N - 1.0 - log_ratio_N,
    }
    if config.objective in ("ppo", "cispo"):
        low_N = ratio_N < 1.0 - config.eps_low
        high_N = ratio_N > 1.0 + config.eps_high
        if config.objective == "ppo":
            low_N = low_N & (advantages_N < 0)
            high_N = high_N & (advantages_N > 0)
        stats["clip_frac_low"] = low_N
        stats["clip_frac_high"] = high_N
    return stats


def weighted_sums(
    stats: LossStats,
    weight_N: torch.Tensor,
    loss: torch.Tensor,
) -> LossStats:
    """Sum each stat with the tokens' weights; add `loss` and `weight`."""
    stacked_KN = torch.stack([stat_N.to(weight_N.dtype) for stat_N in stats.values()])
    sums_K = stacked_KN @ weight_N
    sums = dict(zip(stats, sums_K.unbind(), strict=True))
    sums["loss"] = loss.detach()
    sums["weight"] = weight_N.sum()
    return sums


def make_value_loss(config: CriticConfig) -> LossFn:
    """Return Σ loss_weight · ½·max((V − R)², (clip(V, V_old ± value_clip) − R)²).

    V is the head's output. Reads the fields values (V_old, before the first update), returns (R)
    and loss_weight, each float32 [N]. Source: arXiv 2005.12729, section 3.
    """

    def loss_fn(batch: LossInput) -> tuple[torch.Tensor, LossStats]:
        values_N = batch.outputs["values"]
        old_N = batch.fields["values"]
        returns_N = batch.fields["returns"]
        weight_N = batch.fields["loss_weight"]
        squares_N = (values_N - returns_N).square()
        error_N = returns_N - old_N
        stats = {
            "values": old_N,
            "returns": returns_N,
            "returns_sq": returns_N.square(),
            "error": error_N,
            "error_sq": error_N.square(),
        }
        bound = config.value_clip
        if bound is not None:
            moved_N = values_N - old_N
            clipped_N = old_N + moved_N.clamp(-bound, bound)
            bounded_N = (clipped_N - returns_N).square()
            is_beyond_N = moved_N.detach().abs() > bound  # else both differ by rounding
            is_larger_N = bounded_N.detach() > squares_N.detach()
            stats["value_clip_frac"] = is_beyond_N & is_larger_N
            squares_N = torch.maximum(squares_N, bounded_N)
        loss = 0.5 * (weight_N * squares_N).sum()
        return loss, weighted_sums(stats, weight_N, loss)

    return loss_fn
