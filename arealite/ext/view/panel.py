"""One panel that shows the state of a run: a pure function of a snapshot.

Shapes and numbers carry all information, so the panel is readable without colours and as text.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from arealite.ext.diagnosis.health_monitor import describe
from arealite.ext.view.report_run import roles
from arealite.ext.view.snapshot import PUBLISHING, RunReader, Snapshot
from arealite.ext.view.terminal import Render
from arealite.system.names.name_registry import Entry

MAX_WIDTH = 118
BAR = 10
SPARK = 20
SERVERS = 8
FINDINGS = 3
SHAPES = "█▓▒░"
STYLES = ("cyan", "green", "yellow", "dim")
"""Styles of a bar's parts; the last one is for the rest."""
BLOCKS = "▁▂▃▄▅▆▇█"
CURVES = {
    "reward": "reward/mean",
    "loss": "train/loss",
}
"""Metrics that have a curve, by the label of their row."""


class PanelRow(NamedTuple):
    """A row of the panel."""

    rank: int
    """The rows with the highest rank are left out first in a small terminal."""
    label: str
    line: Text


def renderer(watch: RunReader) -> Render:
    """Return a function that reads a run and renders its panel."""
    return lambda width, height: panel(watch.read(), width=width, height=height)


def panel(shot: Snapshot, *, width: int = MAX_WIDTH, height: int = 100) -> RenderableType:
    """Return the panel of a run, of at most `height` lines; the least important rows go first."""
    rows = [
        *progress(shot),
        *shares(shot),
        *weights(shot),
        *health(shot),
    ]
    if not rows[-1].line:  # no row of the last part follows the blank one
        rows.pop()
    max_rows = max(height - 2, 1)
    while len(rows) > max_rows:
        least_important = max(rows, key=lambda row: row.rank)
        rows.remove(least_important)
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(width=10, no_wrap=True)
    grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    for row in rows:
        grid.add_row(Text(row.label, "bold"), row.line)
    return Panel(
        grid,
        title=Text(f"{shot.name} · {shot.kind} · {shot.state}", "bold"),
        title_align="left",
        width=min(width, MAX_WIDTH),
    )


def progress(shot: Snapshot) -> Iterator[PanelRow]:
    """Yield the rows on progress and results; the first one has the number of steps."""
    newest = shot.metrics.newest
    yield PanelRow(-1, "step", Text(_steps(shot)))
    for label, metric in CURVES.items():
        curve = shot.metrics.curves.get(metric)
        if curve:
            line = _curve(newest, metric, curve)
            yield PanelRow(0, label, Text(line))
    if "train/accuracy" in newest:
        accuracy = newest["train/accuracy"]
        yield PanelRow(1, "accuracy", Text(f"{accuracy:.3f}"))
    yield from _held_out(shot)
    if "staleness/mean" in newest:
        mean = newest["staleness/mean"]
        largest = shown(newest, "staleness/max", ".0f")
        line = f"{mean:.1f} versions on average, {largest} at most"
        yield PanelRow(2, "staleness", Text(line))
    yield from _throughput(shot)


def _steps(shot: Snapshot) -> str:
    """Return the number of steps, their share of all steps, and the time of a step."""
    num_steps = shot.metrics.steps
    total = shot.total_steps
    total_steps = f"{total:,}" if total else "?"
    line = f"{num_steps:,} of {total_steps}"
    if not shot.metrics.newest:
        return line
    step_seconds = [metrics.get("time/step_s", 0.0) for metrics in shot.metrics.recent]
    mean_s = fmean(step_seconds)
    percent = 100 * num_steps // (total or 1)
    line += f"  {percent} %  {mean_s:.3g} s a step"
    if shot.state == "running":
        steps_left = max(0, total - num_steps)
        left = timedelta(seconds=round(steps_left * mean_s))
        line += f"  {left} left"
    return line


