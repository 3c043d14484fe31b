"""Isolate metric loggers from training: a failing or slow logger is disabled with one warning.

This applies to all loggers except that of metrics.jsonl.
"""

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

LoggerCall = Callable[[MetricLogger], None]

logger = log.get(__name__)

CLOSE_S = 30.0
"""Longest wait of the trainer for the last lines; well below drain_timeout_s."""
MAX_QUEUED_LINES = 1000
"""Number of queued lines at which a slow logger is disabled."""
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|SERVER_URL")
"""Matches the names of secret environment variables."""
MIN_SECRET_CHARS = 8
"""Shorter values are not replaced: they could be parts of other words."""


class IsolatedLogger(MetricLogger):
    """Creates and calls a logger in a thread; disables it, with one warning, when it raises."""

    def __init__(self, run_root: Path, kind: type[MetricLogger]) -> None:
        self.name = kind.__name__
        self._is_disabled = False
        self._calls = queue.Queue[LoggerCall | None](MAX_QUEUED_LINES)
        self._thread = threading.Thread(
            target=self._work, args=(run_root, kind), name=self.name, daemon=True
        )
        self._thread.start()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._enqueue(lambda sink: sink.log(step, metrics))

    def rewind(self, step: int) -> None:
        self._enqueue(lambda sink: sink.rewind(step))

    def close(self) -> None:
        """Wait until the queued lines are written, at most CLOSE_S seconds."""
        self._enqueue(None)
        wait = Wait(
            event=f"the last lines of {self.name}",
            owner="trainer",
            on=f"logger {self.name}",
            seconds=CLOSE_S,
        )
        with wait:
            self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self._disable(f"it did not close within {CLOSE_S:g} s")

    def _enqueue(self, call: LoggerCall | None) -> None:
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._disable(f"it is {MAX_QUEUED_LINES} lines late")

    def _work(self, run_root: Path, kind: type[MetricLogger]) -> None:
        try:
            with closing(kind(run_root)) as sink:
                while True:
                    call = self._calls.get()
                    if call is None or self._is_disabled:
                        break
                    call(sink)
        except Exception as error:  # noqa: BLE001  (training continues after any error)
            self._disable(without_secrets(f"{type(error).__name__}: {error}"))

    def _disable(self, reason: str) -> None:
        if self._is_disabled:
            return
        self._is_disabled = True
        one_line = " ".join(reason.split())
        logger.warning("logger disabled", sink=self.name, why=one_line)


def without_secrets(message: str) -> str:
    """Replace the values of secret environment variables by the variables' names."""
    for name, secret in os.environ.items():
        if len(secret) >= MIN_SECRET_CHARS and SECRET.search(name):
            message = message.replace(secret, f"${name}")
    return message
