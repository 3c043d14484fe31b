"""The metrics of a training step, computed from tokens, trajectories and all ranks.

Metrics are named here, as `group/name`. Only waits are named where they are measured.
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

import numpy as np

from arealite.algo.advantages import group_counts
from arealite.algo.losses import MAX_LOG_RATIO, effective_sample_share, explained_variance
from arealite.api.engine import Sequence as Row
from arealite.api.engine import Stats
from arealite.api.publisher import PublishReport
from arealite.api.trajectory import TrajectoryHeader, mean_reward, means
from arealite.base import log
from arealite.impl.trainer.batch import TrainBatch
from arealite.system.health.waits import ITSELF, Wait
from arealite.system.ledger import token_stats as stats_files
from arealite.system.ledger.token_stats import TokenStats

logger = log.get(__name__)

Metrics = dict[str, float]
"""Metrics by their names `group/name`."""

PLAIN = ("loss", "weight")
"""Stats of a loss function that are not sums over tokens."""
ROUTING = "routing_matched", "routing_compared"
ENGINE = (
    "grad_norm",
    "lr",
    "skipped_update",
    "loss_scale",
    "microbatches",
    "tokens",
    "computed_tokens",
    "router_loss",
    *ROUTING,
)
"""Stats that the engine adds."""
OF_SERVERS = ("pause_s", "load_s", "continue_s", "stall_s")
"""Costs of a publish that are measured at the servers."""
MAXIMA = ("diff", "diff_current", "stale")
"""Values of tokens whose maxima `token_sums` returns."""
FIRST_S = 600.0
"""Seconds after which a part is late the first time."""
SLOW_S = 60.0
"""Seconds before which a part is never late."""
SLOW = 5.0
"""From the second time on, a part is late after this many times its longest time."""


class Stopwatch:
    """Measures the parts of a step; the rest is `time/other_s`.

    A running part is shown as a wait, so that `arealite why` finds a trainer that hangs in it.
    """

    def __init__(self) -> None:
        self._begin = time.perf_counter()
        self._parts: dict[str, float] = {}
        self._longest: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the body's seconds to the part `name`; bodies must not be nested."""
        begin = time.perf_counter()
        longest_s = self._longest.get(name)
        late_s = FIRST_S if longest_s is None else max(SLOW_S, SLOW * longest_s)
        wait = Wait(event=name, owner="trainer", on=ITSELF, seconds=late_s)
        has_inner_wait = name.startswith("wait/")  # which has a name of its own
        try:
            with nullcontext() if has_inner_wait else wait:
                yield
        finally:
            seconds = time.perf_counter() - begin
            total_s = self._parts.get(name, 0.0)
            self._parts[name] = total_s + seconds
            self._longest[name] = max(longest_s or 0.0, seconds)

    def lap(self) -> Metrics:
        """Return the seconds since the previous lap, in all and by part."""
        now = time.perf_counter()
        step_s = now - self._begin
        parts = self._parts
        self._begin = now
        self._parts = {}
        return {
            **parts,
            "time/step_s": step_s,
            "time/other_s": step_s - sum(parts.values()),
        }


