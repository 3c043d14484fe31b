"""Run a command while another process takes its CPUs in bursts, as on an overloaded host.

    python3 tools/steal.py 0.45 COMMAND …

The number is the share of time that is taken from each CPU, in bursts of up to LONGEST_S. A test
that passes does not depend on the speed of the machine. `make test STEAL=0.45` uses it, and with
STEAL=0.45 in the environment every part of `.ci/run` does.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence

LONGEST_S = 1.5


def main(argv: Sequence[str]) -> int:
    """Return the command's exit code; 2 if CPUs cannot be taken."""
    try:
        share, command = float(argv[0]), argv[1:]
        if not command or not 0.0 < share < 1.0:
            raise ValueError
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    except (IndexError, ValueError):
        print("error: give the share to take, between 0 and 1, and a command", file=sys.stderr)
        return 2
    except (AttributeError, PermissionError):
        print("error: taking CPUs needs Linux and root (or CAP_SYS_NICE)", file=sys.stderr)
        return 2
    for cpu in os.sched_getaffinity(0):
        multiprocessing.Process(target=steal, args=(cpu, share, os.getpid()), daemon=True).start()
    # Without STEAL: a `make` that the command calls must not take the CPUs a second time.
    environment = {name: value for name, value in os.environ.items() if name != "STEAL"}
    return subprocess.call(command, env=environment)


def steal(cpu: int, share: float, parent: int) -> None:
    """Take a share of one CPU's time from all other processes, until the parent exits."""
    os.sched_setaffinity(0, {cpu})
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    dice = random.Random(cpu)
    while os.getppid() == parent:
        taken = LONGEST_S * dice.random() ** 3  # most are short
        end = time.monotonic() + taken
        while time.monotonic() < end:
            pass
        time.sleep(taken * (1 / share - 1))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
