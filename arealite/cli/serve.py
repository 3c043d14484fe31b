"""Serve environments in OpenEnv's wire format: /ws, /reset, /step, /health, …
Several environments are at /env/NAME/ws, and a reset with `env` selects one.

    arealite serve --environments code,math,debate --port 50051

{words}"""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from typing import TextIO

from arealite.api.env_server import EnvServerConfig
from arealite.base import log
from arealite.base.signals import STOP
from arealite.cli import configs
from arealite.cli.options import CommandLine, Word, describe, translate
from arealite.impl.launcher.processes import die_with_parent

WORDS = Word("--environments", "A,B,C", "environments=[{}]"), Word("--port", "N", "server.port={}")
DESCRIPTION = str(__doc__).format(words=describe(WORDS))


def main(argv: Sequence[str]) -> int:
    """Serve rollout workers and clients of OpenEnv until SIGINT or SIGTERM."""
    default = configs.CONFIG_DIR / "env_server.yaml"
    line = CommandLine("arealite serve", DESCRIPTION, EnvServerConfig, default)
    layers = line.parse(translate(argv, WORDS)[0])
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
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with EnvServer(config).serving() as address:
        print(f"{SERVING}{address}", file=parent, flush=True)
        await stopped.wait()
