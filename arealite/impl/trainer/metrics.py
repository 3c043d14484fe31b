"""What a training step logs: names, and how numbers of tokens, trajectories and ranks become one.

All metric names are made here (waits excepted, which are named where they are measured), as
`group/name`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict

import numpy as np

from arealite.algo.advantages import group_counts
from arealite.algo.losses import MAX_LOG_RATIO, effective_sample_share
from arealite.api.publisher import PublishReport
from arealite.api.trajectory import TrajectoryHeader
from arealite.impl.trainer.batch import TrainBatch

NAMES = {"loss": "policy"}
"""Stats of a loss function whose metric has a better name."""
PLAIN = ("loss", "weight")
"""Stats of a loss function that are not means over its tokens."""
ENGINE = ("grad_norm", "lr", "skipped_update", "microbatches", "tokens", "padded_tokens")
"""Stats that the engine adds."""


class Stopwatch:
    """Where a step's seconds go; parts that are not named add up in `time/other_s`."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()
        self._parts: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the body's seconds to the part `name`; bodies must not be nested."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._parts[name] = self._parts.get(name, 0.0) + time.perf_counter() - begin

    def lap(self) -> dict[str, float]:
        """Return the seconds since the last lap, whole and by part."""
        now = time.perf_counter()
        whole, parts = now - self._begin, self._parts
        self._begin, self._parts = now, {}
        return {**parts, "time/step_s": whole, "time/other_s": whole - sum(parts.values())}


def trajectory_metrics(headers: Sequence[TrajectoryHeader], *, step: int) -> dict[str, float]:
    """Describe the whole batch from its headers."""
    count = len(headers)
    spans = [h.newest_version - h.oldest_version + 1 for h in headers]
    metrics = {
        **spread("reward", [h.reward for h in headers]),
        **spread("length/tokens", [h.num_tokens for h in headers]),
        **spread("length/trained", [h.trained_tokens for h in headers]),
        **spread("staleness", [step - h.oldest_version for h in headers]),
        "episode/trajectories": float(count),
        "episode/turns_mean": sum(h.turns for h in headers) / count,
        "episode/truncated_frac": sum(h.truncated for h in headers) / count,
        "episode/seconds_mean": sum(h.seconds for h in headers) / count,
        "episode/seconds_max": max(h.seconds for h in headers),
        "rollout/interruptions_in_batch": float(sum(h.interruptions for h in headers)),
        "staleness/versions_per_trajectory_mean": sum(spans) / count,
        "staleness/versions_per_trajectory_max": float(max(spans)),
        "staleness/mixed_version_frac": sum(span > 1 for span in spans) / count,
    }
    for kind in ("reward_parts", "waits"):
        prefix = "reward/parts" if kind == "reward_parts" else "episode/wait"
        for name in sorted({name for h in headers for name in getattr(h, kind)}):
            held = [getattr(h, kind)[name] for h in headers if name in getattr(h, kind)]
            metrics[f"{prefix}/{name}"] = sum(held) / len(held)
    return metrics | {f"episode/{k}": v for k, v in group_counts(headers).items()}


def spread(prefix: str, values: Sequence[float]) -> dict[str, float]:
    """Return mean, min, max and std (population) of `values` under `prefix`."""
    array = np.asarray(values, np.float64)
    numbers = {"mean": array.mean(), "min": array.min(), "max": array.max(), "std": array.std()}
    join = "/" if "/" not in prefix else "_"
    return {f"{prefix}{join}{name}": float(value) for name, value in numbers.items()}


