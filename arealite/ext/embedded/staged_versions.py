"""Finds the versions that a publisher of this host has staged in memory, and maps their tensors."""

import json
from pathlib import Path

import torch

from arealite.base.trial_files import TMPFS
from arealite.impl.weights.tensor_names import Tensors


def is_staged_in_memory(folder: Path) -> bool:
    """Return whether a publisher has written a folder to memory; its files never change.

    A tensor may therefore be the mapped memory of its file. When the publisher removes the file,
    the memory stays until the server has loaded other weights.
    """
    if not folder.is_relative_to(TMPFS):
        return False
    parents = folder.relative_to(TMPFS).parts[:-1]
    return bool(parents) and parents[0].startswith("arealite-")


def map_floats(file: Path) -> tuple[torch.Tensor, Tensors]:
    """Map a safetensors file of float32 tensors to memory; safe_open takes longer for small ones.

    Returns:
        (all its numbers [N], its tensors by name, which are views of them).
    """
    with file.open("rb") as opened:
        header_bytes = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(header_bytes))
    header.pop("__metadata__", None)
    size = file.stat().st_size // 4
    words = torch.from_file(str(file), shared=False, size=size, dtype=torch.float32)
    numbers = words[2 + header_bytes // 4 :]
    tensors = Tensors()
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        tensors[name] = numbers[begin // 4 : end // 4].view(entry["shape"])
    return numbers, tensors
