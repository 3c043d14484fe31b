"""Choose the faster of float32 and bfloat16 on this machine, for the value `auto` of dtypes."""

import time
from functools import cache

import torch

ROWS, WIDTH, REPEATS = 128, 512, 5
WORTH = 1.5
"""Speed of matrix products in bfloat16 over float32 from which on bfloat16 is chosen: casts and
softmax of a step do not get faster."""


@cache
def fast_dtype() -> tuple[str, str]:
    """Return float32 or bfloat16, and the reason.

    With CUDA, bfloat16 is chosen if the device has instructions for it. On a CPU, matrix products
    are timed: processors without such instructions take many times as long in bfloat16.
    """
    if torch.cuda.is_available():
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return "bfloat16", "CUDA"
        return "float32", "this CUDA device has no bfloat16"
    ratio = _seconds(torch.float32) / _seconds(torch.bfloat16)
    dtype = "bfloat16" if ratio >= WORTH else "float32"
    return dtype, f"in bfloat16, matrix products have {ratio:.2g} times the speed"


def _seconds(dtype: torch.dtype) -> float:
    """Return the shortest time of a matrix product."""
    left, right = (torch.ones(rows, WIDTH, dtype=dtype) for rows in (ROWS, WIDTH))
    times = list[float]()
    for _ in range(REPEATS):
        begin = time.perf_counter()
        torch.mm(left, right)
        times.append(time.perf_counter() - begin)
    return min(times)