def token_sums(batch: TrainBatch) -> tuple[dict[str, float], dict[str, float]]:
    """Return this rank's (sums, maxima) over its loss tokens; `World.sum` and `World.max` make them
    global."""
    masks = [row.loss_mask for row in batch.rows]

    def gather(arrays: Sequence[np.ndarray]) -> np.ndarray:
        picked = [array[mask] for array, mask in zip(arrays, masks, strict=True)]
        return np.concatenate(picked).astype(np.float64) if picked else np.zeros(0)

    prox = gather([row.fields["prox_logprobs"] for row in batch.rows])
    log_w = prox - gather([row.fields["behav_logprobs"] for row in batch.rows])
    stale = batch.step - gather(batch.versions)
    clipped = np.clip(log_w, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    diff, w = np.abs(log_w), np.exp(clipped)
    current = diff[stale == 0]
    sums = {
        "tokens": float(len(diff)),
        "current": float(len(current)),
        "stale": stale.sum(),
        "entropy": gather(batch.entropies).sum(),
        "diff": diff.sum(),
        "diff_current": current.sum(),
        "kl": (w - 1.0 - clipped).sum(),
        "w": w.sum(),
        "w_sq": np.square(w).sum(),
    }
    maxima = {
        "diff": diff.max(initial=0.0),
        "diff_current": current.max(initial=0.0),
        "stale": stale.max(initial=0.0),
    }
    return {k: float(v) for k, v in sums.items()}, {k: float(v) for k, v in maxima.items()}


def token_metrics(sums: Mapping[str, float], maxima: Mapping[str, float]) -> dict[str, float]:
    """Compare sampler and trainer: log π_prox against log π_behav, over all tokens and over current
    ones.

    `mismatch/kl` estimates KL(π_behav ‖ π_prox) with k3 = ρ − 1 − log ρ, ρ = π_prox / π_behav.
    """
    tokens, current = max(sums["tokens"], 1.0), max(sums["current"], 1.0)
    return {
        "mismatch/logprob_abs_diff_mean": sums["diff"] / tokens,
        "mismatch/logprob_abs_diff_max": maxima["diff"],
        "mismatch/logprob_abs_diff_mean_current": sums["diff_current"] / current,
        "mismatch/logprob_abs_diff_max_current": maxima["diff_current"],
        "mismatch/current_tokens": sums["current"],
        "mismatch/kl": sums["kl"] / tokens,
        "mismatch/behav_weight_ess": sums["w"] ** 2 / max(tokens * sums["w_sq"], 1e-12),
        "policy/entropy": sums["entropy"] / tokens,
        "staleness/token_mean": sums["stale"] / tokens,
        "staleness/token_max": maxima["stale"],
    }


def update_metrics(stats: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Average the updates of a step; a loss function's sums become means over the tokens that have
    a gradient."""
    metrics: dict[str, float] = {"update/count": float(len(stats))}
    columns: dict[str, list[float]] = {}
    for update in stats:
        weight = update.get("weight", 1.0) or 1.0
        for name, value in update.items():
            plain = name in PLAIN or name in ENGINE
            group = "update" if name in ENGINE else "loss"
            key = f"{group}/{NAMES.get(name, name)}"
            columns.setdefault(key, []).append(value if plain else value / weight)
        if "behav_weight_sq" in update:
            ess = effective_sample_share(dict(update))
            columns.setdefault("loss/behav_weight_ess", []).append(ess)
    metrics |= {name: sum(values) / len(values) for name, values in columns.items()}
    if padded := metrics.get("update/padded_tokens"):
        metrics["update/pad_frac"] = 1.0 - metrics["update/tokens"] / padded
    return metrics


def throughput(line: Mapping[str, float], *, before: float) -> dict[str, float]:
    """Return tokens per second of the step; workers count generated ones since their start, and
    `before` is where they stood at the last step."""
    seconds = line["time/step_s"]
    rates = {"throughput/trained_tokens_per_s": line["throughput/trained_tokens"] / seconds}
    if (generated := line.get("rollout/tokens", 0.0) - before) > 0.0:
        rates["throughput/generated_tokens_per_s"] = generated / seconds
    return rates


def publish_metrics(report: PublishReport) -> dict[str, float]:
    """Lay out what a publish cost."""
    numbers = {k: float(v) for k, v in asdict(report).items() if k != "quarantined"}
    numbers["quarantined"] = float(len(report.quarantined))
    return {f"publish/{name}": value for name, value in numbers.items()}
