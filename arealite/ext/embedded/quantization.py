"""Rounds the weights of a model's layers to int8 and back.

The model computes as before, with the weights of a quantised server: its policy differs from the
trainer's by rounding.
"""

import torch
from transformers import PreTrainedModel

LEVELS = 127
"""Steps between zero and the largest number of a row."""


def matrix_names(model: PreTrainedModel) -> frozenset[str]:
    """Return the names of all matrices of a model but embedding and head."""
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    kept_ids = {id(module.weight) for module in (embedding, head) if module is not None}
    return frozenset(
        name
        for name, weight in model.named_parameters()
        if weight.ndim > 1 and id(weight) not in kept_ids
    )


@torch.no_grad()
def round_rows(weight: torch.Tensor) -> None:
    """Round each row of a matrix to multiples of its largest number / 127, in place."""
    largest = weight.abs().amax(-1, keepdim=True).float()
    step = (largest / LEVELS).clamp(min=torch.finfo(torch.float32).tiny)
    weight.copy_((weight / step).round() * step)
