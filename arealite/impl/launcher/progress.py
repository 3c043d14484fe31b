"""What a launcher's console shows of its run: a panel on a terminal, elsewhere a line now and then.

Apart from the launcher, because what a person sees is not what a process does.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.live import Live

from arealite.base.names import RunPaths
from arealite.base.printable import guard_output
from arealite.impl.view.terminal import Terminal
from arealite.system.health.snapshot import Metrics, RunReader, is_step

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
"""What is shown: label, metric, format."""
DRAW_S, LAST_S = 1.0, 5.0
"""How often the panel is drawn, and how long its last state may take."""


class Progress:
    """Says what happens; besides, every `every` steps, or all the time where the panel can be
    drawn, how far the run is."""

    def __init__(
        self, metrics: Path, total_steps: int, *, evaluates: bool = False, every: int = 5
    ) -> None:
        self._metrics, self._run = Metrics(metrics), RunPaths(metrics.parent)
        self.total = total_steps
        self.newest = 0
        """The furthest step that was trained since."""
        self._evaluates, self._evaluated = evaluates, -1
        self.is_unevaluated = False
        """Whether the newest evaluation has no result."""
        self._every = every
        self._terminal, self._is_drawn = Terminal(), False
        self._metrics.poll()  # an earlier run's

    @property
    def trained(self) -> bool:
        """Whether the last step is trained; only one rank is needed for what comes then."""
        return self.newest >= self.total

    @property
    def finished(self) -> bool:
        """Whether the last step is trained and, where the run `evaluates`, evaluated."""
        return self._evaluated >= self.total if self._evaluates else self.trained

    def poll(self) -> None:
        """Show what was written since the last call."""
        for metrics in self._metrics.poll():
            self.show(metrics)

    def show(self, metrics: Mapping[str, float]) -> None:
        """Show one line of metrics."""
        step = int(metrics["step"])
        if any(key.startswith("eval/") for key in metrics):
            self._evaluated = step
            held_out = [n for n in ("reward", "loss", "accuracy") if f"eval/{n}" in metrics]
            told = ", ".join(f"{name} {metrics[f'eval/{name}']:.3f}" for name in held_out)
            self.is_unevaluated = not told
            told = f"held-out {told}" if told else "every sample failed"
            self.say(f"eval at step {step}: {told}")
        if not is_step(metrics):
            return
        self.newest = max(self.newest, step)
        self.total = int(metrics.get("train/total_steps", self.total))
        parts = [f"step {step}/{self.total}"]
        parts += [
            f"{label} {form.format(metrics[key])}" for label, key, form in COLUMNS if key in metrics
        ]
        is_due = step == 1 or step % self._every == 0 or step == self.total
        if is_due and not self._is_drawn:
            self.say("  ".join(parts))

    def say(self, text: str) -> None:
        """Print a line of its own."""
        self._terminal.print(text)

    @contextmanager
    def shown(self) -> Generator[None]:
        """Keep the panel below what is said in the body's time, where it can be drawn; its last
        state stays."""
        self._is_drawn = self._terminal.is_drawable
        if not self._is_drawn:
            yield
            return
        over = threading.Event()
        with self._terminal.keep_panel() as live:
            guard_output()  # rich has put its own streams before ours; they obey terminal codes
            # A thread, because a store or a disk that is away must not hold the launcher up.
            thread = threading.Thread(target=self._draw, args=(live, over), daemon=True)
            thread.start()
            try:
                yield
            finally:
                over.set()
                thread.join(LAST_S)

    def _draw(self, live: Live, over: threading.Event) -> None:
        """Draw until it is over, and once more. Waits for: the clock. Unblocks: nobody."""
        watch = RunReader(self._run)
        while not over.wait(DRAW_S):
            self._terminal.draw(live, watch)
        self._terminal.draw(live, watch)
