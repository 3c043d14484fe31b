"""Removes the files that dead processes of a trial left outside its run folder."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path

from arealite.api.config import ExperimentConfig, name_dir, run_paths
from arealite.base.names import TMPFS
from arealite.system.health.diagnosis import read_roles
from arealite.system.health.snapshot import is_alive
from arealite.system.health.vitals import STACKS_REQUEST
from arealite.system.locks import remove_unlocked
from arealite.system.names.registry import NameRegistry


def clear(config: ExperimentConfig, *kinds: str) -> None:
    """Remove vitals, names and staged weights of the trial's dead processes on this host.

    A process belongs to the trial if the trial's vitals name it; its staged weights are in folders
    with its process id. Files of other trials are not touched.

    Args:
        config: Experiment of the trial.
        kinds: Kinds of roles, for example "trainer", of which no process runs on any host.
    """
    folder, names = name_dir(config) / "vitals", NameRegistry.of(config, ttl_s=math.inf)
    dead = {role.name: role.vitals.pid for role in read_roles(folder) if not is_alive(role)}
    words = [*(f"{name}." for name in dead), *(f"{kind}-" for kind in kinds)]
    words += [STACKS_REQUEST] if kinds else []
    own = config.trainer.ppo.publisher.disk.dir
    with suppress(OSError):  # the folder is away: nothing depends on this
        for word in words:
            for file in [*folder.glob(f"{word}*"), *folder.glob(f".{word}*")]:
                file.unlink(missing_ok=True)
        for parent in (TMPFS, run_paths(config).weights, Path(own or TMPFS).expanduser()):
            for pid in dead.values():
                remove_unlocked(parent.glob(f"arealite-{os.getuid()}-{pid}-*"))
        for name in dead:
            names.remove(*name.split("-", 1))
        for kind in kinds:
            for entry in names.list(kind):
                names.remove(kind, entry.id)
