"""Choose the dtype of `dtype=auto`: bfloat16 on a GPU that has it, else float32."""

import torch


def fast_dtype() -> tuple[str, str]:
    """Return bfloat16 or float32, and the reason.

    On a CPU it is float32. Without instructions for bfloat16, matrix products in bfloat16 took a
    hundred times as long. With AMX, an update of SmolLM2-135M took about as long in both dtypes.
    """
    if not torch.cuda.is_available():
        return "float32", "there is no GPU"
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        return "float32", "the GPU has no bfloat16"
    return "bfloat16", "the GPU has bfloat16"
