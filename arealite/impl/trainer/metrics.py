"""Times and costs of a training step, and names of metrics: `group/name`.

The metrics of a batch are those of the hook `step_metrics`.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict

from arealite.api.publisher import PublishReport
from arealite.system.health.waits import ITSELF, Wait

Metrics = dict[str, float]
"""Metrics by their names `group/name`."""

ROUTING = ("routing_matched", "routing_compared")
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


def in_group(group: str, metrics: Mapping[str, float]) -> Metrics:
    """Return metrics whose names begin with `group/`, except those of another group."""
    grouped = Metrics()
    for name, number in metrics.items():
        grouped_name = name if "/" in name else f"{group}/{name}"
        grouped[grouped_name] = number
    return grouped


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
