"""The Ray launcher: starts every role as the child of an actor in a placement group.

The actor waits for its child and passes signals on. A child dies with its actor, and all actors die
with the launcher's job.
"""

import asyncio
import logging
import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from arealite.api.experiment_config import ExperimentConfig
from arealite.base import exit_record
from arealite.base.errors import UserError
from arealite.base.extras import extra_requirement, import_optional
from arealite.ext.clusters.placement import counts, needed_paths, not_shared
from arealite.impl.launcher.local import LocalLauncher
from arealite.impl.launcher.processes import PARENT, Child
from arealite.system.health.waits import Wait

LOST = -signal.SIGKILL
"""Exit code of a role whose actor or node was lost."""
CONNECT_S = 5.0


class Host:
    """The actor. It has one child process on the node that Ray chose."""

    def __init__(self, folders: Sequence[str]) -> None:
        self.missing = [folder for folder in folders if not Path(folder).exists()]

    def place(self) -> tuple[str, list[str]]:
        """Return this node's address, and the folders that do not exist on it."""
        return library().util.get_node_ip_address(), self.missing

    def start(
        self, command: Sequence[str], folder: str, log: str, environment: dict[str, str]
    ) -> tuple[int, int]:
        """Start the role's process in `folder`.

        Returns:
            Its process id, and the length of the log before the start.
        """
        with Path(log).open("ab") as output:
            begin = output.tell()
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env=os.environ | environment | {PARENT: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        return self.process.pid, begin

    def wait(self) -> int:
        """Wait until the process exits; return its exit code."""
        return self.process.wait()

    def send(self, number: int) -> None:
        """Send a signal to the process."""
        self.process.send_signal(number)


class Process:
    """The child of an actor, with the interface of asyncio's processes."""

    def __init__(self, actor: Any, pid: int, log: Path) -> None:
        self.actor = actor
        self.pid = pid
        self.log = log
        self.returncode: int | None = None
        self._end = asyncio.ensure_future(self._watch())

    async def _watch(self) -> int:
        try:
            code = int(await self.actor.wait.remote())
        except Exception as error:  # noqa: BLE001  (the actor was killed, or its node was lost)
            code = LOST
            reason = " ".join(str(error).split())
            await asyncio.to_thread(self._append_to_log, f"Ray: {reason[:500]}\n")
        self.returncode = code
        return code

    def _append_to_log(self, line: str) -> None:
        with self.log.open("a") as log:
            log.write(line)

    async def wait(self) -> int:
        return await asyncio.shield(self._end)


@dataclass(kw_only=True)
class RayChild(Child):
    """A role's process on some node."""

    def send(self, number: int) -> None:
        self.process.actor.send.remote(number)  # type: ignore[attr-defined]

    def kill(self) -> None:
        library().kill(self.process.actor)  # type: ignore[attr-defined]


class RayLauncher(LocalLauncher):
    """Starts, restarts and ends the roles of one experiment on a Ray cluster."""

    is_remote = True

    def __init__(self, config: ExperimentConfig) -> None:
        super().__init__(config)
        self.bundles = bundles(config)
        self.group: object = None

    def run(self) -> int:
        """Run to the end, once Ray has a place for every role."""
        self.group = reserve(self.config, [*self.bundles.values()])
        try:
            return super().run()
        finally:
            ray = library()
            ray.util.remove_placement_group(self.group)
            ray.shutdown()

    async def spawn(self, name: str, words: Sequence[str], log: Path, env: dict[str, str]) -> Child:
        """Start a role in its bundle; the datapipe stays with the supervisor."""
        if name not in self.bundles:
            return await super().spawn(name, words, log, env)
        actor, address, missing_folders = await self._place(name)
        if missing_folders:
            raise not_shared(missing_folders[0], socket.gethostname(), address)
        try:
            record = exit_record.new_file(log)
            env = {**env, exit_record.VARIABLE: str(record)}
            pid, begin = await actor.start.remote(words, str(Path.cwd()), str(log), env)
        except library().exceptions.RayActorError:  # lost meanwhile; Ray chooses another node
            return await self.spawn(name, words, log, env)
        except OSError as error:
            raise UserError(f"{name} cannot be started on {address}: {error}") from error
        process = Process(actor, pid, log)
        return RayChild(
            name=name,
            process=process,  # type: ignore[arg-type]
            log=log,
            log_begin=begin,
            record=record,
        )

    async def _place(self, name: str) -> tuple[Any, str, list[str]]:
        """Return an actor in a role's bundle, its node's address, and the folders it lacks.

        Raises:
            DeadlineError: Ray has had no place for it for `launcher.ray.start_s`.
        """
        lost_error = library().exceptions.RayActorError
        start_s = self.options.ray.start_s
        with Wait(event=f"a place for {name}", owner="launcher", on="ray", seconds=start_s):
            while True:
                actor = self._actor(name)
                with suppress(lost_error):  # Ray placed the actor on a node that was just lost
                    address, missing_folders = await actor.place.remote()
                    return actor, address, missing_folders

    def _actor(self, name: str) -> Any:
        """Start an actor in the bundle of a role."""
        bundle = self.bundles[name]
        bundle_index = [*self.bundles].index(name)
        strategies = import_module("ray.util.scheduling_strategies")
        actor_class = (
            library()
            .remote(Host)
            .options(
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                max_concurrency=2,  # `send` must work during `wait`
                scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(
                    self.group, bundle_index
                ),
                name=None,
            )
        )
        folders = [self.paths.root, self.vitals.parent, *needed_paths(self.config)]
        return actor_class.remote([str(folder) for folder in folders])

    async def rank_places(self) -> tuple[str, Sequence[int]]:
        scout, address, _ = await self._place("trainer-0")
        del scout  # frees the place for the rank
        return address, [0] * self.options.trainer_ranks


def bundles(config: ExperimentConfig) -> dict[str, dict[str, float]]:
    """Return the resources of each process by its name, without the datapipe, which stays here."""
    ray = config.launcher.ray
    cpus = {"llm_server": ray.cpus, "rollout": ray.cpus, "trainer": ray.trainer_cpus}
    gpus = {"llm_server": ray.server_gpus, "trainer": ray.trainer_gpus}
    resources: dict[str, dict[str, float]] = {}
    for role, count in counts(config).items():
        bundle = {"CPU": cpus[role]}
        if gpus.get(role):
            bundle["GPU"] = gpus[role]
        for index in range(count):
            resources[f"{role}-{index}"] = dict(bundle)
    return resources


def library() -> ModuleType:
    """Import Ray, which is an extra.

    Raises:
        UserError: Ray is not installed.
    """
    return import_optional("ray", extra_requirement("ray"))


def reserve(config: ExperimentConfig, wanted: Sequence[dict[str, float]]) -> object:
    """Connect to the cluster and reserve a bundle for every process.

    Raises:
        UserError: Ray is not installed or does not respond; or the cluster is too small, or has no
            free resources within `launcher.ray.start_s`.
    """
    options = config.launcher.ray
    ray = library()
    _connect(ray, options.address)
    resources = ray.cluster_resources()
    for kind in ("CPU", "GPU"):
        needed = sum(bundle.get(kind, 0.0) for bundle in wanted)
        available = resources.get(kind, 0.0)
        if needed > available:
            raise UserError(
                "the Ray cluster is too small: "
                f"the run needs {needed:g} {kind}s, the cluster has {available:g}. "
                "Lower launcher.* or launcher.ray.*, or add nodes."
            )
    group = ray.util.placement_group([*wanted], strategy="PACK")
    if not group.wait(options.start_s):
        ray.util.remove_placement_group(group)
        free = ray.available_resources()
        raise UserError(
            f"Ray found no place for {len(wanted)} processes "
            f"within launcher.ray.start_s={options.start_s:g} s: "
            f"{free.get('CPU', 0.0):g} CPUs and {free.get('GPU', 0.0):g} GPUs are free. "
            "End other jobs, wait longer, or take less (launcher.ray.*)."
        )
    return group


def _connect(ray: ModuleType, address: str) -> None:
    """Connect to the cluster.

    Raises:
        UserError: The cluster does not respond.
    """
    try:
        host, _, port = address.rpartition(":")
        if host:  # Ray itself tries for minutes
            socket.create_connection((host, int(port)), CONNECT_S).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except (OSError, ValueError, RuntimeError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise UserError(
            f"no Ray cluster at launcher.ray.address={address}: {first_line} "
            "Start one: ray start --head"
        ) from error
