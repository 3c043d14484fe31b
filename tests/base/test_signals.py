"""The signal that requests a process to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from arealite.base.signals import OWN_STOP

ROLE = """
import signal, time
from arealite.base.signals import STOP, ignore_other_stops
ignore_other_stops()
signal.signal(STOP, lambda *_: exit(7))
print("ready", flush=True)
while True:  # not pause(): a signal just before it would be waited for in vain
    time.sleep(0.02)
"""


@pytest.mark.parametrize(("own", "number"), [("", signal.SIGTERM), ("1", signal.SIGUSR2)])
def test_stop_signal_is_sigterm_or_sigusr2_if_configured(own: str, number: int):
    process = subprocess.Popen(
        [sys.executable, "-c", ROLE], stdout=subprocess.PIPE, env=os.environ | {OWN_STOP: own}
    )
    with process:
        assert process.stdout is not None and process.stdout.readline()
        if own:
            process.send_signal(signal.SIGTERM)
        process.send_signal(number)
        assert process.wait(60) == 7


END = """
import os, signal, sys
from arealite.base import signals
signals.ignore_other_stops()
class Last:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGTERM):
        kill(pid, number)
        print("sent")
last = Last()  # is deleted after the interpreter has reset its signal handlers
sys.exit(7)
"""


def test_sigterm_at_the_end_of_the_interpreter_does_not_replace_the_exit_code():
    """A scheduler sends SIGTERM to every process of a run, also to one that is exiting."""
    environment = os.environ | {OWN_STOP: "1"}
    done = subprocess.run(
        [sys.executable, "-c", END], capture_output=True, text=True, env=environment, timeout=60
    )
    assert (done.returncode, done.stdout) == (7, "sent\n"), done.stderr


def test_ignored_signal_has_its_default_action_in_child_processes():
    code = "import signal, subprocess, sys\nfrom arealite.base.signals import ignore\n"
    code += "ignore(signal.SIGUSR1)\nsys.exit(subprocess.run(['sh', '-c', 'kill -USR1 $$'])"
    code += ".returncode == -signal.SIGUSR1)\n"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 1


STOPS = """
import asyncio, os, signal
from arealite.base.signals import on_stop
async def main():
    numbers = []
    on_stop(asyncio.get_running_loop(), lambda number: numbers.append(signal.Signals(number).name))
    for name in ORDER:
        os.kill(os.getpid(), signal.Signals[name])
        for _ in range(3):  # the loop reads the signal, then calls its handler
            await asyncio.sleep(0)
    print(*numbers)
asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("ignored", "order", "handled"),
    [
        pytest.param("", "INT TERM HUP", "INT TERM", id="hang-up after Ctrl-C"),
        pytest.param("", "HUP HUP TERM", "HUP TERM", id="a terminal closes"),
        pytest.param("HUP", "HUP INT", "INT", id="nohup"),
        pytest.param("INT QUIT", "INT HUP", "INT", id="background job of a script"),
    ],
)
def test_stop_handler_gets_each_request_once(ignored: str, order: str, handled: str):
    script = STOPS.replace("ORDER", repr([f"SIG{name}" for name in order.split()]))
    trap = f"trap '' {ignored}; " if ignored else ""
    shell = ["/bin/sh", "-c", f'{trap}exec "$@"', "sh", sys.executable, "-c", script]
    done = subprocess.run(shell, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [f"SIG{name}" for name in handled.split()], done.stderr