def _curve(newest: Mapping[str, float], metric: str, curve: Sequence[float]) -> str:
    """Return a metric's newest number, its change since step 1, its curve and its range."""
    number = shown(newest, metric, ".3f")
    change = ""
    if metric in newest:
        change = f"{curve[-1] - curve[0]:+.3f} since step 1"
    return f"{number}  {change}  {spark(curve)} {min(curve):.3g} … {max(curve):.3g}"


def _held_out(shot: Snapshot) -> Iterator[PanelRow]:
    """Yield a row for each metric of the evaluations, with its last and first number."""
    evals = shot.metrics.evals
    for name in ("reward", "accuracy", "loss"):
        metric = f"eval/{name}"
        steps = [step for step, line in evals.items() if metric in line]
        if steps:
            ends = dict.fromkeys((max(steps), min(steps)))
            numbers = [f"{evals[step][metric]:.3f} after {step:,} steps" for step in ends]
            line = f"{name} {', '.join(numbers)}"
            yield PanelRow(1, "held-out", Text(line))


def _throughput(shot: Snapshot) -> Iterator[PanelRow]:
    """Yield the tokens a second that were trained and generated in the newest steps."""
    for kind in ("trained", "generated"):
        metric = f"throughput/{kind}_tokens_per_s"
        lines = [line for line in shot.metrics.recent if metric in line]
        rates = [line[metric] for line in lines]
        if any(rates):
            seconds = [line["time/step_s"] for line in lines]
            mean_rate = fmean(rates, seconds)
            yield PanelRow(1, kind, Text(f"{mean_rate:,.0f} tokens a second"))


def shown(line: Mapping[str, float], metric: str, form: str) -> str:
    """Return a metric as text; "-" if it was not measured."""
    return format(line[metric], form) if metric in line else "-"


def shares(shot: Snapshot) -> Iterator[PanelRow]:
    """Yield a bar for the time of each role in the newest steps.

    Before the first step, yield the present activity of the run.
    """
    if shot.now:
        yield PanelRow(0, "now", Text(shot.now))
    lines = [*shot.metrics.recent]
    if lines:
        head = f"% of the last {len(lines)} steps"
        yield PanelRow(9, "", Text())
        yield PanelRow(8, "time", Text(head, "dim"))
    has_episodes = "episode/trajectories" in shot.metrics.newest
    for order, (role, parts) in enumerate(roles(lines).items()):
        is_shown = role == "trainer" or has_episodes
        if is_shown and any(parts.values()):
            yield PanelRow(3 + order % 4, role, bar(parts))


def weights(shot: Snapshot) -> Iterator[PanelRow]:
    """Yield the seconds of the weight updates, by part."""
    curves_of_all = {part: shot.metrics.curves.get(f"publish/{part}_s") for part in PUBLISHING}
    curves = {part: curve for part, curve in curves_of_all.items() if curve}
    if not curves:
        return
    head = "".join(f"{part:>10}" for part in curves)
    last_s = [curve[-1] for curve in curves.values()]
    mean_s = map(fmean, curves.values())
    worst_s = map(max, curves.values())
    yield PanelRow(9, "", Text())
    yield PanelRow(6, "weights", Text(f"{head}  in ms", "dim"))
    yield PanelRow(6, "  last", _milliseconds(last_s))
    yield PanelRow(8, "  mean", _milliseconds(mean_s))
    yield PanelRow(7, "  worst", _milliseconds(worst_s))


def _milliseconds(seconds: Iterable[float]) -> Text:
    """Return the cells of a row of the weight updates."""
    cells = [f"{1000 * part_s:>10,.1f}" for part_s in seconds]
    return Text("".join(cells))


