"""`arealite serve-llm` and launch_llm_server.py: one language-model server, registered under the
trial's names."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from arealite.api.config import ServerConfig
from arealite.api.llm_server import servers
from arealite.base import log
from arealite.cli import configs, options


def main(argv: Sequence[str]) -> int:
    """Serve until SIGINT or SIGTERM."""
    file, overrides = options.parse(
        argv,
        command="launch_llm_server.py",
        about="Start a language-model server that speaks SGLang's protocol.",
        schema=ServerConfig,
        default=configs.CONFIG_DIR / "llm_server.yaml",
    )
    config = configs.load(ServerConfig, file, overrides)
    log.setup("llm_server", config.llm_server.log_level)
    server = servers.get(config.llm_server.type)(config)

    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(server.serve())
    return 0
