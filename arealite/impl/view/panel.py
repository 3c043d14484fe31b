"""One panel that shows the state of a run: a pure function of a snapshot.

Shapes and numbers carry all information, so the panel is readable without colours and as text.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import pairwise
from operator import itemgetter
from statistics import fmean

from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from arealite.impl.launcher.supervisor import describe
from arealite.impl.view.report_run import roles
from arealite.system.health.snapshot import PUBLISHING, Snapshot
from arealite.system.names.registry import Entry

MAX_WIDTH = 118
BAR = 10
SPARK = 20
SERVERS = 8
FINDINGS = 3
SHAPES = "█▓▒░"
STYLES = ("cyan", "green", "yellow", "dim")
"""Styles of a bar's parts; the last one is for the rest."""
BLOCKS = "▁▂▃▄▅▆▇█"
Row = tuple[int, str, Text]
"""Rank (the highest is left out first in a small terminal), label, and text."""


def panel(shot: Snapshot, *, width: int = MAX_WIDTH, height: int = 100) -> RenderableType:
    """Return the panel of a run, of at most `height` lines; the least important rows go first."""
    rows = [*progress(shot), *shares(shot), *weights(shot), *health(shot)]
    if not rows[-1][2]:  # no row of the last part follows the blank one
        rows.pop()
    while len(rows) > max(height - 2, 1):
        rows.remove(max(rows, key=lambda row: row[0]))
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(width=10, no_wrap=True)
    grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    for _, label, text in rows:
        grid.add_row(Text(label, "bold"), text)
    title = Text(f"{shot.name} · {shot.kind} · {shot.state}", "bold")
    return Panel(grid, title=title, title_align="left", width=min(width, MAX_WIDTH))


def progress(shot: Snapshot) -> Iterator[Row]:
    """Yield the rows on progress and results."""
    metrics = shot.metrics
    newest = shot.metrics.newest
    total = shot.total_steps
    seconds = [line.get("time/step_s", 0.0) for line in metrics.recent]
    text = f"{metrics.steps:,} of {f'{total:,}' if total else '?'}"
    if newest:
        text += f"  {100 * metrics.steps // (total or 1)} %  {fmean(seconds):.3g} s a step"
        left = timedelta(seconds=round(max(0, total - metrics.steps) * fmean(seconds)))
        text += f"  {left} left" if shot.state == "running" else ""
    yield -1, "step", Text(text)
    for name, key in (("reward", "reward/mean"), ("loss", "train/loss")):
        if values := metrics.curves.get(key):
            change = f"{values[-1] - values[0]:+.3f} since step 1" if key in newest else ""
            text = f"{shown(newest, key, '.3f')}  {change}  "
            yield 0, name, Text(f"{text}{spark(values)} {min(values):.3g} … {max(values):.3g}")
    if "train/accuracy" in newest:
        yield 1, "accuracy", Text(f"{newest['train/accuracy']:.3f}")
    for name in ("reward", "accuracy", "loss"):
        values = {k: v[f"eval/{name}"] for k, v in metrics.evals.items() if f"eval/{name}" in v}
        ends = dict.fromkeys((max(values), min(values))) if values else {}
        text = ", ".join(f"{values[step]:.3f} after {step:,} steps" for step in ends)
        if text:
            yield 1, "held-out", Text(f"{name} {text}")
    if "staleness/mean" in newest:
        text = f"{newest['staleness/mean']:.1f} versions on average"
        yield 2, "staleness", Text(f"{text}, {shown(newest, 'staleness/max', '.0f')} at most")
    for kind in ("trained", "generated"):
        name = f"throughput/{kind}_tokens_per_s"
        lines = [line for line in metrics.recent if name in line]
        if any(line[name] for line in lines):
            rate = fmean([line[name] for line in lines], [line["time/step_s"] for line in lines])
            yield 1, kind, Text(f"{rate:,.0f} tokens a second")


def shown(line: Mapping[str, float], name: str, form: str) -> str:
    """Return a metric as text; "-" if it was not measured."""
    return format(line[name], form) if name in line else "-"


