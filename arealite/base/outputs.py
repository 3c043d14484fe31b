"""Keep a command running although its stdout or stderr cannot be written.

A reader that exits (`| head`), a terminal that closes and a full disk do not end a run. The text
then goes to the run's log file.
"""

import io
import os
import select
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from arealite.base.printable import PrintableStream, unguarded

STREAMS = ("stdin", "stdout", "stderr")
"""Names of the standard streams; the index is the file descriptor."""
MAX_PENDING_BYTES = 1 << 16

_closed_at_start = set[int]()
_outputs = list["ProtectedOutput"]()


class ProtectedOutput(io.FileIO):
    """A standard output whose `write` never fails; if it cannot be written, a log gets the text."""

    log: Path | None = None
    """Shared by all outputs of this process; None until `log_to` is called."""
    is_announced = False
    """Whether the log has a line that says that an output is closed. Shared like `log`."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._error = "closed at the start" if descriptor in _closed_at_start else ""
        """Reason why the output cannot be written; "" while it can."""
        self._is_diverted = False
        """Whether the file descriptor is the log."""
        self._pending = b""
        """Text for a log that is not known yet."""

    def write(self, data: Any) -> int:
        """Write all of `data`, or store it for the log; return its length."""
        unwritten = bytes(data)
        while unwritten:
            if self._error and not self._is_diverted:
                self._pending = (self._pending + unwritten)[:MAX_PENDING_BYTES]
                break
            try:
                count = super().write(unwritten)
            except OSError as error:
                if self._is_diverted:  # the disk of the log is full: the text is lost
                    break
                self._error = str(error)
                self.divert()
                continue
            if count is None:  # another program made the output non-blocking
                select.select([], [self], [])
            else:
                unwritten = unwritten[count:]
        return len(data)

    def divert(self) -> None:
        """Make the log this output's file, also for child processes. No-op while both are fine."""
        log = ProtectedOutput.log
        if not self._error or log is None:
            return
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        except OSError:
            descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, self.fileno())
        os.close(descriptor)
        self._is_diverted = True
        if not ProtectedOutput.is_announced:
            ProtectedOutput.is_announced = True
            line = f"{STREAMS[self.fileno()]} is closed or full ({self._error}): its text is here\n"
            self.write(line.encode())
        self.write(self._pending)
        self._pending = b""


def open_missing() -> None:
    """Open /dev/null as each standard stream that this process was started without.

    Otherwise the next file or socket would get its number, and the text of libraries with it.
    """
    for descriptor, name in enumerate(STREAMS):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest number
            _closed_at_start.add(descriptor)
            setattr(sys, name, open(descriptor, "w" if descriptor else "r", closefd=False))  # noqa: SIM115


def protect() -> None:
    """Make every later write to stdout and stderr succeed, for the rest of this process."""
    for descriptor in () if _outputs else (1, 2):
        stream = unguarded(getattr(sys, STREAMS[descriptor]))
        with suppress(OSError):  # a test replaced the stream by one without a file
            if stream.fileno() != descriptor:
                continue
            with suppress(OSError):
                stream.flush()
            output = ProtectedOutput(descriptor)
            _outputs.append(output)
            is_unbuffered = stream.write_through
            text_stream: Any = io.TextIOWrapper(
                output if is_unbuffered else io.BufferedWriter(output),
                encoding=stream.encoding,
                errors=stream.errors,
                line_buffering=stream.line_buffering,
                write_through=is_unbuffered,
            )
            setattr(sys, STREAMS[descriptor], PrintableStream(text_stream))


def is_protected() -> bool:
    """Return whether `protect` was called."""
    return bool(_outputs)


def log_to(log: Path) -> None:
    """Set the file that gets the text of outputs that cannot be written."""
    if log != ProtectedOutput.log:
        ProtectedOutput.log = log
        ProtectedOutput.is_announced = False
        for output in _outputs:
            output.divert()
