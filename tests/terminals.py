"""A pseudo-terminal for a test's child process, and the screen that a user sees."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

TOKENS = re.compile(r"\x1b\[(\??)(\d*)(?:;\d+)*([A-Za-z])|\x1b.|[\r\n\x07]|[^\x1b\r\n\x07]+")
NOT_OURS = ("CI", "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")
LAST = b"\0that is all\0"
"""Marker written to a terminal after its process has exited; output before it is complete."""


class Screen:
    """Lines that a terminal of `columns` × `rows` shows, including those scrolled out."""

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self.lines = [""]
        self.row = self.column = 0
        self.is_cursor_hidden = False

    def feed(self, text: str) -> None:
        for token in TOKENS.finditer(text):
            private, number, command = token[1], int(token[2] or 1), token[3]
            if command == "A":
                self.row = max(self.row - number, len(self.lines) - self.rows, 0)
            elif command == "K":
                self.lines[self.row] = "" if number == 2 else self.lines[self.row][: self.column]
            elif private and number == 25:
                self.is_cursor_hidden = command == "l"
            elif command:
                assert command == "m", f"a sequence that this terminal does not know: {token[0]!r}"
            elif token[0] == "\r":
                self.column = 0
            elif token[0] == "\n":
                self._down()
            elif token[0][0] not in "\x1b\x07":
                self._write(token[0])

    def _down(self) -> None:
        self.row += 1
        self.lines += [""] * (self.row == len(self.lines))

    def _write(self, text: str) -> None:
        for letter in text:
            if self.column == self.columns:
                self.column = 0
                self._down()
            line = self.lines[self.row].ljust(self.column)
            self.lines[self.row] = line[: self.column] + letter + line[self.column + 1 :]
            self.column += 1


class Terminal:
    """A process with its own controlling terminal, like a shell's child."""

    def __init__(
        self, process: subprocess.Popen[bytes], mine: int, its: int, first_mode: int
    ) -> None:
        self.process, self.mine, self.its = process, mine, its
        self.first_mode = first_mode
        """The value of `mode` before the process started."""
        self.written = b""

    def read(self, seconds: float = 0.0) -> str:
        """Return all output so far; wait up to `seconds` for new output."""
        while select.select([self.mine], [], [], seconds)[0]:
            self.written += os.read(self.mine, 65536)
            seconds = 0.0
        return self.written.decode(errors="replace")

    def until(self, words: str, *, then: str = "", seconds: float = 60.0) -> None:
        """Wait until `words` and, after them, `then` were written."""
        end, is_over = time.monotonic() + seconds, False
        wanted = re.compile(f"{re.escape(words)}.*{re.escape(then)}", re.DOTALL)
        while not wanted.search(self.read(0.05)):
            assert not is_over, f"no {words!r} at the end of {self.written[-2000:]!r}"
            is_over = time.monotonic() >= end

    def press(self, keys: str) -> None:
        os.write(self.mine, keys.encode())

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.mine, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def hang_up(self) -> None:
        """Close the terminal, as its window does: the kernel sends SIGHUP, and writes fail."""
        for descriptor in (self.mine, self.its):
            os.close(descriptor)
        self.mine = self.its = -1

    def end(self) -> int:
        """Read output until the process exits; return its exit code.

        The kernel delivers output late, but in order.
        """
        end = time.monotonic() + 60.0
        while self.process.poll() is None and time.monotonic() < end:
            self.read(0.05)
        code = self.process.wait(1.0)
        os.write(self.its, LAST)
        while LAST not in self.written:
            self.read(1.0)
        self.written = self.written.replace(LAST, b"")
        return code

    @property
    def mode(self) -> int:
        """The terminal's input mode: echo, and line buffering."""
        return mode(self.its)

    def screen(self, columns: int = 80, rows: int = 40, *, upto: str = "") -> Screen:
        """Return the screen of all output, or of the output up to the last `upto`, because the
        process may be drawing."""
        screen, text = Screen(columns, rows), self.read()
        screen.feed(text[: text.rindex(upto) + len(upto)])
        return screen


def mode(its: int) -> int:
    """Read a terminal's `Terminal.mode`."""
    return termios.tcgetattr(its)[3] & (termios.ECHO | termios.ICANON)


@contextmanager
def terminal(
    command: Sequence[str], *, columns: int = 80, rows: int = 40, **environment: str
) -> Iterator[Terminal]:
    """Run a command of this Python in its own terminal until the body ends."""
    mine, its = pty.openpty()
    known = {k: v for k, v in os.environ.items() if k not in NOT_OURS} | {"TERM": "xterm"}
    # A session leader gets the first terminal that it opens as its controlling terminal.
    shell = ["sh", "-c", 'exec "$@" 0<>"$0" 1>&0 2>&0', os.ttyname(its), sys.executable, *command]
    opened: Terminal | None = None
    try:
        fcntl.ioctl(mine, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        attributes = termios.tcgetattr(its)
        attributes[3] |= termios.NOFLSH  # a ^C must not discard pending output
        termios.tcsetattr(its, termios.TCSANOW, attributes)
        before = mode(its)
        with subprocess.Popen(shell, start_new_session=True, env=known | environment) as process:
            opened = Terminal(process, mine, its, before)
            try:
                yield opened
            finally:
                process.kill()
    finally:
        if opened is None or opened.mine >= 0:
            os.close(mine)
            os.close(its)


@contextmanager
def closed_pipe() -> Iterator[int]:
    """Yield the writing end of a pipe whose reader has exited."""
    read, write = os.pipe()
    os.close(read)
    try:
        yield write
    finally:
        os.close(write)