def trajectory_metrics(headers: Sequence[TrajectoryHeader], *, step: int) -> Metrics:
    """Compute the metrics of the whole batch from its headers."""
    count = len(headers)
    rewards = [h.reward for h in headers]
    groups = [(h.group_id, h.seat) for h in headers]
    scored = [reward for reward in rewards if reward is not None]
    spans = [h.newest_version - h.oldest_version + 1 for h in headers]
    num_segments = sum(len(h.segment_lengths) for h in headers)
    num_interruptions = sum(h.interruptions for h in headers)
    num_mixed = sum(span > 1 for span in spans)
    wait_means = means(h.waits for h in headers)
    reward_part_means = means(h.reward_parts for h in headers)
    counts_of_groups = group_counts(rewards, groups)
    return {
        **(spread("reward/", scored) if scored else {}),
        "reward/unscored": float(count - len(scored)),
        "reward/unchecked": sum(h.reward_parts.get("unchecked", 0.0) for h in headers),
        **spread("length/tokens_", [h.num_tokens for h in headers]),
        **spread("length/trained_", [h.trained_tokens for h in headers]),
        **spread("staleness/", [step - h.oldest_version for h in headers]),
        "episode/trajectories": float(count),
        "episode/turns_mean": sum(h.turns for h in headers) / count,
        "episode/segments_mean": num_segments / count,
        "episode/truncated_frac": sum(h.truncated for h in headers) / count,
        "episode/seconds_mean": sum(h.seconds for h in headers) / count,
        "episode/seconds_max": max(h.seconds for h in headers),
        "rollout/interruptions_in_batch": float(num_interruptions),
        "staleness/versions_per_trajectory_mean": sum(spans) / count,
        "staleness/versions_per_trajectory_max": float(max(spans)),
        "staleness/mixed_version_frac": num_mixed / count,
        **{f"episode/wait/{name}": mean for name, mean in wait_means.items()},
        **{f"reward/parts/{name}": mean for name, mean in reward_part_means.items()},
        **metrics_by_source(headers),
        **{f"episode/{name}": number for name, number in counts_of_groups.items()},
    }


def metrics_by_source(headers: Sequence[TrajectoryHeader]) -> Metrics:
    """Compute metrics for each source of tasks, and for each seat where there are several."""
    by_source = defaultdict[str, list[TrajectoryHeader]](list)
    seats = {h.seat for h in headers}
    for h in headers:
        if h.source:
            by_source[h.source].append(h)
        if len(seats) > 1:
            by_source[f"seat/{h.seat}"].append(h)
    metrics = Metrics()
    for source, headers_of_source in sorted(by_source.items()):
        reward = mean_reward(headers_of_source)
        if reward is not None:
            metrics[f"reward/{source}/mean"] = float(reward)
        metrics |= {
            f"episode/{source}/trajectories": float(len(headers_of_source)),
            f"episode/{source}/turns_mean": fmean(h.turns for h in headers_of_source),
            f"episode/{source}/truncated_frac": fmean(h.truncated for h in headers_of_source),
            f"length/{source}/trained_mean": fmean(h.trained_tokens for h in headers_of_source),
        }
    return metrics


def in_group(group: str, metrics: Mapping[str, float]) -> Metrics:
    """Return metrics whose names begin with `group/`, except those of another group."""
    grouped = Metrics()
    for name, number in metrics.items():
        grouped_name = name if "/" in name else f"{group}/{name}"
        grouped[grouped_name] = number
    return grouped


def spread(prefix: str, values: Sequence[float]) -> Metrics:
    """Return mean, min, max and std (population) of `values`; `prefix` begins their names."""
    array = np.asarray(values, np.float64)
    return {
        f"{prefix}mean": float(array.mean()),
        f"{prefix}min": float(array.min()),
        f"{prefix}max": float(array.max()),
        f"{prefix}std": float(array.std()),
    }


def token_sums(batch: TrainBatch) -> tuple[dict[str, float], dict[str, float]]:
    """Return this rank's (sums, maxima) over its loss tokens, to be combined over all ranks.

    Rows without prox_logprobs, which no update trained, count in the staleness only.
    """
    rows = list[Row]()
    ages_of_rows = list[np.ndarray]()  # of all rows
    versions_of_rows = list[np.ndarray]()  # of `rows`
    for trajectory in batch.local:
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


def write_token_stats(batch: TrainBatch, folder: Path, rank: int) -> bool:
    """Write the token stats of a batch; return False, and log a warning, if the disk fails."""
    try:
        stats_files.write(folder, batch.step, rank, token_stats(batch))
    except OSError as error:
        logger.warning("token stats end", step=batch.step, error=str(error))
        return False
    return True


