"""The live progress line of a run: reads metrics.jsonl as it grows and shows the newest step.

Apart from the launcher, because what a person sees is not what a process does.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from rich.console import Console

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


class Progress:
    """Shows one line a step: rewritten in place on a terminal, printed every `every` steps
    elsewhere."""

    def __init__(
        self, metrics: Path, total_steps: int, *, evaluates: bool = False, every: int = 5
    ) -> None:
        self._file = metrics
        self._inode = self._offset = 0
        self._total = total_steps
        self.newest = -1
        """The furthest step that was trained since."""
        self._evaluates, self._evaluated = evaluates, -1
        self._every = every
        self._console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
        self._read = set[float]()
        """Times of the lines so far: equal ones are one, but another host's clock orders none."""
        self._new_lines()  # an earlier run's

    @property
    def trained(self) -> bool:
        """Whether the last step is trained; only one rank is needed for what comes then."""
        return self.newest + 1 >= self._total

    @property
    def finished(self) -> bool:
        """Whether the last step is trained and, where the run `evaluates`, evaluated."""
        return self._evaluated >= self._total if self._evaluates else self.trained

    def poll(self) -> None:
        """Show what was written since the last call."""
        for metrics in self._new_lines():
            self.show(metrics)

    def _new_lines(self) -> list[dict[str, float]]:
        found = list[dict[str, float]]()
        if not self._file.exists():
            return found
        if (inode := self._file.stat().st_ino) != self._inode:  # a resumed trainer writes it anew
            self._inode, self._offset = inode, 0
        with self._file.open("rb") as file:
            file.seek(self._offset)
            lines = file.read().split(b"\n")
        for line in lines[:-1]:
            self._offset += len(line) + 1
            with suppress(ValueError):  # torn: its writer was killed
                metrics = json.loads(line)
                if metrics["time"] not in self._read:
                    self._read.add(metrics["time"])
                    found.append(metrics)
        return found

    def show(self, metrics: dict[str, float]) -> None:
        """Show one line of metrics."""
        step = int(metrics["step"])
        if held_out := [key for key in ("eval/loss", "eval/accuracy") if key in metrics]:
            self._evaluated = step
            told = ", ".join(f"{key.removeprefix('eval/')} {metrics[key]:.3f}" for key in held_out)
            self._console.print(f"eval at step {step}: held-out {told}")
        if not metrics.keys() & {"reward/mean", "train/epoch"}:
            return
        self.newest = max(self.newest, step)
        self._total = int(metrics.get("train/total_steps", self._total))
        done = step + 1
        parts = [f"step {done}/{self._total}"]
        parts += [
            f"{label} {form.format(metrics[key])}" for label, key, form in COLUMNS if key in metrics
        ]
        text = "  ".join(parts)
        if self._console.is_terminal:
            self._console.print(f"\r\x1b[2K{text}", end="\n" if done == self._total else "")
        elif done == 1 or done % self._every == 0 or done == self._total:
            self._console.print(text)

    def say(self, text: str) -> None:
        """Print a line of its own."""
        if self._console.is_terminal:
            self._console.print("\r\x1b[2K", end="")
        self._console.print(text)
