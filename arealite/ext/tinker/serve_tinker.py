"""Serve training and sampling of one base model to clients of the `tinker` SDK.

    arealite serve-tinker model.path=M tinker.base_model=ORG/NAME
    export TINKER_BASE_URL=http://127.0.0.1:8765 TINKER_API_KEY=tml-…

Each client trains LoRA adapters of its own, beside the others. The command
prints how a client finds it. All options of a session apply, such as
launcher.llm_servers=2 (docs/tinker.md)."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from arealite.api.experiment_config import run_paths
from arealite.base.errors import UserError
from arealite.base.folder_checks import check_name
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
OWN = "tinker."
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
    config = configs.load(TinkerServerConfig, layers.files, layers.overrides)
    preflight.required(config.model.path, "model.path")
    messages.message_types()
    if config.tinker.keys_file is not None:
        read_keys(Path(config.tinker.keys_file))
    words = [word for word in layers.overrides if not word.startswith(OWN)]

    import uvloop

    uvloop.run(_serve(config, words))
    return 0


async def _serve(config: TinkerServerConfig, words: Sequence[str]) -> None:
    from arealite.ext.tinker.tinker_server import TinkerServer

    stopped = asyncio.Event()
    on_stop(asyncio.get_running_loop(), lambda _: stopped.set())
    path = config.model.path
    async with session(path, adapters=[], overrides=words, trial=config.trial_name) as running:
        service = Service(
            running,
            config.tinker,
            base_model=config.tinker.base_model or path,
            tenants=make_tenants(config),
        )
        async with TinkerServer(service, config.tinker).serving() as address:
            print(f"export TINKER_BASE_URL={address}")
            print(f"export TINKER_API_KEY={_key_hint(config)}", flush=True)
            await stopped.wait()


def _key_hint(config: TinkerServerConfig) -> str:
    """Return what a shell needs to find the key, which is not printed."""
    if config.tinker.keys_file is not None:
        return f"…  # the tenant's key in {config.tinker.keys_file}"
    return f"{KEY_PREFIX}$(arealite secret --token trial_name={config.trial_name})"


def make_tenants(config: TinkerServerConfig) -> dict[str, Tenant]:
    """Return the tenants by their keys."""
    root = run_paths(config).root / TENANTS
    if config.tinker.keys_file is None:
        secret = NameRegistry.of(config).secret
        if secret is None:
            raise UserError("cluster.security=false: the trial has no key. Set tinker.keys_file.")
        keys = {f"{KEY_PREFIX}{secret.token}": "default"}
    else:
        keys = read_keys(Path(config.tinker.keys_file))
    return {key: Tenant(name, root / name, config.tinker) for key, name in keys.items()}


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
        check_name(f"tinker.keys_file: line {number}", name)
        if not key.startswith(KEY_PREFIX) or len(key) < MIN_KEY or key in tenants:
            raise UserError(
                f"tinker.keys_file: line {number}: use `TENANT KEY`; a key begins with "
                f"{KEY_PREFIX}, has at least {MIN_KEY} characters, and is no other tenant's."
            )
        tenants[key] = name
    if not tenants:
        raise UserError(f"tinker.keys_file={file}: it has no tenant.")
    return tenants


MIN_KEY = 20
"""Characters of the shortest key."""
