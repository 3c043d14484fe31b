"""`arealite serve-llm` and launch_llm_server.py: start a language-model server of a trial."""

import asyncio
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from arealite.api.experiment_config import ServerConfig, name_dir, run_paths
from arealite.api.llm_server import servers
from arealite.base import log, outputs
from arealite.base.folder_checks import check_address
from arealite.base.model_folder import read_model
from arealite.base.proxies import bypass_proxies
from arealite.cli import configs
from arealite.cli.line_wrap import fold
from arealite.ext.warm_start import modules, starts
from arealite.impl.launcher.processes import die_with_parent
from arealite.impl.launcher.server_supervisor import IS_KEPT, supervise
from arealite.system.health import vitals
from arealite.system.names.name_registry import NameRegistry

KEPT = ("embedded",)
"""Server types that a parent process restarts. Other types restart their own processes."""
SCRIPT = Path(__file__).resolve().parents[1] / "launch_llm_server.py"


def tiny_model(config: ServerConfig) -> ServerConfig:
    """Return the config with a tiny model, which is made if it does not exist."""
    from arealite.ext.demo.sorting import make_kit  # imports torch

    kit = Path(config.cluster.run_root).expanduser() / "demo" / f"kit-seed{config.seed}"
    print(
        fold(
            f"model.path is not set: {kit}/model is served, a tiny model that sorts six digits. "
            "For your own: model.path=FOLDER"
        ),
        flush=True,
    )
    path = str(make_kit(kit, config.seed) / "model")
    return replace(config, model=replace(config.model, path=path))


def main(argv: Sequence[str]) -> int:
    """Serve until a stop signal."""
    # Before this process has a thread or a module of the user.
    warm = None if IS_KEPT in os.environ else starts.fork_here()
    config = configs.parse(
        ServerConfig,
        argv,
        command="launch_llm_server.py",
        description="Start a language-model server with SGLang's HTTP protocol.",
    )
    config = configs.resolve_host(config)
    bypass_proxies(config.llm_server.host)  # SGLang sends itself a first request
    outputs.protect()
    outputs.log_to(run_paths(config).logs / f"llm_server-{socket.gethostname()}.log")
    has_parent = die_with_parent()
    if not config.model.path and not has_parent:
        config = tiny_model(config)
        argv = [*argv, f"model.path={config.model.path}"]
    if not has_parent:  # with a parent, the server waits until the name registry is back
        NameRegistry.of(config).check()
        check_address(config.llm_server.host, config.llm_server.port, at="llm_server")
        read_model(config.model.path or "")
    if config.llm_server.type in KEPT and not os.environ.pop(IS_KEPT, ""):
        stages = modules.server_stages(config)
        if warm is not None:
            warm.stages = stages
        elif starts.is_possible():
            warm = starts.WarmParent(stages, {})
            warm.start()
        return supervise(config, [sys.executable, str(SCRIPT), *argv], warm=warm)
    if warm is not None:
        warm.close()
    log.setup("llm_server", config.llm_server.log_level)
    vitals.start(f"llm_server-{socket.gethostname()}-{os.getpid()}", name_dir(config) / "vitals")
    server = servers.get(config.llm_server.type)(config)

    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        vitals.watch(runner.get_loop())
        runner.run(server.serve())
    return 0
