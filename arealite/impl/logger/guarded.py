"""Keeps a metric logger from stopping or slowing the training that it tells of.

One rule for all of them, ours and others', but the run's own record, metrics.jsonl: a service that
is away, a full disk and a mistake in a logger cost the run nothing but that logger's lines.
"""

from __future__ import annotations

import os
import queue
import re
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from arealite.api.logger import MetricLogger
from arealite.base import log
from arealite.system.health.waits import Wait

Call = Callable[[MetricLogger], None]

logger = log.get(__name__)

CLOSE_S = 30.0
"""How long the trainer waits for the last lines; with its own end, below drain_timeout_s."""
MOST_LINES = 1000
"""What may wait for a logger that is late, before it is left out."""
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|SERVER_URL")


class GuardedLogger(MetricLogger):
    """Makes and calls a logger in a thread; it is left out, with one warning, when it raises."""

    def __init__(self, run_root: Path, kind: type[MetricLogger]) -> None:
        self.name = kind.__name__
        self._is_out = False
        self._calls = queue.Queue[Call | None](MOST_LINES)
        self._thread = threading.Thread(
            target=self._work, args=(run_root, kind), name=self.name, daemon=True
        )
        self._thread.start()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._give(lambda sink: sink.log(step, metrics))

    def rewind(self, step: int) -> None:
        self._give(lambda sink: sink.rewind(step))

    def close(self) -> None:
        """Wait for what was logged to be written, for CLOSE_S at most."""
        self._give(None)
        what = f"the last lines of {self.name}"
        with Wait(what, owner="trainer", on=f"logger {self.name}", seconds=CLOSE_S):
            self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self._leave_out(f"it did not close within {CLOSE_S:g} s")

    def _give(self, call: Call | None) -> None:
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._leave_out(f"it is {MOST_LINES} lines late")

    def _work(self, run_root: Path, kind: type[MetricLogger]) -> None:
        try:
            with closing(kind(run_root)) as sink:
                while (call := self._calls.get()) is not None and not self._is_out:
                    call(sink)
        except Exception as error:  # noqa: BLE001  (whatever it is, training goes on)
            self._leave_out(without_secrets(f"{type(error).__name__}: {error}"))

    def _leave_out(self, why: str) -> None:
        if not self._is_out:
            self._is_out = True
            logger.warning("logger left out", sink=self.name, why=" ".join(why.split()))


def without_secrets(text: str) -> str:
    """Replace the values of environment variables that hold secrets by the variables' names."""
    for name, value in os.environ.items():
        if len(value) >= 8 and SECRET.search(name):
            text = text.replace(value, f"${name}")
    return text
