"""Let the commands of `arealite.train` in this process be forks of tests.docs.fork_server."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SERVER = "FORK_SERVER"
"""Environment variable of notebooks: the server's socket."""
CLIENT = Path(__file__).with_name("fork_client.py")
_init = subprocess.Popen.__init__


def install(server: str) -> None:
    """Change `subprocess.Popen`, with the socket of the server."""

    def init(self: Any, command: Any, *arguments: Any, **options: Any) -> None:
        if is_guarded(command):
            client = [sys.executable, "-I", "-S", str(CLIENT), server]
            command = [*command[:4], *client, *command[4:]]
        _init(self, command, *arguments, **options)

    subprocess.Popen.__init__ = init  # type: ignore[method-assign]


def uninstall() -> None:
    """Restore `subprocess.Popen`."""
    subprocess.Popen.__init__ = _init  # type: ignore[method-assign]


def is_guarded(command: Any) -> bool:
    """Return whether a shell runs a command of AReaLite; see arealite.ext.notebook.command_line."""
    if not isinstance(command, Sequence) or isinstance(command, str):
        return False
    program = [sys.executable, "-m", "arealite.cli.main"]
    return list(command[:2]) == ["/bin/sh", "-c"] and list(command[4:7]) == program
