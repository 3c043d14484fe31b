"""Serve training and sampling of one base model to clients of the `tinker` SDK.

    arealite serve-tinker model.path=M tinker.base_model=ORG/NAME
    export TINKER_BASE_URL=http://127.0.0.1:8765 TINKER_API_KEY=tml-…

Each client trains LoRA adapters of its own, beside the others. The command
prints how a client finds it. All options of a session apply, such as
launcher.llm_servers=2 (docs/tinker.md)."""

import asyncio
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from arealite.api.experiment_config import run_paths
from arealite.base.errors import UserError
from arealite.base.signals import on_stop
from arealite.cli import configs, preflight
from arealite.cli.options import CONFIG_DIR, CommandLine
from arealite.ext.session.opening import session
from arealite.ext.tinker import messages
from arealite.ext.tinker.config import TinkerServerConfig
from arealite.ext.tinker.service import Service, Tenant
from arealite.system.names.name_registry import NameRegistry

KEY_PREFIX = "tml-"
"""The SDK requires it."""
MIN_KEY = 20
"""Characters of the shortest key."""
TENANT_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")
TINKER = "tinker."
"""Begins the options of the service; all others are a session's."""
KEY_FILE = "tinker.key"
TENANTS = "tenants"
"""Folder of the tenants' checkpoints in the trial's folder."""


def main(argv: Sequence[str]) -> int:
    """Serve until a stop signal.

    Raises:
        UserError: The input is wrong. No process was started.
    """
    line = CommandLine(
        command="arealite serve-tinker",
        description=str(__doc__),
        schema=TinkerServerConfig,
        default=CONFIG_DIR / "async_ppo.yaml",
    )
    layers = line.parse(argv)
    if layers.files != [line.default]:
        raise UserError("arealite serve-tinker reads no file: write its options as key=value.")
    config = configs.load(TinkerServerConfig, layers.files, layers.overrides)
    preflight.required(config.model.path, "model.path")
    messages.message_types()
    keys_file = config.tinker.keys_file
    tenant_by_key = read_keys(Path(keys_file)) if keys_file is not None else {}
    session_words = [word for word in layers.overrides if not word.startswith(TINKER)]

    import uvloop

    uvloop.run(_serve(config, session_words, tenant_by_key))
    return 0


async def _serve(
    config: TinkerServerConfig,
    session_words: Sequence[str],
    tenant_by_key: Mapping[str, str],
) -> None:
    from arealite.ext.tinker.tinker_server import TinkerServer

    stopped = asyncio.Event()
    on_stop(asyncio.get_running_loop(), lambda _: stopped.set())
    path = config.model.path
    started = session(
        path,
        servers=config.launcher.llm_servers or None,
        addresses=config.llm_server.addresses,
        adapters=[],
        trial=config.trial_name,
        overrides=session_words,
    )
    async with started as running:
        service = Service(
            running,
            config.tinker,
            base_model=config.tinker.base_model or path,
            tenants=make_tenants(config, tenant_by_key or own_key(config)),
        )
        async with TinkerServer(service, config.tinker).serving() as address:
            print(f"export TINKER_BASE_URL={address}")
            print(f"export TINKER_API_KEY={_key_hint(config)}", flush=True)
            await stopped.wait()


def _key_hint(config: TinkerServerConfig) -> str:
    """Return how a shell finds the key, which is not printed."""
    if config.tinker.keys_file is not None:
        return f"…  # the tenant's key in {config.tinker.keys_file}"
    return f"$(cat {run_paths(config).root / KEY_FILE})"


def make_tenants(
    config: TinkerServerConfig,
    tenant_by_key: Mapping[str, str],
) -> dict[str, Tenant]:
    """Return the tenants by their keys."""
    root = run_paths(config).root / TENANTS
    options = config.tinker
    return {key: Tenant(name, root / name, options) for key, name in tenant_by_key.items()}


def own_key(config: TinkerServerConfig) -> Mapping[str, str]:
    """Write the key of a service with one tenant to KEY_FILE; return {key: tenant}.

    Raises:
        UserError: The trial has no secret, from which the key is derived.
    """
    secret = NameRegistry.of(config).secret
    if secret is None:
        raise UserError("cluster.security=false: the trial has no key. Set tinker.keys_file.")
    key = f"{KEY_PREFIX}{secret.derive(TENANTS).hex()}"
    write_private(run_paths(config).root / KEY_FILE, key)
    return {key: "default"}


def write_private(file: Path, text: str) -> None:
    """Write a file that only its owner can read."""
    file.unlink(missing_ok=True)
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
        opened.write(text)


def read_keys(file: Path) -> Mapping[str, str]:
    """Read a file with a line `TENANT KEY` for each tenant; return {key: tenant}.

    Raises:
        UserError: The file is missing, other users can read it, or a line is wrong.
    """
    try:
        mode = file.stat().st_mode
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"tinker.keys_file={file}: {error}") from error
    if mode & 0o077:
        raise UserError(f"tinker.keys_file={file}: others may read it. Run chmod 600.")
    tenants = dict[str, str]()
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        name, _, key = line.strip().partition(" ")
        is_key = key.startswith(KEY_PREFIX) and len(key) >= MIN_KEY and key not in tenants
        if not is_key or not TENANT_NAME.fullmatch(name) or name in tenants.values():
            raise UserError(  # the line may have a key: it is not shown
                f"tinker.keys_file: line {number}: use `TENANT KEY`. A tenant is letters, digits, "
                f"'_' and '-'; a key begins with {KEY_PREFIX} and has at least {MIN_KEY} "
                "characters; both are in one line only."
            )
        tenants[key] = name
    if not tenants:
        raise UserError(f"tinker.keys_file={file}: it has no tenant.")
    return tenants
