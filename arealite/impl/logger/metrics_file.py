"""Reads `metrics.jsonl`, which the logger `jsonl` writes."""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

MetricsLine = dict[str, float]
STEP_METRICS = "time/step_s", "reward/mean", "reward/unscored", "train/epoch"
"""Each trained step has one of these metrics."""


class MetricsFile:
    """Reads the file as it grows; from its start when a resumed trainer rewrites it."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._inode = 0
        self._offset = 0
        self._seen_times = set[float]()
        """Times of all lines read. A line with a known time was read before; times are not
        compared otherwise, because the hosts' clocks may differ."""
        self.reset()

    def reset(self) -> None:
        """Drop all lines: the file is read again."""
        self.steps = 0
        """Number of trained steps."""

    def add(self, line: MetricsLine) -> None:
        """Note a line of the file."""
        if is_step(line):
            self.steps = int(line["step"])

    def poll(self) -> list[MetricsLine]:
        """Read the lines written since the last call; return those never read before."""
        new_lines = list[MetricsLine]()
        try:
            raw_lines = self._read_raw()
        except OSError:  # not written yet, or moved
            return new_lines
        for raw_line in raw_lines:
            self._offset += len(raw_line) + 1
            with suppress(msgspec.DecodeError, KeyError):  # incomplete: its writer was killed
                line = msgspec.json.decode(raw_line, type=dict[str, float])
                self.add(line)
                if line["time"] not in self._seen_times:
                    self._seen_times.add(line["time"])
                    new_lines.append(line)
        return new_lines

    def _read_raw(self) -> list[bytes]:
        """Return the complete lines after `_offset`; begin anew if the file was rewritten."""
        with self._file.open("rb") as file:
            stat = os.fstat(file.fileno())
            if stat.st_ino != self._inode or stat.st_size < self._offset:
                self._inode = stat.st_ino
                self._offset = 0
                self.reset()
            file.seek(self._offset)
            *complete_lines, _ = file.read().split(b"\n")
            return complete_lines


def is_step(line: Mapping[str, float]) -> bool:
    """Return whether a line is of a trained step, and not of an evaluation."""
    return not line.keys().isdisjoint(STEP_METRICS)
