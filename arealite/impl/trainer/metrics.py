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
from arealite.api.publisher import PublishReport
from arealite.api.trajectory import TrajectoryHeader, mean_reward, means
from arealite.base import log
from arealite.impl.trainer.batch import TrainBatch
from arealite.system.health.waits import ITSELF, Wait
from arealite.system.ledger import token_stats as stats_files
from arealite.system.ledger.token_stats import TokenStats

logger = log.get(__name__)

PLAIN = ("loss", "weight")
"""Stats of a loss function that are not sums over tokens."""
ROUTING = "routing_matched", "routing_compared"
ENGINE = (
    *("grad_norm", "lr", "skipped_update", "loss_scale"),
    *("microbatches", "tokens", "computed_tokens"),
    *("router_loss", *ROUTING),
)
"""Stats that the engine adds."""
OF_SERVERS = ("pause_s", "load_s", "continue_s", "stall_s")
"""Costs of a publish that are measured at the servers."""


FIRST_S, SLOW_S, SLOW = 600.0, 60.0, 5.0
"""A part is late after FIRST_S the first time; later, after SLOW times its longest time, but not
before SLOW_S."""


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
        longest = self._longest.get(name)
        late_s = FIRST_S if longest is None else max(SLOW_S, SLOW * longest)
        shown = Wait(name, owner="trainer", on=ITSELF, seconds=late_s)
        is_wait = name.startswith("wait/")  # the wait inside has a name of its own
        try:
            with nullcontext() if is_wait else shown:
                yield
        finally:
            seconds = time.perf_counter() - begin
            self._parts[name] = self._parts.get(name, 0.0) + seconds
            self._longest[name] = max(self._longest.get(name, 0.0), seconds)

    def lap(self) -> dict[str, float]:
        """Return the seconds since the previous lap, in all and by part."""
        now = time.perf_counter()
        whole = now - self._begin
        parts = self._parts
        self._begin = now
        self._parts = {}
        return {**parts, "time/step_s": whole, "time/other_s": whole - sum(parts.values())}


def trajectory_metrics(headers: Sequence[TrajectoryHeader], *, step: int) -> dict[str, float]:
    """Compute the metrics of the whole batch from its headers."""
    count = len(headers)
    rewards = [h.reward for h in headers]
    groups = [(h.group_id, h.seat) for h in headers]
    scored = [reward for reward in rewards if reward is not None]
    spans = [h.newest_version - h.oldest_version + 1 for h in headers]
    waits = means(h.waits for h in headers)
    parts = means(h.reward_parts for h in headers)
    return {
        **(spread("reward/", scored) if scored else {}),
        "reward/unscored": float(count - len(scored)),
        "reward/unchecked": sum(h.reward_parts.get("unchecked", 0.0) for h in headers),
        **spread("length/tokens_", [h.num_tokens for h in headers]),
        **spread("length/trained_", [h.trained_tokens for h in headers]),
        **spread("staleness/", [step - h.oldest_version for h in headers]),
        "episode/trajectories": float(count),
        "episode/turns_mean": sum(h.turns for h in headers) / count,
        "episode/segments_mean": sum(len(h.segment_lengths) for h in headers) / count,
        "episode/truncated_frac": sum(h.truncated for h in headers) / count,
        "episode/seconds_mean": sum(h.seconds for h in headers) / count,
        "episode/seconds_max": max(h.seconds for h in headers),
        "rollout/interruptions_in_batch": float(sum(h.interruptions for h in headers)),
        "staleness/versions_per_trajectory_mean": sum(spans) / count,
        "staleness/versions_per_trajectory_max": float(max(spans)),
        "staleness/mixed_version_frac": sum(span > 1 for span in spans) / count,
        **{f"episode/wait/{name}": mean for name, mean in waits.items()},
        **{f"reward/parts/{name}": mean for name, mean in parts.items()},
        **metrics_by_source(headers),
        **{f"episode/{name}": value for name, value in group_counts(rewards, groups).items()},
    }


def metrics_by_source(headers: Sequence[TrajectoryHeader]) -> dict[str, float]:
    """Compute metrics for each source of tasks, and for each seat where there are several."""
    found = defaultdict[str, list[TrajectoryHeader]](list)
    seats = {h.seat for h in headers}
    for h in headers:
        if h.source:
            found[h.source].append(h)
        if len(seats) > 1:
            found[f"seat/{h.seat}"].append(h)
    return {
        f"{group}/{name}/{what}": float(number)
        for name, own in sorted(found.items())
        for group, what, number in (
            ("reward", "mean", mean_reward(own)),
            ("episode", "trajectories", len(own)),
            ("episode", "turns_mean", fmean(h.turns for h in own)),
            ("episode", "truncated_frac", fmean(h.truncated for h in own)),
            ("length", "trained_mean", fmean(h.trained_tokens for h in own)),
        )
        if number is not None
    }


def spread(prefix: str, values: Sequence[float]) -> dict[str, float]:
    """Return mean, min, max and std (population) of `values`; `prefix` begins their names."""
    array = np.asarray(values, np.float64)
    numbers = {"mean": array.mean(), "min": array.min(), "max": array.max(), "std": array.std()}
    return {prefix + name: float(value) for name, value in numbers.items()}


