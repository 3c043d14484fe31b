"""Publishes weights through files: `stage` writes them once, `push` lets all servers load them."""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from urllib.parse import urlsplit

from safetensors import SafetensorError

from arealite.api.engine import Named
from arealite.api.publisher import PublishReport
from arealite.base.errors import RoleError, UserError
from arealite.base.files import make_locked
from arealite.base.folder_checks import check_address
from arealite.base.trial_files import TMPFS
from arealite.impl.engine.hf_folder import copy_small_files, write_weights
from arealite.impl.publisher.control import ServerControl
from arealite.impl.publisher.servers import ServersPublisher, ServersUpdate
from arealite.system.names.name_registry import Entry


class DiskPublisher(ServersPublisher):
    """`stage` writes a version; servers load it at `push`, or when they register later.

    All versions are in one parent folder, at most two at a time. This process locks it, so that a
    later run can find and remove the folders of processes that crashed.
    """

    _lock: int | None = None

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
        begin = time.perf_counter()
        final = self._folder_of(version)
        temporary = self.folder / f".v{version}.tmp"
        try:
            temporary.mkdir()
            write_weights(temporary, self.checked(weights), self.config.bucket_mb << 20)
            copy_small_files(self.model_path, temporary)
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
        return False

    def push(self, version: int) -> PublishReport:
        """Update the servers, then remove every staged version except `version`."""
        report = super().push(version)
        for path in self.folder.glob("v*"):
            if path.name != f"v{version}":
                shutil.rmtree(path, ignore_errors=True)
        return report

    def close(self) -> None:
        super().close()
        if self._lock is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self._lock)
            self._lock = None
            del self.folder  # a later stage makes another one

    async def update_server(self, server: ServerControl, version: int) -> None:
        folder = self._folder_of(version)  # `stage` may write the next version meanwhile

        async def load(server: ServerControl) -> None:
            await server.load_folder(folder, version)

        update = ServersUpdate(self, [server], version)
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
