"""Checksums of tensors that show how two copies of a model differ.

A checksum is a norm and a projection on a fixed vector, so equal tensors of different dtypes have
nearly equal checksums. A tensor that stacks experts has one checksum for each of them.
"""

from collections.abc import Iterable, Iterator

import msgspec
import torch
from torch import nn

from arealite.impl.weights.buckets import Named

MAX_EXPERTS = 1024
"""A tensor of three dimensions has one checksum for each index of a first dimension up to this."""


class TensorSum(msgspec.Struct, frozen=True, array_like=True):
    """The checksum of one tensor."""

    dims: int
    """Number of dimensions."""
    parts: list[tuple[float, float]]
    """Norm and projection; of each expert if the tensor has three dimensions."""


Sums = dict[str, TensorSum]
"""Checksums by the name of the tensor."""


def sums(named: Iterable[Named]) -> Sums:
    """Return the checksum of each tensor."""
    return {name: _sum(tensor.detach()) for name, tensor in named}


def constants(model: nn.Module) -> Iterator[Named]:
    """Yield the buffers that no file holds, such as the frequencies of rotary embeddings."""
    stored = model.state_dict()
    yield from ((name, each) for name, each in model.named_buffers() if name not in stored)


def _sum(tensor: torch.Tensor) -> TensorSum:
    is_stacked = tensor.ndim == 3 and len(tensor) <= MAX_EXPERTS
    return TensorSum(tensor.ndim, [_of_part(part) for part in (tensor if is_stacked else [tensor])])


def _of_part(tensor: torch.Tensor) -> tuple[float, float]:
    rows = tensor.reshape(len(tensor) if tensor.ndim > 1 else 1, -1).float()
    left, right = (torch.arange(n, device=rows.device).mul(0.7).cos() for n in rows.shape)
    return float(rows.norm()), float(left @ (rows @ right))
