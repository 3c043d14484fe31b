"""Run a command of AReaLite in a fork of fork_server.py, as the program `arealite` would run it.

    python -I -S fork_client.py SOCKET WORDS…

The signals FORWARDED are sent to the fork. Its exit code or signal ends this process, too. If this
process is killed, the server kills the fork.
"""

import contextlib
import json
import os
import signal
import socket
import struct
import sys

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)


def forward(pid: int, number: int) -> None:
    """Send a signal to the fork, which may have exited."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def main() -> None:
    """Send the command with the working directory and the streams; wait for its end."""
    address, *words = sys.argv[1:]
    server = socket.socket(socket.AF_UNIX)
    server.connect(address)
    body = json.dumps({"words": words, "environment": dict(os.environ)}).encode()
    folder = os.open(".", os.O_PATH)
    socket.send_fds(server, [struct.pack("!I", len(body))], [folder, 0, 1, 2])
    server.sendall(body)
    answers = server.makefile("r")
    pid = int(answers.readline())
    for number in FORWARDED:
        signal.signal(number, lambda number, _: forward(pid, number))
    code = int(answers.readline())
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


main()
