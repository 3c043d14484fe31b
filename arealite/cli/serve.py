"""`arealite serve`: serve an environment in OpenEnv's wire format, to rollout workers and OpenEnv's
clients."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TextIO

from arealite.api.env_server import EnvServerConfig
from arealite.base import log
from arealite.base.signals import STOP
from arealite.cli import configs, options
from arealite.impl.launcher.processes import die_with_parent


def main(argv: Sequence[str]) -> int:
    """Serve until SIGINT or SIGTERM."""
    layers = options.parse(
        argv,
        command="arealite serve",
        description="Serve an environment in OpenEnv's wire format: /ws, /reset, /step, /health, …",
        schema=EnvServerConfig,
        default=configs.CONFIG_DIR / "env_server.yaml",
    )
    die_with_parent()
    # The parent reads only one line of stdout. Other output of the environment would fill the pipe,
    # so it goes to stderr.
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as parent:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        config = configs.load(EnvServerConfig, layers.files, layers.overrides)
        log.setup("env_server", config.server.log_level)

        import uvloop

        uvloop.run(_serve(config, parent))
    return 0


async def _serve(config: EnvServerConfig, parent: TextIO) -> None:
    from arealite.impl.env_server.app import EnvServer
    from arealite.impl.env_server.wire import SERVING

    stopped = asyncio.Event()
    for number in (STOP, signal.SIGINT):
        with suppress(NotImplementedError, RuntimeError, ValueError):  # not the main thread
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with EnvServer(config).serving() as address:
        print(f"{SERVING}{address}", file=parent, flush=True)
        await stopped.wait()
