"""Publishes weights through files: `stage` writes them once, `push` lets all servers load them."""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from urllib.parse import urlsplit

from safetensors import SafetensorError

from arealite.api.engine import Named, TrainEngine
from arealite.api.experiment_config import ExperimentConfig
from arealite.api.publisher import PublishReport
from arealite.base import log
from arealite.base.errors import RoleError, UserError
from arealite.base.files import make_locked
from arealite.base.folder_checks import check_address
from arealite.base.host import return_free_memory
from arealite.base.model_folder import read_shapes
from arealite.base.trial_files import TMPFS
from arealite.impl.engine.hf_folder import copy_small_files, write_weights
from arealite.impl.publisher.control import ServerControl, ServerRefusal
from arealite.impl.publisher.servers import ServersPublisher, ServersUpdate
from arealite.impl.weights.float_file import write_floats
from arealite.system.names.name_registry import Entry

logger = log.get(__name__)

ADAPTER_CONFIG = "adapter_config.json"


class DiskPublisher(ServersPublisher):
    """`stage` writes a version; servers load it at `push`, or when they register later.

    All versions are in one parent folder, at most two at a time. This process locks it, so that a
    later run can find and remove the folders of processes that crashed.
    """

    _lock: int | None = None

    def __init__(self, config: ExperimentConfig, engine: TrainEngine) -> None:
        self._adapter_config = getattr(engine, "adapter_config", None)
        super().__init__(config, engine)

    @cached_property
    def folder(self) -> Path:
        """The parent `<parent>/arealite-<uid>-<pid>-…` (0700); removes those of ended processes."""
        parent = self.parent()
        parent.mkdir(parents=True, exist_ok=True)
        folder, self._lock = make_locked(parent, f"arealite-{os.getuid()}-")
        return folder

    def stage(self, version: int, weights: Iterator[Named]) -> bool:
        """Write the weights in files of about `bucket_mb`.

        Raises:
            RoleError: The disk is full or not writable. Incomplete files are removed.
        """

        def write(folder: Path) -> None:
            return_free_memory()  # the files may be in memory, too
            write_weights(folder, self.checked(weights), self.config.bucket_mb << 20)
            copy_small_files(self.model_path, folder)

        self._stage(version, write)
        return False

    def _stage(self, version: int, write: Callable[[Path], None]) -> None:
        """Let `write` fill a folder, which becomes that of the version when it is complete."""
        begin = time.perf_counter()
        final = self._folder_of(version)
        temporary = self.folder / f".v{version}.tmp"
        try:
            temporary.mkdir()
            write(temporary)
            shutil.rmtree(final, ignore_errors=True)
            temporary.rename(final)
        except (OSError, SafetensorError) as error:
            raise RoleError(
                f"weights of version {version} could not be staged in {self.folder}: {error}. "
                "Make room there, or point trainer.ppo.publisher.disk.dir elsewhere. "
                "No server was paused."
            ) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        self.newest = version
        self.stage_s = time.perf_counter() - begin

    @property
    def takes_adapter(self) -> bool:
        """Whether servers are registered, and all of them serve adapters of the run's model."""
        if self._adapter_config is None:
            return False
        servers = self.call(self._find_servers())
        return bool(servers) and all(map(self._serves_adapter, servers))

    def stage_adapter(self, version: int, matrices: Iterator[Named]) -> bool:
        """Write the adapter as peft does; see `stage`."""
        tensors = dict(matrices)
        self.num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        if not self.shapes:
            shapes = read_shapes(self.model_path)
            self.shapes = {name: shapes[name] for name in shapes.keys() - self.unused}

        def write(folder: Path) -> None:
            write_floats(folder / "adapter_model.safetensors", tensors)
            config = json.dumps(self._adapter_config)
            (folder / ADAPTER_CONFIG).write_text(config)

        self._stage(version, write)
        return False

    @property
    def needs_republish(self) -> bool:
        """Whether a server cannot load the newest version, because it is an adapter alone."""
        if super().needs_republish:
            return True
        servers = [*self._servers.values()]
        return self._is_adapter(self.newest) and not all(map(self._serves_adapter, servers))

    def _serves_adapter(self, server: ServerControl) -> bool:
        is_base = Path(server.folder).resolve() == self.model_path.resolve()
        return is_base and server.takes_adapter(self._adapter_config or {})

    def _is_adapter(self, version: int | None) -> bool:
        """Return whether a staged version is an adapter alone."""
        if self._adapter_config is None or version is None:
            return False
        return (self._folder_of(version) / ADAPTER_CONFIG).exists()

    def push(self, version: int) -> PublishReport:
        """Update the servers, then remove every staged version except `version`."""
        report = super().push(version)
        for path in self.folder.glob("v*"):
            if path.name != f"v{version}":
                shutil.rmtree(path, ignore_errors=True)
        return report

    def close(self) -> None:
        super().close()
        with self._closing:
            lock = self._lock
            self._lock = None
        if lock is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(lock)
            del self.folder  # a later stage makes another one

    async def update_server(self, server: ServerControl, version: int) -> None:
        folder = self._folder_of(version)  # `stage` may write the next version meanwhile
        is_adapter = self._is_adapter(version)
        if is_adapter and not self._serves_adapter(server):
            raise RoleError(f"{server.id} needs whole weights, which the trainer sends next")

        async def load(server: ServerControl) -> None:
            if not is_adapter:
                await server.load_folder(folder, version)
                return
            try:
                await server.load_adapter(folder, version)
            except ServerRefusal as error:
                server.serves_adapters = False  # it may load whole weights
                logger.warning(
                    "adapter refused: all servers get merged weights",
                    server=server.id,
                    error=str(error),
                )
                raise

        update = ServersUpdate(self, [server], version)
        if is_adapter and server.can.names_adapters:
            update.begin()
        else:
            await update.pause()
        await update.send(load)
        await update.finish()

    def _folder_of(self, version: int) -> Path:
        """Return the Hugging Face folder of a version."""
        return self.folder / f"v{version}"

    def parent(self) -> Path:
        """Return the folder of staged versions: `disk.dir`, or tmpfs if shared, or the run's."""
        if self.config.disk.dir is not None:
            return Path(self.config.disk.dir).expanduser().absolute()
        entries = self.registry.list("llm_server")
        is_shared = TMPFS.is_dir() and all(_is_here(entry) for entry in entries)
        return TMPFS if is_shared else self.paths.weights


def _is_here(entry: Entry) -> bool:
    """Return whether a server runs on this host: only a local address can be bound."""
    url = urlsplit(str(entry.value["address"]))
    with suppress(UserError):
        check_address(str(url.hostname), at="server")
        return True
    return False
