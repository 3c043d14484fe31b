"""Writes and maps safetensors files of many small float32 tensors, such as those of an adapter.

`save_file` and `safe_open` take longer for the objects of hundreds of tensors than for their bytes.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from arealite.impl.weights.tensor_names import Tensors

METADATA = "__metadata__"


def write_floats(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors on the CPU to a safetensors file, in float32."""
    header: dict[str, object] = {METADATA: {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin = end
        end += 4 * tensor.numel()
        header[name] = {
            "dtype": "F32",
            "shape": [*tensor.shape],
            "data_offsets": [begin, end],
        }
    encoded = json.dumps(header).encode()
    num_spaces = -len(encoded) % 8
    encoded += b" " * num_spaces
    with file.open("wb") as opened:
        header_bytes = len(encoded)
        opened.write(header_bytes.to_bytes(8, "little"))
        opened.write(encoded)
        for tensor in tensors.values():
            floats = tensor.float().contiguous()
            opened.write(floats.numpy().data)


def map_floats(file: Path) -> tuple[torch.Tensor, Tensors]:
    """Map a file of float32 tensors to memory; its header is padded to 8 bytes.

    `write_floats` and `save_file` pad it.

    Returns:
        (all its numbers [N], its tensors by name, which are views of them).
    """
    with file.open("rb") as opened:
        length = opened.read(8)
        header_bytes = int.from_bytes(length, "little")
        header = json.loads(opened.read(header_bytes))
    header.pop(METADATA, None)
    file_bytes = file.stat().st_size
    words = torch.from_file(
        str(file),
        shared=False,
        size=file_bytes // 4,
        dtype=torch.float32,
    )
    num_header_words = 2 + header_bytes // 4
    numbers = words[num_header_words:]
    tensors = Tensors()
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        flat = numbers[begin // 4 : end // 4]
        tensors[name] = flat.view(entry["shape"])
    return numbers, tensors
