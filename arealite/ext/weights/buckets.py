"""Packs named tensors into buckets of bounded size, and unpacks them.

Sender and receiver use one layout, SGLang's `flattened_bucket`: the concatenated bytes of the
tensors, in the order of the names.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

import torch

from arealite.api.engine import Named
from arealite.impl.engine.hf_folder import split


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Names, dtypes and shapes of the tensors in a bucket: three lists of one length."""

    names: list[str]
    dtypes: list[str]
    """Without "torch.": float32, bfloat16, …"""
    shapes: list[list[int]]

    @property
    def num_bytes(self) -> int:
        """Length of the flat tensor."""
        total_bytes = 0
        for dtype_name, shape in zip(self.dtypes, self.shapes, strict=True):
            dtype: torch.dtype = getattr(torch, dtype_name)
            total_bytes += dtype.itemsize * prod(shape)
        return total_bytes


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Some tensors of a model, to be sent one by one or as one tensor of bytes."""

    layout: Layout
    tensors: list[torch.Tensor]
    """Contiguous; in the layout's order."""

    @property
    def flat(self) -> torch.Tensor:
        """The tensors' bytes, copied into one uint8 [layout.num_bytes] on the same device."""
        tensor_bytes = [tensor.view(-1).view(torch.uint8) for tensor in self.tensors]
        return torch.cat(tensor_bytes)


def pack(weights: Iterable[Named], max_bytes: int) -> Iterator[Bucket]:
    """Yield each part of `split` with its layout."""
    for part in split(weights, max_bytes):
        tensors = list(part.values())
        layout = Layout(
            names=list(part),
            dtypes=[str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
            shapes=[list(tensor.shape) for tensor in tensors],
        )
        yield Bucket(layout=layout, tensors=tensors)


def unpack(layout: Layout, flat: torch.Tensor) -> Iterator[Named]:
    """Yield each tensor of a bucket, as a view where its bytes are aligned, else as a copy."""
    begin = 0
    columns = zip(layout.names, layout.dtypes, layout.shapes, strict=True)
    for name, dtype_name, shape in columns:
        dtype: torch.dtype = getattr(torch, dtype_name)
        end = begin + dtype.itemsize * prod(shape)
        tensor_bytes = flat[begin:end]
        is_aligned = begin % dtype.itemsize == 0
        if not is_aligned:
            tensor_bytes = tensor_bytes.clone()
        yield name, tensor_bytes.view(dtype).view(shape)
        begin = end
