"""A run of two starts with a service's logger, in a process: services leave threads and hooks.

python -m tests.ext.loggers.service_run LOGGER RUN_ROOT UPLOAD_S
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from arealite.api.logger import loggers
from arealite.ext.loggers import isolated, services
from arealite.ext.loggers.isolated import IsolatedLogger


def main() -> None:
    name, root = sys.argv[1], Path(sys.argv[2])
    services.UPLOAD_S = float(sys.argv[3])
    isolated.CLOSE_S = 120.0
    for begin in (0, 1):
        second = int(time.time())
        sink = IsolatedLogger(root, loggers.get(name))
        sink.rewind(begin)
        for step in range(begin, 3):
            sink.log(step, {"reward/mean": step + 10.0 * begin})
        sink.log(
            2, {"eval/reward": 0.5}
        )  # reported late, like an evaluation concurrent with training
        sink.log(1, {"eval/reward": 0.25})
        sink.close()
        while int(time.time()) == second:  # W&B names its files by the second of the start
            time.sleep(0.01)


if __name__ == "__main__":
    main()
