"""Write the files of a Hugging Face folder, a gigabyte of weights at a time.

Exports and published versions are both written by these functions, so they hold the same files.
"""

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from arealite.api.engine import Head, Named
from arealite.base.files import follow_umask

FILE_BYTES = 1 << 30
"""Weights are written in files of about this size; twice as much is held in memory at a time."""
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


def copy_small_files(source: Path, folder: Path) -> None:
    """Copy all files of the Hugging Face folder `source` but the weights."""
    for path in source.iterdir():
        if path.is_file() and not path.name.endswith(WEIGHTS):
            shutil.copyfile(path, folder / path.name)


def write_config(
    folder: Path,
    module: object,
    *,
    dtype: str,
    head: Head,
) -> None:
    """Describe `module` and its weights in the copied config.json of `folder`."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = dtype
    if head == "value":
        config["architectures"] = [type(module).__name__]
        config["id2label"] = {"0": "value"}
        config["label2id"] = {"value": 0}
    file.write_text(json.dumps(config, indent=2) + "\n")


def write_weights(
    folder: Path,
    weights: Iterable[Named],
    max_bytes: int | None = None,
) -> None:
    """Write model.safetensors, or numbered files with their index.

    A file has at most `max_bytes` of tensors (None: FILE_BYTES), or one larger tensor.
    """
    total_bytes = 0
    weight_map = dict[str, str]()
    if max_bytes is None:
        max_bytes = FILE_BYTES
    for number, part in enumerate(split(weights, max_bytes), 1):
        name = f"model-{number:05d}.safetensors"
        file = folder / name
        save_file(part, file, metadata={"format": "pt"})
        follow_umask([file])
        weight_map |= dict.fromkeys(part, name)
        total_bytes += sum(tensor.nbytes for tensor in part.values())
        del part  # else it would live until the next one is complete
    names = set(weight_map.values())
    if len(names) == 1:
        only_file = folder / names.pop()
        only_file.rename(folder / "model.safetensors")
        return
    index = {
        "metadata": {"total_size": total_bytes},
        "weight_map": weight_map,
    }
    index_file = folder / "model.safetensors.index.json"
    index_file.write_text(json.dumps(index, indent=2))


def split(weights: Iterable[Named], max_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield contiguous tensors in parts of at most `max_bytes`, in order.

    A larger tensor gets its own part. At most one part is held in memory at a time.
    """
    part = dict[str, torch.Tensor]()
    part_bytes = 0
    for name, tensor in weights:
        if part and part_bytes + tensor.nbytes > max_bytes:
            yield part
            part = {}
            part_bytes = 0
        part[name] = tensor.detach().contiguous()
        part_bytes += tensor.nbytes
    if part:
        yield part
