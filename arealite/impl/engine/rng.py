"""The random states of one process as JSON.

Here so that a resumed run draws what the interrupted one would have drawn, without pickles in
checkpoints.
"""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch


def state() -> dict[str, Any]:
    """Return the states of python, numpy and torch (and of this process's CUDA device)."""
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    version, internal, gauss = random.getstate()
    found: dict[str, Any] = {
        "python": [version, list(internal), gauss],
        "numpy": [keys.tolist(), position, has_gauss, cached],  # type: ignore[union-attr]
        "torch": _encode(torch.get_rng_state()),
    }
    if torch.cuda.is_available():
        found["cuda"] = _encode(torch.cuda.get_rng_state())
    return found


def restore(saved: dict[str, Any]) -> None:
    """Set the states that `state` returned."""
    version, internal, gauss = saved["python"]
    random.setstate((version, tuple(internal), gauss))
    keys, position, has_gauss, cached = saved["numpy"]
    np.random.set_state(("MT19937", np.array(keys, np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_decode(saved["torch"]))
    if "cuda" in saved and torch.cuda.is_available():
        torch.cuda.set_rng_state(_decode(saved["cuda"]))


def _encode(tensor: torch.Tensor) -> str:
    return base64.b64encode(tensor.numpy().tobytes()).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
