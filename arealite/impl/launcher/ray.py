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

from arealite.api.config import ExperimentConfig
from arealite.base.errors import UserError
from arealite.base.extras import extra_requirement, import_optional
from arealite.impl.launcher.local import LocalLauncher
from arealite.impl.launcher.processes import PARENT, Child, counts, needed_paths, not_shared
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
        own = os.environ | environment | {PARENT: str(os.getpid())}
        with Path(log).open("ab") as output:
            begin = output.tell()
            self.process = subprocess.Popen(
                command, cwd=folder, env=own, stdin=subprocess.DEVNULL, stdout=output, stderr=output
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
            await asyncio.to_thread(self._note, f"Ray: {reason[:500]}\n")
        self.returncode = code
        return code

    def _note(self, text: str) -> None:
        with self.log.open("a") as log:
            log.write(text)

    async def wait(self) -> int:
        return await asyncio.shield(self._end)


@dataclass
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
        actor, address, missing = await self._place(name)
        if missing:
            raise not_shared(missing[0], socket.gethostname(), address)
        try:
            pid, begin = await actor.start.remote(words, str(Path.cwd()), str(log), env)
        except library().exceptions.RayActorError:  # lost meanwhile; Ray chooses another node
            return await self.spawn(name, words, log, env)
        except OSError as error:
            raise UserError(f"{name} cannot be started on {address}: {error}") from error
        return RayChild(name, Process(actor, pid, log), log, begin)  # type: ignore[arg-type]

    async def _place(self, name: str) -> tuple[Any, str, list[str]]:
        """Return an actor in a role's bundle, its node's address, and the folders it lacks.

        Raises:
            DeadlineError: Ray has had no place for it for `launcher.ray.start_s`.
        """
        lost = library().exceptions.RayActorError
        seconds = self.options.ray.start_s
        with Wait(f"a place for {name}", owner="launcher", on="ray", seconds=seconds):
            while True:
                actor = self._actor(name)
                with suppress(lost):  # Ray placed the actor on a node that was just lost
                    return actor, *await actor.place.remote()

    def _actor(self, name: str) -> Any:
        needs = self.bundles[name]
        number = [*self.bundles].index(name)
        strategies = import_module("ray.util.scheduling_strategies")
        place = strategies.PlacementGroupSchedulingStrategy(self.group, number)
        needed = (self.paths.root, self.vitals.parent, *needed_paths(self.config))
        # Two concurrent calls: `send` must work during `wait`.
        options = {"num_cpus": needs["CPU"], "num_gpus": needs.get("GPU", 0), "max_concurrency": 2}
        made = library().remote(Host).options(**options, scheduling_strategy=place, name=None)
        return made.remote([str(path) for path in needed])

    async def rank_places(self) -> tuple[str, Sequence[int]]:
        scout, address, _ = await self._place("trainer-0")
        del scout  # frees the place for the rank
        return address, [0] * self.options.trainer_ranks


def bundles(config: ExperimentConfig) -> dict[str, dict[str, float]]:
    """Return the resources of each process by its name, without the datapipe, which stays here."""
    ray = config.launcher.ray
    cpus = {"llm_server": ray.cpus, "rollout": ray.cpus, "trainer": ray.trainer_cpus}
    gpus = {"llm_server": ray.server_gpus, "trainer": ray.trainer_gpus}
    return {
        f"{role}-{index}": {"CPU": cpus[role]} | ({"GPU": gpus[role]} if gpus.get(role) else {})
        for role, count in counts(config).items()
        for index in range(count)
    }


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
    try:
        host, _, port = options.address.rpartition(":")
        if host:  # Ray itself tries for minutes
            socket.create_connection((host, int(port)), CONNECT_S).close()
        ray.init(address=options.address, log_to_driver=False, logging_level=logging.WARNING)
    except (OSError, ValueError, RuntimeError) as error:
        line = str(error).strip().splitlines()[0]
        what = f"no Ray cluster at launcher.ray.address={options.address}"
        raise UserError(f"{what}: {line} Start one: ray start --head") from error
    has = ray.cluster_resources()
    for kind in ("CPU", "GPU"):
        needs = sum(bundle.get(kind, 0.0) for bundle in wanted)
        if needs > has.get(kind, 0.0):
            what = f"the run needs {needs:g} {kind}s, the cluster has {has.get(kind, 0.0):g}"
            fix = "Lower launcher.* or launcher.ray.*, or add nodes."
            raise UserError(f"the Ray cluster is too small: {what}. {fix}")
    group = ray.util.placement_group([*wanted], strategy="PACK")
    if not group.wait(options.start_s):
        ray.util.remove_placement_group(group)
        free = ray.available_resources()
        left = f"{free.get('CPU', 0.0):g} CPUs and {free.get('GPU', 0.0):g} GPUs are free"
        what = f"{len(wanted)} processes within launcher.ray.start_s={options.start_s:g} s: {left}"
        fix = "End other jobs, wait longer, or take less (launcher.ray.*)."
        raise UserError(f"Ray found no place for {what}. {fix}")
    return group