def health(shot: Snapshot) -> Iterator[PanelRow]:
    """Yield the rows on servers, failures, and roles that block the run."""
    newest = shot.metrics.newest
    yield PanelRow(9, "", Text())
    if shot.servers or "publish/version" in newest:
        yield from servers(shot.servers)
    failures = sorted(shot.failures.items())
    counts = [f"{name} {count:,}" for name, count in failures]
    if counts:
        line = ", ".join(counts)
        yield PanelRow(1, "failures", Text(line))
    elif "rollout/episodes" in newest:
        yield PanelRow(5, "failures", Text("none"))
    blocks_others = any(finding.waiters for finding in shot.findings)
    label = "blocked by" if blocks_others else "in trouble"
    for number, finding in enumerate(shot.findings[:FINDINGS]):
        yield PanelRow(
            rank=number,
            label="" if number else label,
            line=Text(describe(finding), "bold red"),
        )


def servers(entries: Sequence[Entry]) -> Iterator[PanelRow]:
    """Yield a row on all live servers, and one per server."""
    if len(entries) == 1:
        yield PanelRow(2, "servers", _server_line(entries[0]))
        return
    line = f"{len(entries)} live{describe_servers(entries)}"
    yield PanelRow(2, "servers", Text(line))
    for number, entry in enumerate(entries[:SERVERS]):
        yield PanelRow(10 + number, "", _server_line(entry))


def _server_line(entry: Entry) -> Text:
    """Return a server's state, and the age of its newest heartbeat."""
    return Text(f"{entry.id}{describe_servers([entry])}  beat {entry.age_s:.1f} s")


def describe_servers(entries: Sequence[Entry]) -> str:
    """Return the servers' versions, pauses, and numbers of running and waiting requests."""
    states = [entry.value for entry in entries]
    versions = {str(state.get("version")) for state in states}
    pauses_s = [state["paused_s"] for state in states if state.get("paused_s")]
    loads = [state["load"] for state in states if state.get("load")]
    line = ""
    if versions:
        line += f"  version {' '.join(sorted(versions))}"
    if pauses_s:
        line += f"  paused for {max(pauses_s):,.0f} s"
    if loads:
        for kind in ("running", "waiting"):
            num_requests = sum(load[kind] for load in loads)
            line += f"  {num_requests:,} {kind}"
    return line


def spark(values: Sequence[float]) -> str:
    """Draw a curve in at most SPARK characters, scaled from its minimum to its maximum."""
    num_bars = min(SPARK, len(values))
    cuts = [number * len(values) // num_bars for number in range(num_bars + 1)]
    means = [fmean(values[begin:end]) for begin, end in pairwise(cuts)]
    low = min(means)
    span = max(means) - low or 1.0
    heights = [int(7.99 * ((mean - low) / span)) for mean in means]
    return "".join(BLOCKS[height] for height in heights)


def bar(parts: Mapping[str, float]) -> Text:
    """Draw a role's parts as one bar with a legend; the shares add up to 100."""
    whole = sum(parts.values())
    shown_parts = _largest_parts(parts).items()
    drawn = Text()
    legend = Text()
    begin = 0.0
    for (part, seconds), shape, style in zip(shown_parts, SHAPES, STYLES, strict=False):
        end = begin + seconds / whole
        width = round(BAR * end) - round(BAR * begin)
        percent = round(100 * end) - round(100 * begin)
        drawn.append(shape * width, style)
        if percent:
            legend.append(f"  {shape}", style)
            legend.append(f"{part} {percent}")
        begin = end
    return drawn + legend


def _largest_parts(parts: Mapping[str, float]) -> dict[str, float]:
    """Return the largest parts, each of which gets a shape, and "other" for the sum of others."""
    named = [part for part in parts if part != "other"]
    by_size = sorted(named, key=lambda part: -parts[part])
    num_named = len(SHAPES) - 1
    largest = by_size[:num_named]
    shown_parts = {part: parts[part] for part in named if part in largest}
    shown_seconds = sum(shown_parts.values())
    shown_parts["other"] = sum(parts.values()) - shown_seconds
    return shown_parts
