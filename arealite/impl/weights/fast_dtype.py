"""Choose the dtype of `dtype=auto`: bfloat16 where the hardware computes it fast, else float32."""

import torch

from arealite.base.host import has_bfloat16


def fast_dtype() -> tuple[str, str]:
    """Return bfloat16 or float32, and the reason.

    Without instructions for bfloat16, matrix products in bfloat16 take a hundred times as long.
    """
    if not torch.cuda.is_available():
        if has_bfloat16():
            return "bfloat16", "the processor has instructions for bfloat16"
        return "float32", "there is no GPU, and the processor has no instructions for bfloat16"
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        return "float32", "the GPU has no bfloat16"
    return "bfloat16", "the GPU has bfloat16"
