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
