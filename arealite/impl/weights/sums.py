"""Tests tensors: checksums show how two copies of a model differ; all numbers must be finite."""

from collections.abc import Iterable
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
    found = Sums()
    stored, buffers = (model.state_dict(), model.named_buffers()) if model is not None else ({}, ())
    for name, tensor in chain(named, (each for each in buffers if each[0] not in stored)):
        rows = tensor.detach().reshape(len(tensor) if tensor.ndim > 1 else 1, -1).float()
        left, right = (torch.arange(n, device=rows.device).mul(0.7).cos() for n in rows.shape)
        found[name] = tensor.ndim, float(rows.norm()), float(left @ (rows @ right))
    return found


def check_finite(model: nn.Module, path: str) -> None:
    """Check that all numbers of a model, and of its adapters, are finite.

    Raises:
        UserError: A tensor has NaN or infinity.
    """
    for name, tensor in model.state_dict().items():
        if not tensor.isfinite().all():
            where = "model.adapter" if ".lora_" in name else f"model.path={path}"
            raise UserError(f"{where}: '{name}' has NaN or infinity. Download the folder again.")
