"""Metrics of a batch from its loss tokens, summed over all ranks."""

from collections.abc import Mapping, Sequence

import numpy as np

from arealite.algo.losses import MAX_LOG_RATIO
from arealite.api.engine import Sequence as Row
from arealite.impl.trainer.batch import TrainBatch
from arealite.impl.trainer.metrics import Metrics

MAXIMA = ("diff", "diff_current", "stale")
"""Values of tokens whose maxima `token_sums` returns."""


def token_sums(batch: TrainBatch) -> tuple[dict[str, float], dict[str, float]]:
    """Return this rank's (sums, maxima) over its loss tokens, to be combined over all ranks.

    Rows without prox_logprobs, which no update trained, count in the staleness only.
    """
    rows = list[Row]()
    ages_of_rows = list[np.ndarray]()  # of all rows
    versions_of_rows = list[np.ndarray]()  # of `rows`
    num_truncated = 0
    num_unknown = 0
    for trajectory in batch.local:
        num_truncated += trajectory.num_truncated
        num_unknown += trajectory.num_unknown
        for row, versions_T in zip(trajectory.rows, trajectory.versions, strict=True):
            loss_versions = versions_T[row.loss_mask]
            ages_of_rows.append(batch.step - loss_versions)
            if "prox_logprobs" in row.fields:
                rows.append(row)
                versions_of_rows.append(loss_versions)

    def in_loss(name: str) -> np.ndarray:
        """Return a field of all loss tokens; rows without the field have no part in it."""
        loss_values = list[np.ndarray]()
        for row in rows:
            if name in row.fields:
                values_T = row.fields[name]
                loss_values.append(values_T[row.loss_mask])
        return joined(loss_values)

    prox_logprobs = in_loss("prox_logprobs")
    ages = joined(ages_of_rows)
    values = {
        "stale": ages,
        "aged": np.ones_like(ages),
        "entropy": in_loss("entropy"),
        **mismatch_values(
            prox_logprobs,
            in_loss("behav_logprobs"),
            is_current=joined(versions_of_rows) == batch.step,
        ),
        "truncated": np.asarray(num_truncated),
        "unknown_set": np.asarray(num_unknown),
        "scored": np.ones(len(batch.scores)),
        "score": np.asarray(batch.scores),
        **reference_values(prox_logprobs, in_loss("ref_logprobs")),
    }
    sums = {name: float(array.sum()) for name, array in values.items()}
    maxima = dict[str, float]()
    for name in MAXIMA:
        array = values[name]
        maxima[name] = float(array.max(initial=0.0))
    return sums, maxima


def joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return arrays one after the other as float64; an empty array if there are none."""
    if not arrays:
        return np.zeros(0)
    return np.concatenate(arrays).astype(np.float64)


def mismatch_values(
    prox_logprobs: np.ndarray,
    behav_logprobs: np.ndarray,
    *,
    is_current: np.ndarray,
) -> dict[str, np.ndarray]:
    """Return the terms of the mismatch metrics for each token: π_prox relative to π_behav.

    Args:
        prox_logprobs: Logprobs of the trainer.
        behav_logprobs: Logprobs of the sampler.
        is_current: Whether each token was sampled by the version that is trained.
    """
    log_ratio = prox_logprobs - behav_logprobs
    clipped_log_ratio = np.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = np.exp(clipped_log_ratio)
    diff = np.abs(log_ratio)
    return {
        "tokens": np.ones_like(diff),
        "current": is_current,
        "diff": diff,
        "diff_current": diff * is_current,
        "kl": ratio - 1.0 - clipped_log_ratio,
        "w": ratio,
        "w_sq": np.square(ratio),
    }


def reference_values(
    prox_logprobs: np.ndarray,
    ref_logprobs: np.ndarray,
) -> dict[str, np.ndarray]:
    """Return the terms of the reference KL for each token; empty without a reference."""
    log_ratio = ref_logprobs - prox_logprobs[: len(ref_logprobs)]
    clipped_log_ratio = np.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return {
        "compared": np.ones_like(clipped_log_ratio),
        "reference_kl": np.exp(clipped_log_ratio) - 1.0 - clipped_log_ratio,
    }


def token_metrics(
    sums: Mapping[str, float],
    maxima: Mapping[str, float],
) -> Metrics:
    """Compare log π_prox (trainer) and log π_behav (sampler), over all and over current tokens.

    `mismatch/kl` estimates KL(π_behav ‖ π_prox) with k3 = ρ − 1 − log ρ, ρ = π_prox / π_behav, and
    `policy/reference_kl` KL(π_prox ‖ π_ref). What no token was measured for is absent.
    """
    metrics = {"mismatch/current_tokens": sums["current"]}
    if tokens := sums["tokens"]:
        metrics |= {
            "mismatch/logprob_abs_diff_mean": sums["diff"] / tokens,
            "mismatch/logprob_abs_diff_max": maxima["diff"],
            "mismatch/kl": sums["kl"] / tokens,
            "mismatch/behav_weight_ess": sums["w"] ** 2 / (tokens * sums["w_sq"]),
            "policy/entropy": sums["entropy"] / tokens,
        }
    if current := sums["current"]:
        metrics["mismatch/logprob_abs_diff_mean_current"] = sums["diff_current"] / current
        metrics["mismatch/logprob_abs_diff_max_current"] = maxima["diff_current"]
    if truncated := sums["truncated"]:
        metrics["mismatch/unknown_set_frac"] = sums["unknown_set"] / truncated
    if aged := sums["aged"]:
        metrics["staleness/token_mean"] = sums["stale"] / aged
        metrics["staleness/token_max"] = maxima["stale"]
    if compared := sums["compared"]:
        metrics["policy/reference_kl"] = sums["reference_kl"] / compared
    if scored := sums["scored"]:
        metrics["reward/shaped_mean"] = sums["score"] / scored
    return metrics