def shares(shot: Snapshot) -> Iterator[Row]:
    """Yield a bar for the time of each role in the newest steps.

    Before the first step, yield the present activity of the run.
    """
    if shot.now:
        yield 0, "now", Text(shot.now)
    lines = [*shot.metrics.recent]
    if lines:
        yield 9, "", Text()
        yield 8, "time", Text(f"% of the last {len(lines)} steps", "dim")
    for order, (role, parts) in enumerate(roles(lines).items()):
        if any(parts.values()) and (
            role == "trainer" or "episode/trajectories" in shot.metrics.newest
        ):
            yield 3 + order % 4, role, bar(parts)


def weights(shot: Snapshot) -> Iterator[Row]:
    """Yield the seconds of the weight updates, by part."""
    curves = {part: shot.metrics.curves.get(f"publish/{part}_s") for part in PUBLISHING}
    found = {part: values for part, values in curves.items() if values}
    if found:
        yield 9, "", Text()
        yield 6, "weights", Text("".join(f"{part:>10}" for part in found) + "  in ms", "dim")
    for order, name, pick in ((6, "last", itemgetter(-1)), (8, "mean", fmean), (7, "worst", max)):
        numbers = (f"{1000 * pick(values):>10,.1f}" for values in found.values())
        if found:
            yield order, f"  {name}", Text("".join(numbers))


def health(shot: Snapshot) -> Iterator[Row]:
    """Yield the rows on servers, failures, and roles that block the run."""
    newest = shot.metrics.newest
    failed = sorted(shot.failures.items())
    yield 9, "", Text()
    if shot.servers or "publish/version" in newest:
        yield from servers(shot.servers)
    if failed or "rollout/episodes" in newest:
        counts = ", ".join(f"{name} {count:,}" for name, count in failed)
        yield 5 - 4 * bool(failed), "failures", Text(counts or "none")
    label = "blocked by" if any(each.waiters for each in shot.findings) else "in trouble"
    for number, finding in enumerate(shot.findings[:FINDINGS]):
        yield number, "" if number else label, Text(describe(finding), "bold red")


def servers(entries: Sequence[Entry]) -> Iterator[Row]:
    """Yield a row on all live servers, and one per server."""
    if len(entries) != 1:
        yield 2, "servers", Text(f"{len(entries)} live{describe_servers(entries)}")
    for number, entry in enumerate(entries[:SERVERS]):
        label, order = ("servers", 2) if len(entries) == 1 else ("", 10 + number)
        yield order, label, Text(f"{entry.id}{describe_servers([entry])}  beat {entry.age_s:.1f} s")


def describe_servers(entries: Sequence[Entry]) -> str:
    """Return the servers' versions, pauses, and numbers of running and waiting requests."""
    versions = sorted({str(entry.value.get("version")) for entry in entries})
    loads = [load for entry in entries if (load := entry.value.get("load"))]
    text = f"  version {' '.join(versions)}" if versions else ""
    paused = [seconds for entry in entries if (seconds := entry.value.get("paused_s"))]
    text += f"  paused for {max(paused):,.0f} s" if paused else ""
    for kind in ("running", "waiting"):
        text += f"  {sum(load[kind] for load in loads):,} {kind}" if loads else ""
    return text


def spark(values: Sequence[float]) -> str:
    """Draw a curve in at most SPARK characters, scaled from its minimum to its maximum."""
    count = min(SPARK, len(values))
    cuts = [i * len(values) // count for i in range(count + 1)]
    means = [fmean(values[begin:end]) for begin, end in pairwise(cuts)]
    low = min(means)
    high = max(means)
    return "".join(BLOCKS[int(7.99 * ((v - low) / (high - low or 1.0)))] for v in means)


def bar(parts: Mapping[str, float]) -> Text:
    """Draw a role's parts as one bar with a legend; the shares add up to 100."""
    named = [part for part in parts if part != "other"]
    largest = sorted(named, key=lambda part: -parts[part])[: len(SHAPES) - 1]
    shown = {part: parts[part] for part in named if part in largest}
    shown["other"] = sum(parts.values()) - sum(shown.values())
    drawn = Text()
    legend = Text()
    whole = sum(parts.values())
    before = 0.0
    for (part, value), shape, style in zip(shown.items(), SHAPES, STYLES, strict=False):
        upto = before + value / whole
        drawn.append(shape * (round(BAR * upto) - round(BAR * before)), style)
        if share := round(100 * upto) - round(100 * before):
            legend.append(f"  {shape}", style).append(f"{part} {share}")
        before = upto
    return drawn + legend