def token_stats(batch: TrainBatch) -> TokenStats:
    """Return advantages and logprob differences of this rank's sampled tokens."""
    rows = batch.rows
    sampled_masks = [mask_T for trajectory in batch.local for mask_T in trajectory.sampled]
    mask = np.concatenate([np.zeros(0, bool), *sampled_masks])

    def sampled(arrays: Sequence[np.ndarray]) -> np.ndarray:
        if not arrays:
            return np.zeros(0)
        return np.concatenate(arrays)[mask]

    def prox_logprobs(row: Row) -> np.ndarray:
        if "prox_logprobs" in row.fields:
            return row.fields["prox_logprobs"]
        return np.full(len(row.tokens), np.nan, np.float32)

    is_in_loss_N = sampled([row.loss_mask for row in rows])

    def packed(values_N: np.ndarray) -> bytes:
        with_nan_N = np.where(is_in_loss_N, values_N, np.nan)
        with np.errstate(over="ignore"):  # beyond float16: infinite
            return with_nan_N.astype("<f2").tobytes()

    advantages_N = sampled([row.fields["advantages"] for row in rows])
    prox_logprobs_N = sampled([prox_logprobs(row) for row in rows])
    behav_logprobs_N = sampled([row.fields["behav_logprobs"] for row in rows])
    headers = [batch.headers[trajectory.index] for trajectory in batch.local]
    return TokenStats(
        trajectory_ids=[header.trajectory_id for header in headers],
        counts=[header.trained_tokens for header in headers],
        advantages=packed(advantages_N),
        differences=packed(prox_logprobs_N - behav_logprobs_N),
    )


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
    if aged := sums["aged"]:
        metrics["staleness/token_mean"] = sums["stale"] / aged
        metrics["staleness/token_max"] = maxima["stale"]
    if compared := sums["compared"]:
        metrics["policy/reference_kl"] = sums["reference_kl"] / compared
    if scored := sums["scored"]:
        metrics["reward/shaped_mean"] = sums["score"] / scored
    return metrics


def update_metrics(stats: Sequence[Stats]) -> Metrics:
    """Average the stats of a step's updates; sums of a loss become means over its tokens.

    An update without a weighted token has no means, and does not count in the step's.
    """
    columns: defaultdict[str, list[float]] = defaultdict(list)
    for update in stats:
        weight = update.get("weight", 1.0)
        for key, total in update.items():
            model, _, name = key.rpartition("/")
            is_of_engine = name in ENGINE
            if not weight and not is_of_engine and name != "weight":
                continue
            group = model or ("update" if is_of_engine else "loss")
            metric = "policy" if key == "loss" else name
            mean = total if is_of_engine or name in PLAIN else total / weight
            columns[f"{group}/{metric}"].append(mean)
        share = effective_sample_share(update)
        if share is not None:
            columns["loss/behav_weight_ess"].append(share)
        critic_stats = {name.removeprefix("critic/"): total for name, total in update.items()}
        explained = explained_variance(critic_stats)
        if explained is not None:
            columns["critic/explained_variance"].append(explained)
    matched, compared = (sum(columns.pop(f"update/{name}", ())) for name in ROUTING)
    metrics = {name: sum(values) / len(values) for name, values in columns.items()}
    if compared:
        metrics["routing/agreement"] = matched / compared
    computed_tokens = metrics.get("update/computed_tokens")
    if computed_tokens:
        metrics["update/computed_frac"] = computed_tokens / metrics["update/tokens"]
    return {"update/count": float(len(stats)), **metrics}


def throughput(metrics: Mapping[str, float], *, before: float | None) -> Metrics:
    """Return the step's tokens per second.

    Args:
        before: tokens that workers had generated since their start at the previous step; None where
            that is not known.
    """
    seconds = metrics["time/step_s"]
    trained = metrics["throughput/trained_tokens"]
    generated = metrics.get("rollout/tokens", 0.0)
    rates = {"throughput/trained_tokens_per_s": trained / seconds}
    if before is not None and generated > before:
        rates["throughput/generated_tokens_per_s"] = (generated - before) / seconds
    return rates


def publish_metrics(report: PublishReport) -> Metrics:
    """Return the costs of a publish as metrics; without servers, no seconds of servers."""
    costs = asdict(report) | {"quarantined": len(report.quarantined)}
    if not report.servers:
        for name in OF_SERVERS:
            del costs[name]
    return {f"publish/{name}": float(cost) for name, cost in costs.items()}
