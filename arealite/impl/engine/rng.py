"""The random states of one process as JSON.

Here so that a resumed run draws what the interrupted one would have, and no checkpoint is pickled.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def state() -> dict[str, Any]:
    """Return the states of python, numpy and torch (and of this process's CUDA device)."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    found = {
        "python": random.getstate(),
        "numpy": [kind, keys.tolist(), *rest],  # type: ignore[union-attr]
        "torch": torch.get_rng_state().tolist(),
    }
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state().tolist()
    return found


def restore(saved: dict[str, Any]) -> None:
    """Set the states that `state` returned, be they from JSON."""
    version, internal, gauss = saved["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(tuple(saved["numpy"]))
    torch.set_rng_state(torch.tensor(saved["torch"], dtype=torch.uint8))
    if "cuda" in saved and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(saved["cuda"], dtype=torch.uint8))
