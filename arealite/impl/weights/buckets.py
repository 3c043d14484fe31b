"""Packs named tensors into buckets of bounded size, and unpacks them.

Sender and receiver use one layout, SGLang's `flattened_bucket`: the concatenated bytes of the
tensors, in the order of the names.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

import torch

Named = tuple[str, torch.Tensor]
"""A tensor and its name."""


@dataclass(frozen=True)
class Layout:
    """Names, dtypes and shapes of the tensors in a bucket: three lists of one length."""

    names: list[str]
    dtypes: list[str]
    """Without "torch.": float32, bfloat16, …"""
    shapes: list[list[int]]

    @property
    def num_bytes(self) -> int:
        """Length of the flat tensor."""
        sizes = (getattr(torch, dtype).itemsize for dtype in self.dtypes)
        return sum(size * prod(shape) for size, shape in zip(sizes, self.shapes, strict=True))


@dataclass(frozen=True)
class Bucket:
    """Some tensors of a model, to be sent one by one or as one tensor of bytes."""

    layout: Layout
    tensors: list[torch.Tensor]
    """Contiguous; in the layout's order."""

    @property
    def flat(self) -> torch.Tensor:
        """The tensors' bytes, copied into one uint8 [layout.num_bytes] on the same device."""
        return torch.cat([tensor.view(-1).view(torch.uint8) for tensor in self.tensors])


def split(weights: Iterable[Named], max_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield contiguous tensors in parts of at most `max_bytes`, in order.

    A larger tensor gets its own part. At most one part is held in memory at a time.
    """
    part = dict[str, torch.Tensor]()
    size = 0
    for name, tensor in weights:
        if part and size + tensor.nbytes > max_bytes:
            yield part
            part = {}
            size = 0
        part[name] = tensor.detach().contiguous()
        size += tensor.nbytes
    if part:
        yield part


def pack(weights: Iterable[Named], max_bytes: int) -> Iterator[Bucket]:
    """Yield each part of `split` with its layout."""
    for part in split(weights, max_bytes):
        tensors = list(part.values())
        dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
        yield Bucket(Layout(list(part), dtypes, [list(t.shape) for t in tensors]), tensors)


def unpack(layout: Layout, flat: torch.Tensor) -> Iterator[Named]:
    """Yield each tensor of a bucket, as a view where its bytes are aligned, else as a copy."""
    start = 0
    for name, dtype, shape in zip(layout.names, layout.dtypes, layout.shapes, strict=True):
        kind: torch.dtype = getattr(torch, dtype)
        end = start + kind.itemsize * prod(shape)
        part = flat[start:end]
        part = part.clone() if start % kind.itemsize else part
        yield name, part.view(kind).view(shape)
        start = end