def token_sums(batch: TrainBatch) -> tuple[dict[str, float], dict[str, float]]:
    """Return this rank's (sums, maxima) over its loss tokens, to be combined over all ranks.

    Rows without prox_logprobs, which no update trained, count in the staleness only.
    """
    pairs = [pair for each in batch.local for pair in zip(each.rows, each.versions, strict=True)]
    ages = [batch.step - versions_T[row.loss_mask] for row, versions_T in pairs]
    every = np.concatenate(ages).astype(np.float64) if ages else np.zeros(0)
    pairs = [pair for pair in pairs if "prox_logprobs" in pair[0].fields]
    rows = [row for row, _ in pairs]
    versions = [versions_T for _, versions_T in pairs]

    def gather(arrays: Sequence[np.ndarray | None]) -> np.ndarray:
        parts = zip(arrays, rows, strict=True)
        picked = [array[row.loss_mask] for array, row in parts if array is not None]
        return np.concatenate(picked).astype(np.float64) if picked else np.zeros(0)

    def named(name: str) -> np.ndarray:
        return gather([row.fields.get(name) for row in rows])

    prox = named("prox_logprobs")
    reference = named("ref_logprobs")
    log_w = prox - named("behav_logprobs")
    clipped = np.clip(log_w, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    diff = np.abs(log_w)
    w = np.exp(clipped)
    current = gather(versions) == batch.step
    log_rho = np.clip(reference - prox[: len(reference)], -MAX_LOG_RATIO, MAX_LOG_RATIO)
    values = {
        "tokens": np.ones_like(diff),
        "current": current,
        "stale": every,
        "aged": np.ones_like(every),
        "entropy": named("entropy"),
        "diff": diff,
        "diff_current": diff * current,
        "kl": w - 1.0 - clipped,
        "w": w,
        "w_sq": np.square(w),
        "scored": np.ones(len(batch.scores)),
        "score": np.asarray(batch.scores),
        "compared": np.ones_like(log_rho),
        "reference_kl": np.exp(log_rho) - 1.0 - log_rho,
    }
    sums = {name: float(array.sum()) for name, array in values.items()}
    return sums, {k: float(values[k].max(initial=0.0)) for k in ("diff", "diff_current", "stale")}


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
    sampled = [mask_T for each in batch.local for mask_T in each.sampled]
    unseen = np.full(max(map(len, sampled), default=0), np.nan, np.float32)
    prox = [row.fields.get("prox_logprobs", unseen[: len(row.tokens)]) for row in rows]
    mask = np.concatenate([np.zeros(0, bool), *sampled])

    def joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate(arrays)[mask] if arrays else np.zeros(0)

    in_loss = joined([row.loss_mask for row in rows])
    behaviour = [row.fields["behav_logprobs"] for row in rows]

    def packed(values_N: np.ndarray) -> bytes:
        with np.errstate(over="ignore"):  # beyond float16: infinite
            return np.where(in_loss, values_N, np.nan).astype("<f2").tobytes()

    headers = [batch.headers[each.index] for each in batch.local]
    return TokenStats(
        [header.trajectory_id for header in headers],
        [header.trained_tokens for header in headers],
        packed(joined([row.fields["advantages"] for row in rows])),
        packed(joined(prox) - joined(behaviour)),
    )


def token_metrics(sums: Mapping[str, float], maxima: Mapping[str, float]) -> dict[str, float]:
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


def update_metrics(stats: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Average the stats of a step's updates; sums of a loss become means over its tokens.

    An update without a weighted token has no means, and does not count in the step's.
    """
    columns: defaultdict[str, list[float]] = defaultdict(list)
    for update in stats:
        weight = update.get("weight", 1.0)
        for key, value in update.items():
            model, _, name = key.rpartition("/")
            of_engine = name in ENGINE
            if not weight and not of_engine and name != "weight":
                continue
            group = model or ("update" if of_engine else "loss")
            named = "policy" if key == "loss" else name
            mean = value if of_engine or name in PLAIN else value / weight
            columns[f"{group}/{named}"].append(mean)
        if (share := effective_sample_share(update)) is not None:
            columns["loss/behav_weight_ess"].append(share)
        critic = {name.removeprefix("critic/"): value for name, value in update.items()}
        if (explained := explained_variance(critic)) is not None:
            columns["critic/explained_variance"].append(explained)
    matched, compared = (sum(columns.pop(f"update/{name}", ())) for name in ROUTING)
    metrics = {name: sum(values) / len(values) for name, values in columns.items()}
    if compared:
        metrics["routing/agreement"] = matched / compared
    if computed := metrics.get("update/computed_tokens"):
        metrics["update/computed_frac"] = computed / metrics["update/tokens"]
    return {"update/count": float(len(stats)), **metrics}


def throughput(metrics: Mapping[str, float], *, before: float | None) -> dict[str, float]:
    """Return the step's tokens per second.

    Args:
        before: tokens that workers had generated since their start at the previous step; None where
            that is not known.
    """
    seconds = metrics["time/step_s"]
    rates = {"throughput/trained_tokens_per_s": metrics["throughput/trained_tokens"] / seconds}
    generated = metrics.get("rollout/tokens", 0.0)
    if before is not None and generated > before:
        rates["throughput/generated_tokens_per_s"] = (generated - before) / seconds
    return rates


def publish_metrics(report: PublishReport) -> dict[str, float]:
    """Return the costs of a publish as metrics; without servers, no seconds of servers."""
    numbers = asdict(report) | {"quarantined": len(report.quarantined)}
    if not report.servers:
        numbers = {name: numbers[name] for name in numbers if name not in OF_SERVERS}
    return {f"publish/{name}": float(value) for name, value in numbers.items()}
