"""Append metrics to `metrics.jsonl`, one JSON object per line.

The file has each step once. Only its last line may be incomplete, after a crash.
"""

import json
import time
from contextlib import suppress
from pathlib import Path

from arealite.api.logger import MetricLogger
from arealite.base.files import replacing
from arealite.base.names import RunPaths
from arealite.system.health.snapshot import is_step


class JSONLLogger(MetricLogger):
    """Writes lines of {"step", "time", …metrics}. An evaluation is a line with `eval/…` only."""

    def __init__(self, run_root: Path) -> None:
        self.path = RunPaths(run_root).metrics
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._open()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        # Leave out NaN and infinity, which are not JSON.
        numbers = {key: value for key, value in metrics.items() if value - value == 0.0}
        self._file.write(json.dumps({"step": step, "time": time.time(), **numbers}) + "\n")

    def rewind(self, step: int) -> None:
        """Drop metrics of later steps, evaluations at `step` or later, and an incomplete line."""
        kept: list[str] = []
        for line in self.path.read_text("utf-8").splitlines():
            with suppress(ValueError):  # incomplete: the process was killed while it wrote
                read = json.loads(line)
                if read["step"] < step + (step > 0 and is_step(read)):
                    kept.append(line)
        with replacing(self.path) as temporary:
            temporary.write_text("".join(f"{line}\n" for line in kept), "utf-8")
            self._file.close()
        self._open()

    def close(self) -> None:
        self._file.close()

    def _open(self) -> None:
        self._file = self.path.open("a", buffering=1, encoding="utf-8")
