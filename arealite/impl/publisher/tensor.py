"""Publishes weights in the bodies of requests: for servers that see none of our folders.

Versions are staged as files here, one a bucket, so that a server that comes late can have the
newest one too.
"""

from __future__ import annotations

import asyncio
import base64
import pickle
from pathlib import Path

from safetensors.torch import load_file

from arealite.base.errors import RoleError
from arealite.base.names import TMPFS
from arealite.impl.publisher.control import Server
from arealite.impl.publisher.disk import DiskPublisher

PATH = "/update_weights_from_tensor"


class TensorPublisher(DiskPublisher):
    """A bucket is a request; the last one brings the version."""

    async def bring(self, server: Server, version: int) -> None:
        if server.can.tensor is None:
            raise RoleError(f"{server.address} takes no tensors; use publisher.type=disk")
        await super().bring(server, version)

    async def load(self, server: Server, folder: Path, version: int, *, flush: bool) -> None:
        can = server.can
        files = await asyncio.to_thread(lambda: sorted(folder.glob("*.safetensors")))
        await server.begin()
        for file in files:
            last = file is files[-1]
            part = await asyncio.to_thread(encode, file, pickled=can.tensor == "pickle")
            body = {"serialized_named_tensors": [part] * can.tp}
            number = version if last else None
            await server.update(PATH, body, version=number, flush=flush and last)
        await server.end()

    def parent(self) -> Path:
        """Return where versions are staged: only this process reads them."""
        return TMPFS if TMPFS.is_dir() else self.fallback_dir


def encode(file: Path, *, pickled: bool) -> str:
    """Return a bucket in base64: a safetensors file's bytes, or SGLang's pickle of its tensors."""
    raw = pickle.dumps(list(load_file(file).items())) if pickled else file.read_bytes()
    return base64.b64encode(raw).decode()
