"""Writes one policy version as a Hugging Face folder that servers on this host, or all hosts, can
read.

Apart from the publisher, because what is on the disk must be right (atomic, bounded, cleaned up)
whoever reads it.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from arealite.base.errors import RoleError

if TYPE_CHECKING:
    import torch

TMPFS = Path("/dev/shm")
SHARD_BYTES = 4 * 2**30
"""Weights are written in files of about this size, so that no more is held in memory at a time."""
SKIPPED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
"""Endings of the model folder's own weights; all its other files travel with each version."""


class Staging:
    """One process's folder of staged versions, locked while it lives; at most the newest two are
    kept."""

    def __init__(self, parent: Path, model_path: Path | None) -> None:
        """Make `<parent>/arealite-<uid>-<pid>-…` (0700) and remove the folders of dead processes
        beside it."""
        self.model_path = model_path
        prefix = f"arealite-{os.getuid()}-"
        parent.mkdir(parents=True, exist_ok=True)
        for leftover in parent.glob(f"{prefix}*"):
            _remove_if_dead(leftover)
        new = Path(tempfile.mkdtemp(dir=parent, prefix=".arealite-"))
        self._lock = _lock(new)  # before the name under which others look for leftovers
        self.folder = new.rename(parent / f"{prefix}{os.getpid()}-{new.name[-8:]}")

    def write(self, version: int, weights: Iterator[tuple[str, torch.Tensor]]) -> tuple[Path, int]:
        """Write `weights` as version `version`; return its folder and the number of bytes.

        Raises:
            RoleError: the disk is full or not writable; nothing half-written is left.
        """
        final = self.folder / f"v{version}"
        temporary = self.folder / f".v{version}.tmp"
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            num_bytes = _write_weights(temporary, weights)
            self._copy_model_files(temporary)
            shutil.rmtree(final, ignore_errors=True)
            temporary.rename(final)
        except Exception as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if not _is_io(error):
                raise
            raise RoleError(
                f"weights of version {version} could not be staged in {self.folder}: {error}. "
                "Make room there, or point trainer.ppo.publisher.disk.dir elsewhere. No server "
                "was paused."
            ) from error
        return final, num_bytes

    def keep_only(self, version: int) -> None:
        """Remove every staged version but one."""
        for path in self.folder.glob("v*"):
            if path.name != f"v{version}":
                shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)

    def _copy_model_files(self, folder: Path) -> None:
        for path in sorted(self.model_path.iterdir()) if self.model_path else []:
            if path.is_file() and not path.name.endswith(SKIPPED):
                shutil.copyfile(path, folder / path.name)


def _write_weights(folder: Path, weights: Iterator[tuple[str, torch.Tensor]]) -> int:
    """Write model.safetensors, or numbered shards and their index where one file would be too
    large."""
    from safetensors.torch import save_file

    shard: dict[str, torch.Tensor] = {}
    held, total, names = 0, 0, {}

    def flush() -> None:
        file = f"model-{len(set(names.values())) + 1:05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        names.update(dict.fromkeys(shard, file))
        shard.clear()

    for name, tensor in weights:
        size = tensor.numel() * tensor.element_size()
        if shard and held + size > SHARD_BYTES:
            flush()
            held = 0
        shard[name] = tensor.detach().contiguous()
        held, total = held + size, total + size
    flush()
    files = sorted(set(names.values()))
    if len(files) == 1:
        (folder / files[0]).rename(folder / "model.safetensors")
    else:
        index = {"metadata": {"total_size": total}, "weight_map": names}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def _is_io(error: Exception) -> bool:
    """Say whether the disk failed; safetensors raises an error class of its own, with the OS's text
    in it."""
    return isinstance(error, OSError) or type(error).__name__ == "SafetensorError"


def _lock(folder: Path) -> int:
    handle = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return handle


def _remove_if_dead(folder: Path) -> None:
    """Remove a folder whose owner's lock is gone: locks end with their process, pids come again."""
    with suppress(OSError):
        os.close(_lock(folder))
        shutil.rmtree(folder, ignore_errors=True)
