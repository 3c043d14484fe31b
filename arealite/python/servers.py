"""Servers of environments and models as context managers."""

from __future__ import annotations

import signal
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from arealite.api import env as env_api
from arealite.api.config import ServerConfig, run_paths
from arealite.api.env import Env
from arealite.api.env_server import EnvServerConfig
from arealite.cli import configs
from arealite.impl.env_server.wire import SERVING
from arealite.python.command import Overrides, checked, model_folder, words
from arealite.python.objects import registered, word
from arealite.python.process import GRACE_S, Process
from arealite.system.names.registry import NameRegistry


class Server:
    """A running server. `close` stops it, as the end of a `with` block and of this process do."""

    def __init__(self, process: Process, address: str) -> None:
        self._process = process
        self.address = address
        """host:port."""

    def close(self) -> None:
        """Stop the server."""
        self._process.stop(signal.SIGTERM, grace_s=GRACE_S)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(
    envs: str | type[Env] | Sequence[str | type[Env]],
    *,
    port: int = 0,
    overrides: Overrides = None,
) -> Server:
    """Serve environments in OpenEnv's wire format, as `arealite serve` does.

    Args:
        envs: Registered environments, by name or class.
        port: The port; 0: a free one.
        overrides: Other options, as in {"server.max_sessions": 64}.

    Returns:
        The server, which accepts connections at its `address`.

    Raises:
        UserError: The input is wrong.
    """

    def check() -> tuple[EnvServerConfig, list[str]]:
        every = [envs] if isinstance(envs, str | type) else [*envs]
        parts = [registered(each, env_api.envs) for each in every]
        names, imports = [name for name, _ in parts], [m for _, more in parts for m in more]
        own = [*words(overrides), word("server.port", port)]
        own += [word("imports", imports)] if imports else []
        own += [word("env.type", names[0])] if len(names) == 1 else []
        made = configs.load(EnvServerConfig, configs.CONFIG_DIR / "env_server.yaml", own)
        for name in names:
            env_api.envs.check(name)
        return made, [*own, *(["--environments", ",".join(names)] if len(names) > 1 else [])]

    made, argv = checked(check)
    process = Process(["serve", *argv], _log(made, "serve"))

    def listening() -> str:
        lines = process.log.read_text("utf-8", "replace").splitlines()
        return next((x.removeprefix(SERVING) for x in lines if x.startswith(SERVING)), "")

    return Server(process, process.until(listening).strip())


def serve_llm(model: str | Path, *, overrides: Overrides = None) -> Server:
    """Serve a model, as `arealite serve-llm` does.

    Runs and evaluations with the same experiment_name and trial_name use the server.

    Args:
        model: A Hugging Face folder, or the id of a model of the Hugging Face Hub.
        overrides: Other options, as in {"trial_name": "mine", "llm_server.type": "sglang"}.

    Raises:
        UserError: The input is wrong.
    """

    def check() -> tuple[ServerConfig, list[str]]:
        own = [*words(overrides), word("model.path", model_folder(model))]
        return configs.load(ServerConfig, configs.CONFIG_DIR / "llm_server.yaml", own), own

    made, argv = checked(check)
    names = NameRegistry.of(made)
    known = {entry.id for entry in names.list("llm_server")}
    process = Process(["serve-llm", *argv], _log(made, "serve-llm"))

    def listening() -> str:
        new = [entry for entry in names.list("llm_server") if entry.id not in known]
        return str(new[0].value["address"]) if new else ""

    return Server(process, process.until(listening))


def _log(config: Any, kind: str) -> Path:
    folder = run_paths(config).root.parent
    return folder / f"{kind}-{uuid.uuid4().hex[:8]}.log"
