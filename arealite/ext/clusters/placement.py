"""Counts the processes of a run, and lists the paths that each host must have."""

import sys
from collections.abc import Iterator
from pathlib import Path

from arealite.api.experiment_config import ExperimentConfig
from arealite.api.fields import Package
from arealite.base.errors import UserError
from arealite.base.extras import extra_requirement


def counts(config: ExperimentConfig) -> dict[str, int]:
    """Return the largest number of processes of each role that a cluster places.

    The datapipe is not included: it runs beside the supervisor.
    """
    options = config.launcher
    if config.trainer.is_offline:
        return {"trainer": options.trainer_ranks}
    return {
        "llm_server": options.llm_servers,
        "rollout": max(options.rollout_workers, options.max_workers),
        "trainer": options.trainer_ranks,
    }


def needed_paths(config: ExperimentConfig) -> list[Path]:
    """Return the paths that a role on another host reads, besides the run's folders."""
    paths = [Path(sys.executable), Path.cwd()]
    for folder in (config.model.path, config.model.adapter):
        if folder:
            paths.append(Path(folder).expanduser().absolute())
    return paths


def not_shared(path: object, here: str, host: str) -> UserError:
    """Return the error for a path that exists on host `here` and not on `host`."""
    return UserError(
        f"{path} is not shared between {here} and {host}. "
        "The working directory, cluster.run_root, cluster.name_root, model.path and Python "
        "must be on a file system that every node mounts."
    )


def packages_of(config: ExperimentConfig) -> Iterator[Package]:
    """Yield the package of the launcher for Ray (hook `packages`)."""
    if config.launcher.type == "ray":
        yield Package("ray", extra_requirement("ray"), "launcher.type=ray")
