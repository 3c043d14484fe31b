"""Writes one policy version as a Hugging Face folder that the servers can read.

Apart from the publisher, because what is on the disk must be right whoever reads it: whole,
bounded, cleaned up.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from arealite.base.errors import RoleError
from arealite.impl.engine.hf_folder import copy_small_files, write_weights
from arealite.system.locks import lock_folder, remove_unheld

if TYPE_CHECKING:
    import torch


class Staging:
    """One process's folder of staged versions, locked while it lives; holds at most two."""

    def __init__(self, parent: Path, model_path: Path) -> None:
        """Make `<parent>/arealite-<uid>-<pid>-…` (0700), and remove what dead processes left."""
        self.model_path = model_path
        prefix = f"arealite-{os.getuid()}-"
        parent.mkdir(parents=True, exist_ok=True)
        remove_unheld(parent.glob(f"{prefix}*"))
        new = Path(tempfile.mkdtemp(dir=parent, prefix=".arealite-"))
        self._lock = lock_folder(new)  # before the name under which others look for leftovers
        self.folder = new.rename(parent / f"{prefix}{os.getpid()}-{new.name[-8:]}")

    def write(
        self, version: int, weights: Iterator[tuple[str, torch.Tensor]], file_bytes: int
    ) -> Path:
        """Write `weights` as version `version`; return its folder. A file's tensors are held once.

        Raises:
            RoleError: the disk is full or not writable; nothing half-written is left.
        """
        final = self.folder / f"v{version}"
        temporary = self.folder / f".v{version}.tmp"
        try:
            temporary.mkdir()
            write_weights(temporary, weights, file_bytes)
            copy_small_files(self.model_path, temporary)
            shutil.rmtree(final, ignore_errors=True)
            temporary.rename(final)
        except (OSError, SafetensorError) as error:
            raise RoleError(
                f"weights of version {version} could not be staged in {self.folder}: {error}. "
                "Make room there, or point trainer.ppo.publisher.disk.dir elsewhere. No server "
                "was paused."
            ) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return final

    def keep_only(self, version: int) -> None:
        """Remove every staged version but one."""
        for path in self.folder.glob("v*"):
            if path.name != f"v{version}":
                shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)
