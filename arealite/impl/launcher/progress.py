"""Progress of a run: lines on stdout, or the console of an extension."""

import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

from arealite.api.launcher_hooks import Console, ConsoleMaker
from arealite.base import entries
from arealite.base.printable import printable
from arealite.base.trial_files import RunPaths
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


class RunProgress:
    """Prints lines of the launcher, and the progress of the run.

    A console with a panel shows the progress itself; elsewhere, a line every `every` steps.
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
        self._console: Console | None = None
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
        has_panel = self._console is not None and self._console.has_panel
        if is_due and not has_panel:
            self.say("  ".join(columns))

    def _show_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._evaluated = step
        scores = [
            f"{name} {metrics[f'eval/{name}']:.3f}"
            for name in ("reward", "loss", "accuracy")
            if f"eval/{name}" in metrics
        ]
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
        if self._console is None:
            sys.stdout.write(f"{printable(line)}\n")
            sys.stdout.flush()
        else:
            self._console.print(line)

    @contextmanager
    def shown(self) -> Generator[None]:
        """Show the run on the console of an extension, during the body, if there is one.

        The console then prints all lines, also after the body.
        """
        makers: list[ConsoleMaker] = entries.hooks("console")
        consoles = entries.results(makers, self._run)
        if not consoles:
            yield
            return
        self._console = consoles[-1]
        with self._console.shown():
            yield
