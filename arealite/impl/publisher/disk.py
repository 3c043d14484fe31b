"""Publishes weights through files: staged first, then loaded by all servers at the same time."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from arealite.api.publisher import PublishReport
from arealite.base.names import TMPFS
from arealite.impl.publisher.control import Server
from arealite.impl.publisher.servers import ServersPublisher
from arealite.impl.publisher.staging import Staging
from arealite.system.names.registry import Entry

if TYPE_CHECKING:
    import torch


class DiskPublisher(ServersPublisher):
    """Weights on tmpfs or a shared folder."""

    _staging: Staging | None = None
    _folder = Path()
    """Of the newest version."""

    def stage(self, version: int, weights: Iterator[tuple[str, torch.Tensor]]) -> bool:
        begin = time.perf_counter()
        if self._staging is None:
            self._staging = Staging(self.parent(), self.model_path)
        size = self.config.bucket_mb << 20
        self._folder = self._staging.write(version, self.noted(weights), size)
        self.newest = version
        self.stage_s = time.perf_counter() - begin
        return False

    def push(self, version: int) -> PublishReport:
        report = super().push(version)
        assert self._staging is not None, "a version is staged before it is pushed"
        self._staging.keep_only(version)
        return report

    def close(self) -> None:
        super().close()
        if self._staging is not None:
            self._staging.close()
            self._staging = None

    async def bring(self, server: Server, version: int) -> None:
        body: dict[str, Any] = {"model_path": str(self._folder), "load_format": "auto"}

        async def load(server: Server, flush: bool) -> None:
            path = "/update_weights_from_disk"
            await server.update(path, body, version=version, flush=flush)

        mode, seconds = self.config.pause_mode, self.config.timeout_s
        await server.bring(version, load, mode=mode, seconds=seconds)

    def parent(self) -> Path:
        """Return where versions are staged."""
        if self.config.disk.dir is not None:
            return Path(self.config.disk.dir).expanduser().absolute()
        entries = self.registry.list("llm_server")
        shared = TMPFS.is_dir() and all(_is_here(entry) for entry in entries)
        return TMPFS if shared else self.paths.weights


def _is_here(entry: Entry) -> bool:
    """Say whether a server shares this host's tmpfs: only own addresses can be bound."""
    host = urlsplit(str(entry.value["address"])).hostname
    family = socket.AF_INET6 if ":" in str(host) else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True
