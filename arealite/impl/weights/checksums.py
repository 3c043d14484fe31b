"""Tests tensors: checksums show how two copies of a model differ; all numbers must be finite."""

from collections.abc import Iterable, Iterator
from itertools import chain

import torch
from torch import nn

from arealite.base.errors import UserError
from arealite.impl.weights.buckets import Named

Sums = dict[str, tuple[int, float, float]]
"""(dimensions, norm, projection on a fixed vector) of each tensor by name. Copies of a tensor in
different dtypes have nearly equal norms and projections."""


def sums(named: Iterable[Named], model: nn.Module | None) -> Sums:
    """Return the checksum of each tensor, and of each buffer of the model that is in no file.

    The frequencies of rotary embeddings are such buffers.
    """
    checksums = Sums()
    unstored_buffers = _unstored_buffers(model) if model is not None else ()
    for name, tensor in chain(named, unstored_buffers):
        num_rows = len(tensor) if tensor.ndim > 1 else 1
        matrix = tensor.detach().reshape(num_rows, -1).float()
        left = _fixed_vector(matrix.shape[0], matrix.device)
        right = _fixed_vector(matrix.shape[1], matrix.device)
        norm = float(matrix.norm())
        projection = float(left @ (matrix @ right))
        checksums[name] = tensor.ndim, norm, projection
    return checksums


def _unstored_buffers(model: nn.Module) -> Iterator[Named]:
    """Yield the buffers of a model that are in no file."""
    stored = model.state_dict()
    for name, buffer in model.named_buffers():
        if name not in stored:
            yield name, buffer


def _fixed_vector(size: int, device: torch.device) -> torch.Tensor:
    return torch.arange(size, device=device).mul(0.7).cos()


def check_finite(model: nn.Module, path: str) -> None:
    """Check that all numbers of a model, and of its adapters, are finite.

    Raises:
        UserError: A tensor has NaN or infinity.
    """
    for name, tensor in model.state_dict().items():
        if not tensor.isfinite().all():
            option = "model.adapter" if ".lora_" in name else f"model.path={path}"
            raise UserError(f"{option}: '{name}' has NaN or infinity. Download the folder again.")
