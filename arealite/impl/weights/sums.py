"""Checksums of tensors that show how two copies of a model differ."""

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from arealite.impl.weights.buckets import Named

Sums = dict[str, tuple[int, float, float]]
"""(dimensions, norm, projection on a fixed vector) of tensors by name. Equal tensors of different
dtypes have nearly equal norms and projections."""


def sums(named: Iterable[Named]) -> Sums:
    """Return the checksum of each tensor."""
    found = Sums()
    for name, tensor in named:
        rows = tensor.detach().reshape(len(tensor) if tensor.ndim > 1 else 1, -1).float()
        left, right = (torch.arange(n, device=rows.device).mul(0.7).cos() for n in rows.shape)
        found[name] = tensor.ndim, float(rows.norm()), float(left @ (rows @ right))
    return found


def constants(model: nn.Module) -> Iterator[Named]:
    """Yield the buffers that no file holds, such as the frequencies of rotary embeddings."""
    stored = model.state_dict()
    yield from ((name, each) for name, each in model.named_buffers() if name not in stored)
