"""`arealite serve-llm` and launch_llm_server.py: start a language-model server of a trial."""

import asyncio
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from arealite.api.experiment_config import ServerConfig, name_dir, run_paths
from arealite.api.fields import ServerOptions
from arealite.api.hooks import DefaultModel
from arealite.api.llm_server import servers
from arealite.base import config_tree, entries, log, outputs
from arealite.base.errors import UserError
from arealite.base.folder_checks import check_address
from arealite.base.model_folder import read_model
from arealite.base.proxies import bypass_proxies
from arealite.cli import configs, resolved
from arealite.impl.launcher.processes import IS_KEPT, die_with_parent
from arealite.impl.launcher.processes import starters as role_starters
from arealite.system.health import vitals
from arealite.system.names.name_registry import NameRegistry

SCRIPT = Path(__file__).resolve().parents[1] / "launch_llm_server.py"


def with_default_model(config: ServerConfig) -> ServerConfig:
    """Return the config with the model that an extension has for a server without one.

    Raises:
        UserError: No extension has one.
    """
    default_models: list[DefaultModel] = entries.hooks("default_model")
    path = entries.first_result(default_models, config)
    if path is None:
        raise UserError("model.path is not set. Set it to the folder of the model to serve.")
    return replace(config, model=replace(config.model, path=path))


def main(argv: Sequence[str]) -> int:
    """Serve until a stop signal."""
    starters = role_starters()
    if IS_KEPT not in os.environ:
        starters.begin()  # before this process has a thread or a module of the user
    config = configs.parse(
        ServerConfig,
        argv,
        command="launch_llm_server.py",
        description="Start language-model servers of a trial: embedded, SGLang or vLLM.",
    )
    config = resolved.resolve_host(config)
    bypass_proxies(config.llm_server.host)  # SGLang sends itself a first request
    outputs.protect()
    outputs.log_to(run_paths(config).logs / f"llm_server-{socket.gethostname()}.log")
    has_parent = die_with_parent()
    if not config.model.path and not has_parent:
        config = with_default_model(config)
    if not has_parent:  # with a parent, the server waits until the name registry is back
        NameRegistry.of(config).check()
        check_address(config.llm_server.host, config.llm_server.port, at="llm_server")
        read_model(config.model.path or "")
    starter = starters.of_server(config)
    options = config.llm_server.selected_options
    if isinstance(options, ServerOptions) and not os.environ.pop(IS_KEPT, ""):
        with TemporaryDirectory() as folder:
            file = Path(folder) / run_paths(config).server.name
            config_tree.write(config, file)
            code = options.supervise(config, [sys.executable, str(SCRIPT), str(file)], starter)
        if code is not None:
            return code
    starter.close()
    log.setup("llm_server", config.llm_server.log_level)
    vitals.start(f"llm_server-{socket.gethostname()}-{os.getpid()}", name_dir(config) / "vitals")
    server = servers.get(config.llm_server.type)(config)

    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        vitals.watch(runner.get_loop())
        runner.run(server.serve())
    return 0
