"""Tests tensors: checksums show how two copies of a model differ; all numbers must be finite."""

from collections.abc import Iterable, Iterator
from itertools import chain

import torch
from torch import nn

from arealite.api.engine import Named
from arealite.base.errors import UserError

Sums = dict[str, tuple[int, float, float]]
"""(dimensions, norm, projection on a fixed vector) of each tensor by name. Copies of a tensor in
different dtypes have nearly equal norms and projections."""


def sums(named: Iterable[Named], model: nn.Module | None) -> Sums:
    """Return the checksum of each tensor, and of each buffer of the model that is in no file.

    The frequencies of rotary embeddings are such buffers.
    """
    checksums = Sums()
    if model is not None:
        named = chain(named, _unstored_buffers(model))
    for name, tensor in named:
        num_rows = len(tensor) if tensor.ndim > 1 else 1
        matrix = tensor.detach().reshape(num_rows, -1).float()
        num_columns = matrix.shape[1]
        left = _fixed_vector(num_rows, matrix.device)
        right = _fixed_vector(num_columns, matrix.device)
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
    angles = torch.arange(size, device=device).mul(0.7)
    return angles.cos()


def check_finite(model: nn.Module, path: str) -> None:
    """Check that all numbers of a model, and of its adapters, are finite.

    Raises:
        UserError: A tensor has NaN or infinity.
    """
    for name, tensor in model.state_dict().items():
        if tensor.isfinite().all():
            continue
        option = f"model.path={path}"
        if ".lora_" in name:
            option = "model.adapter"
        raise UserError(f"{option}: '{name}' has NaN or infinity. Download the folder again.")
