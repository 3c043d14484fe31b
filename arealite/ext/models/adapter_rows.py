"""The layers of peft, computed with another adapter for each row of a batch.

peft's own forward for such batches rounds each product to the dtype of the layer before it is
added, and copies the rows. Its choice of one adapter for all rows freezes the others. Here a row is
computed as if its adapter were alone: y = W·x + scaling · B·A·x, with the products in float32.
"""

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import Any

from torch import Tensor, cat, nn

from arealite.base.errors import InvariantError
from arealite.ext.models import lora


class AdapterRows:
    """The adapter of each row of the present forward and backward pass."""

    def __init__(self) -> None:
        self._parts = [(lora.DEFAULT, 0)]
        """The adapter's key and the number of the rows of each part of the batch."""

    def select(self, keys: Sequence[str]) -> None:
        """Set the key of each row's adapter; "": none. Rows of one adapter are side by side."""
        self._parts = [(key, len([*rows])) for key, rows in groupby(keys)]

    def attach(self, module: nn.Module) -> None:
        """Replace the forward of all layers with adapters."""
        for _, layer in lora.layers_of(module):
            layer.forward = partial(self._forward, layer)

    def _forward(self, layer: Any, inputs: Tensor) -> Tensor:
        output: Tensor = layer.base_layer(inputs)
        if not any(key in layer.lora_A for key, _ in self._parts):
            return output
        if len(self._parts) == 1:
            return _added(layer, self._parts[0][0], output, inputs)
        sizes = [num_rows for _, num_rows in self._parts]
        if len(inputs) != sum(sizes):
            raise InvariantError(
                f"a layer got {len(inputs)} rows instead of {sum(sizes)}: the model cannot "
                "compute several adapters in one batch. Use engine.fsdp.lora.mixed=false."
            )
        outputs = list[Tensor]()
        parts = zip(self._parts, output.split(sizes), inputs.split(sizes), strict=True)
        for (key, _), part_output, part_inputs in parts:
            outputs.append(_added(layer, key, part_output, part_inputs))
        return cat(outputs)


def _added(layer: Any, key: str, output: Tensor, inputs: Tensor) -> Tensor:
    """Return a layer's output with that of an adapter; its output, if it lacks the adapter."""
    if key not in layer.lora_A:
        return output
    down = layer.lora_A[key]
    low_rank = down(inputs.to(down.weight.dtype))
    change = layer.lora_B[key](low_rank) * layer.scaling[key]
    return (output + change).to(output.dtype)
