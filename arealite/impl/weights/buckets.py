"""Packs named tensors into flat buckets of bounded size, and unpacks them.

One layout for both sides of a wire: SGLang's `flattened_bucket`, the tensors' bytes one after the
other, in the order of the names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch


@dataclass(frozen=True)
class Layout:
    """What the bytes of a bucket are; the three lists have one length."""

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
    """Some tensors of a model as one."""

    layout: Layout
    flat: torch.Tensor
    """uint8 [layout.num_bytes], on the tensors' device."""


def pack(weights: Iterable[tuple[str, torch.Tensor]], max_bytes: int) -> Iterator[Bucket]:
    """Yield buckets of at most `max_bytes`, in order; a larger tensor has a bucket to itself.

    No more than one bucket's tensors are held at a time, and the bucket.
    """
    part, held = list[tuple[str, torch.Tensor]](), 0
    for name, tensor in weights:
        if part and held + tensor.nbytes > max_bytes:
            yield _join(part)
            part, held = [], 0
        part.append((name, tensor))
        held += tensor.nbytes
    if part:
        yield _join(part)


def unpack(layout: Layout, flat: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor of a bucket, as a view where its bytes are aligned, else as a copy."""
    start = 0
    for name, dtype, shape in zip(layout.names, layout.dtypes, layout.shapes, strict=True):
        kind: torch.dtype = getattr(torch, dtype)
        end = start + kind.itemsize * prod(shape)
        part = flat[start:end]
        part = part.clone() if start % kind.itemsize else part
        yield name, part.view(kind).view(shape)
        start = end


def _join(part: Sequence[tuple[str, torch.Tensor]]) -> Bucket:
    tensors = [tensor.detach().contiguous() for _, tensor in part]
    layout = Layout(
        names=[name for name, _ in part],
        dtypes=[str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
        shapes=[list(tensor.shape) for tensor in tensors],
    )
    return Bucket(layout, torch.cat([tensor.view(-1).view(torch.uint8) for tensor in tensors]))
