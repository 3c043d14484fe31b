"""Append metrics to `metrics.jsonl`, one JSON object per line.

The file has each step once. Only its last line may be incomplete, after a crash.
"""

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from arealite.api.logger import MetricLogger
from arealite.base.files import replacing
from arealite.base.trial_files import RunPaths
from arealite.impl.logger.metrics_file import is_step


class JSONLLogger(MetricLogger):
    """Writes lines of {"step", "time", …metrics}. An evaluation is a line with `eval/…` only."""

    def __init__(self, run_root: Path) -> None:
        self.path = RunPaths(run_root).metrics
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._open()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        row = {"step": step, "time": time.time()}
        for name, number in metrics.items():
            is_finite = number - number == 0.0
            if is_finite:  # JSON has no NaN and no infinity
                row[name] = number
        self._file.write(f"{json.dumps(row)}\n")

    def rewind(self, step: int) -> None:
        """Drop metrics of later steps, evaluations at `step` or later, and an incomplete line."""
        remaining_lines = list[str]()
        for line in self.path.read_text("utf-8").splitlines():
            with suppress(ValueError):  # incomplete: the process was killed while it wrote
                if is_before(json.loads(line), step):
                    remaining_lines.append(f"{line}\n")
        with replacing(self.path) as temporary:
            temporary.write_text("".join(remaining_lines), "utf-8")
            self._file.close()
        self._open()

    def close(self) -> None:
        self._file.close()

    def _open(self) -> None:
        self._file = self.path.open("a", buffering=1, encoding="utf-8")


def is_before(row: dict[str, Any], step: int) -> bool:
    """Return whether a row of metrics stays when training continues after `step`.

    The metrics of `step` itself stay, unless it is 0. Its evaluation does not: it is repeated.
    """
    if row["step"] == step:
        return step > 0 and is_step(row)
    return row["step"] < step
