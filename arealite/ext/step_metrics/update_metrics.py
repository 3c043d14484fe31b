"""Metrics of a step from the stats of its updates."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean

from arealite.api.engine import Stats
from arealite.impl.trainer.metrics import ENGINE, ROUTING, Metrics

PLAIN = ("loss", "weight")
"""Stats of a loss function that are not sums over tokens."""


def update_metrics(stats: Sequence[Stats]) -> Metrics:
    """Average the stats of a step's updates; sums of a loss become means over its tokens.

    An update without a weighted token has no means, and does not count in the step's.
    """
    columns = defaultdict[str, list[float]](list)
    for update in stats:
        weight = update.get("weight", 1.0)
        for key, total in update.items():
            model, _, name = key.rpartition("/")
            is_of_engine = name in ENGINE
            if not weight and not is_of_engine and name != "weight":
                continue
            group = model or ("update" if is_of_engine else "loss")
            metric = "policy" if key == "loss" else name
            is_mean = is_of_engine or name in PLAIN
            columns[f"{group}/{metric}"].append(total if is_mean else total / weight)
        share = effective_sample_share(update)
        if share is not None:
            columns["loss/behav_weight_ess"].append(share)
        explained = explained_variance(update)
        if explained is not None:
            columns["critic/explained_variance"].append(explained)
    matched, compared = (sum(columns.pop(f"update/{name}", ())) for name in ROUTING)
    metrics = Metrics()
    for name, values in columns.items():
        metrics[name] = fmean(values)
    metrics["update/count"] = float(len(stats))
    if compared:
        metrics["routing/agreement"] = matched / compared
    computed_tokens = metrics.get("update/computed_tokens")
    if computed_tokens:
        metrics["update/computed_frac"] = computed_tokens / metrics["update/tokens"]
    return metrics


def effective_sample_share(stats: Mapping[str, float]) -> float | None:
    """Return the effective sample size per token, (Σw)² / (N Σw²), in (0, 1].

    Args:
        stats: Summed stats of a loss of `make_policy_loss`; w are the behaviour weights.

    Returns:
        The share; None without behaviour weights, or if all of them are 0.
    """
    weighted_squares = stats.get("weight", 0.0) * stats.get("behav_weight_sq", 0.0)
    if weighted_squares > 0:
        return stats["behav_weight"] ** 2 / weighted_squares
    return None


def explained_variance(stats: Mapping[str, float]) -> float | None:
    """Return 1 − Var(R − V_old)/Var(R) from summed stats of a critic's update; at most 1.

    None without a critic, and if all returns are equal: then there is no variance to explain.
    """
    total = stats.get("critic/weight", 0.0)
    if not total or "critic/returns" not in stats:
        return None

    def mean(name: str) -> float:
        return stats[f"critic/{name}"] / total

    def variance(name: str) -> float:
        return mean(f"{name}_sq") - mean(name) ** 2

    variance_of_returns = variance("returns")
    if variance_of_returns > 1e-12:
        return 1.0 - variance("error") / variance_of_returns
    return None
