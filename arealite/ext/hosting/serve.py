"""Serve environments in OpenEnv's wire format: /ws, /reset, /step, /health, …
Several environments are at /env/NAME/ws, and a reset with `env` selects one.

    arealite serve --environments code,math,debate --port 50051

{words}"""

import asyncio
import os
import socket
import sys
from collections.abc import Sequence

from arealite.api.experiment_config import run_paths
from arealite.base import log, outputs
from arealite.base.signals import on_stop
from arealite.cli import configs
from arealite.cli.options import CommandLine
from arealite.ext.hosting.server_config import EnvServerConfig
from arealite.ext.short_flags.short_flags import Word, describe, translate
from arealite.impl.launcher.processes import die_with_parent

WORDS = (
    Word("--environments", "A,B,C", "environments=[{}]"),
    Word("--port", "N", "server.port={}"),
)
DESCRIPTION = str(__doc__).format(words=describe(WORDS))


def main(argv: Sequence[str]) -> int:
    """Serve rollout workers and clients of OpenEnv until a stop signal."""
    line = CommandLine(
        command="arealite serve",
        description=DESCRIPTION,
        schema=EnvServerConfig,
        default=configs.CONFIG_DIR / "env_server.yaml",
    )
    words, _ = translate(argv, WORDS)
    layers = line.parse(words)
    die_with_parent()
    # The parent reads only one line of stdout. Other output of the environment would fill the pipe,
    # so it goes to stderr.
    parent = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    config = configs.load(EnvServerConfig, layers.files, layers.overrides)
    outputs.protect()
    outputs.log_to(run_paths(config).logs / f"env_server-{socket.gethostname()}.log")
    log.setup("env_server", config.server.log_level)

    import uvloop

    uvloop.run(_serve(config, parent))
    return 0


async def _serve(config: EnvServerConfig, parent: int) -> None:
    from arealite.ext.hosting.server.env_app import EnvServer
    from arealite.ext.hosting.server.env_messages import SERVING

    stopped = asyncio.Event()
    on_stop(asyncio.get_running_loop(), lambda _: stopped.set())
    async with EnvServer(config).serving() as address:
        try:
            os.write(parent, f"{SERVING}{address}\n".encode())
        except OSError:  # closed or full
            print(f"{SERVING}{address}", flush=True)
        await stopped.wait()
