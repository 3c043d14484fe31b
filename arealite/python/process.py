"""A command of AReaLite as a child process of a script or a notebook."""

from __future__ import annotations

import codecs
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from arealite.base.errors import ArealiteError, InvariantError, RoleError, UserError
from arealite.impl.launcher.exit_reason import ERROR, exit_reason
from arealite.impl.launcher.processes import GUARD, how_ended

NESTED = "AREALITE_NESTED"
"""Environment variable of all processes that this API starts."""
ENDS_WITH_PARENT = GUARD.replace("kill -9 0", "kill -TERM 0")
"""Shell script: the command gets SIGTERM when this process exits, and writes its checkpoint."""
POLL_S, GRACE_S = 0.2, 15.0
ERRORS: dict[int, type[ArealiteError]] = {2: UserError, 3: InvariantError}
"""The error of an exit code; of all others, RoleError."""
_running = set["Process"]()
"""Keeps running processes: a collected one would close its pipe, which stops the command."""


class Process:
    """A running command. Its output is in the file `log`."""

    def __init__(self, words: Sequence[str], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "arealite.cli.main", *words]
        with log.open("wb") as output:
            self._child = subprocess.Popen(
                ["/bin/sh", "-c", ENDS_WITH_PARENT, "sh", *command],
                stdin=subprocess.PIPE,  # closed when this process ends, whatever the reason
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {NESTED: "1", "PYTHONPATH": os.pathsep.join(own_folders())},
                start_new_session=True,  # Ctrl-C reaches only this process
            )
        self.log, self._shown = log, 0
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        _running.add(self)

    @property
    def code(self) -> int | None:
        """The exit code; None while the command runs."""
        if (code := self._child.poll()) is not None and self in _running:
            _running.discard(self)
            if self._child.stdin:
                self._child.stdin.close()
        return code

    def wait(self) -> int:
        """Print the output until the command ends; return its exit code.

        An interrupt (Ctrl-C, or the stop button of a notebook) is sent on to the command, and
        raised after the command has ended. A second one stops the command at once.
        """
        interrupt: KeyboardInterrupt | None = None
        while True:
            try:
                code = self.code
                self._show()
                if code is not None:
                    break
                self.pause()
            except KeyboardInterrupt as error:
                interrupt = error
                self._child.send_signal(signal.SIGINT)
        if interrupt:
            raise interrupt
        return code

    def until(self, ready: Callable[[], str]) -> str:
        """Return the first text of `ready` that is not empty.

        Raises:
            ArealiteError: The command has ended.
        """
        while not (found := ready()):
            if self.code is not None:
                raise self.error(self.log.stem)
            self.pause()
        return found

    def pause(self) -> None:
        """Wait until the command ends, for at most POLL_S seconds."""
        try:
            self._child.wait(POLL_S)
        except subprocess.TimeoutExpired:
            return

    def stop(self, *numbers: int, grace_s: float | None = None) -> None:
        """Send signals, and return when the command has ended; kill it after `grace_s`."""
        for number in numbers:
            self._child.send_signal(number)
        try:
            self._child.wait(grace_s)
        except subprocess.TimeoutExpired:
            os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait()

    def error(self, what: str) -> ArealiteError:
        """Return the error of a command that failed: its end, its last error line, its log."""
        code = self.code or 0
        why = exit_reason(self.log.read_text("utf-8", "replace"), code).removeprefix(ERROR)
        kind = ERRORS.get(code, RoleError)
        return kind(f"{what} failed ({how_ended(code)}): {why} The log is {self.log}")

    def _show(self) -> None:
        with self.log.open("rb") as file:
            file.seek(self._shown)
            new = file.read()
        self._shown += len(new)
        if text := self._decode(new):
            print(text, end="", flush=True)


def own_folders() -> list[str]:
    """List the folders of `sys.path` from which the command must import, too."""
    installed = tuple(f"{prefix}{os.sep}" for prefix in {sys.prefix, sys.base_prefix})
    every = [folder for folder in sys.path if folder and "-packages" not in folder]
    return [folder for folder in every if not folder.startswith(installed)]
