"""Print the path of a trial's secret: arealite secret trial_name=a
--token prints the bearer token of its servers: curl -H 'Authorization: Bearer TOKEN'
--rotate creates a new secret; stop all processes of the trial first."""

import os
from collections.abc import Sequence
from pathlib import Path

from arealite.api.experiment_config import ServerConfig
from arealite.base.errors import UserError
from arealite.cli import configs
from arealite.system.names.name_registry import (
    SECRET_FILE,
    NameRegistry,
    Secret,
    put_secret,
    read_secret,
)

ROTATE = "--rotate"
TOKEN = "--token"


def main(argv: Sequence[str]) -> int:
    """Print the path of a trial's secret, or with --token its token; --rotate replaces it first.

    Raises:
        UserError: The trial has no secret, or a live process uses it.
    """
    words = [word for word in argv if word not in (ROTATE, TOKEN)]
    config = configs.parse(ServerConfig, words, command="arealite secret", description=str(__doc__))
    names = NameRegistry.of(config)
    secret = read_secret(names.root)
    if secret is None:
        raise UserError(f"{names.root} has no secret. Start a process of the trial first.")
    if ROTATE in argv:
        for role in ("llm_server", "datapipe"):
            for entry in names.list(role):
                raise UserError(f"{role} {entry.id} uses the secret. Stop the trial first.")
        secret = rotate_secret(names.root)
    print(secret.token if TOKEN in argv else names.root / SECRET_FILE)
    return 0


def rotate_secret(folder: Path) -> Secret:
    """Replace the trial's secret, and return the new one.

    Raises:
        UserError: the folder cannot be written.
    """
    return put_secret(folder, os.replace)
