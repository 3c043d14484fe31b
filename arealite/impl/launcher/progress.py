"""Progress of a run on the launcher's console: a panel on a terminal, lines in other outputs."""

import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.live import Live

from arealite.api.hooks import PanelMaker
from arealite.base import entries
from arealite.base.printable import guard_output
from arealite.base.trial_files import RunPaths
from arealite.impl.launcher.terminal import Terminal
from arealite.impl.logger.metrics_file import MetricsFile, is_step

COLUMNS = (
    ("reward", "reward/mean", "{:.3f}"),
    ("staleness", "staleness/mean", "{:.1f}"),
    ("max", "staleness/max", "{:.0f}"),
    ("tok/s", "throughput/trained_tokens_per_s", "{:,.0f}"),
    ("interrupted", "rollout/interrupted_generations", "{:.0f}"),
    ("loss", "loss/policy", "{:+.4f}"),
    ("loss", "train/loss", "{:.4f}"),
    ("accuracy", "train/accuracy", "{:.3f}"),
)
"""Label, metric and format of each number in a line."""
DRAW_S = 1.0
"""Seconds between two drawings of the panel."""
LAST_S = 5.0
"""Time limit of the last drawing of the panel."""


class RunProgress:
    """Prints lines of the launcher, and the progress of the run.

    On a terminal, the panel shows the progress; elsewhere, a line every `every` steps.
    """

    def __init__(
        self, metrics: Path, total_steps: int, *, evaluates: bool = False, every: int = 5
    ) -> None:
        self._metrics = MetricsFile(metrics)
        self._run = RunPaths(metrics.parent)
        self.total = total_steps
        self.newest = 0
        """The newest trained step."""
        self._evaluates = evaluates
        self._evaluated = -1
        self.is_unevaluated = False
        """Whether the newest evaluation has no result."""
        self._every = every
        self._terminal = Terminal()
        self._is_drawn = False
        self._metrics.poll()  # an earlier run's

    @property
    def trained(self) -> bool:
        """Whether the last step is trained; after that, only rank 0 is needed."""
        return self.newest >= self.total

    @property
    def finished(self) -> bool:
        """Whether the last step is trained and, where the run `evaluates`, evaluated."""
        return self._evaluated >= self.total if self._evaluates else self.trained

    def poll(self) -> None:
        """Show the metrics written since the last call."""
        for metrics in self._metrics.poll():
            self.show(metrics)

    def show(self, metrics: Mapping[str, float]) -> None:
        """Show one line of metrics."""
        step = int(metrics["step"])
        if any(metric.startswith("eval/") for metric in metrics):
            self._show_evaluation(step, metrics)
        if not is_step(metrics):
            return
        self.newest = max(self.newest, step)
        self.total = int(metrics.get("train/total_steps", self.total))
        columns = [f"step {step}/{self.total}"]
        for label, metric, number_format in COLUMNS:
            if metric in metrics:
                columns.append(f"{label} {number_format.format(metrics[metric])}")
        is_due = step == 1 or step % self._every == 0 or step == self.total
        if is_due and not self._has_panel():
            self.say("  ".join(columns))

    def _show_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._evaluated = step
        scores: list[str] = []
        for name in ("reward", "loss", "accuracy"):
            if f"eval/{name}" in metrics:
                scores.append(f"{name} {metrics[f'eval/{name}']:.3f}")
        self.is_unevaluated = not scores
        if scores:
            summary = f"held-out {', '.join(scores)}"
        elif "eval/unscored" in metrics:
            summary = "no sample has a score"
        else:
            summary = "every sample failed"
        self.say(f"eval at step {step}: {summary}")

    def say(self, line: str) -> None:
        """Print a line."""
        self._has_panel()
        self._terminal.print(line)

    def _has_panel(self) -> bool:
        """Return whether the panel is drawn; without its terminal, the panel ends."""
        if self._is_drawn and not self._terminal.is_drawable:
            self._is_drawn = False
            self._terminal.is_interactive = False  # else rich draws it below each printed line
        return self._is_drawn

    @contextmanager
    def shown(self) -> Generator[None]:
        """Draw the panel below all lines printed during the body, if the output is a terminal.

        The last state of the panel remains on the screen.
        """
        makers: list[PanelMaker] = []
        if self._terminal.is_drawable:
            makers = entries.hooks("panel")
        self._is_drawn = bool(makers)
        if not makers:
            yield
            return
        over = threading.Event()
        with self._terminal.keep_panel() as live:
            guard_output()  # rich replaced the filtered streams by its own
            # A thread, because a disk that does not respond must not block the launcher.
            thread = threading.Thread(target=self._draw, args=(live, over, makers[-1]), daemon=True)
            thread.start()
            try:
                yield
            finally:
                over.set()
                thread.join(LAST_S)

    def _draw(self, live: Live, over: threading.Event, panel_of: PanelMaker) -> None:
        """Draw until `over`, and once more. Waits for: the clock. Unblocks: no process."""
        render = panel_of(self._run)
        is_last = False
        while not is_last and self._has_panel():
            is_last = over.wait(DRAW_S)
            self._terminal.draw(live, render)
