"""Low-rank adapters beside the linear layers of a served model: y = W·x + alpha/rank · B·A·x.

A batch may mix rows of several adapters: the layers compute the base for all rows at once, and each
adapter's product for its own rows. As in peft, the products are computed in the dtype of A and B.

Shape letters: B = rows of a batch, L = tokens of a row, I = inputs and O = outputs of a layer,
R = rank of an adapter.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from arealite.api.engine import Named
from arealite.base.errors import InvariantError, UserError
from arealite.base.model_folder import read_headers
from arealite.ext.embedded.protocol import RequestRefused
from arealite.ext.models.adapter_folder import PREFIX, read_adapter
from arealite.ext.models.lora import LINEAR, with_product
from arealite.impl.weights.tensor_names import tensor_reader

DEFAULT = ""
"""The name of the adapter of requests that name none."""
SIDES = (".lora_A.weight", ".lora_B.weight")


@dataclass(frozen=True, kw_only=True)
class LowRank:
    """The adapter of one layer."""

    down_RI: Tensor
    """Matrix A."""
    up_OR: Tensor
    """Matrix B."""
    scaling: float

    def added_to(self, output: Tensor, inputs: Tensor) -> Tensor:
        """Return the layer's output [..., O] with that of the adapter for its inputs [..., I]."""
        inputs = inputs.to(self.down_RI.dtype)
        low_rank = nn.functional.linear(inputs, self.down_RI)
        change = nn.functional.linear(low_rank, self.up_OR) * self.scaling
        return (output + change).to(output.dtype)

    def merged(self, weight: Tensor, *, is_transposed: bool) -> Tensor:
        """Return the layer's weight with the adapter, in float32."""
        return with_product(
            weight.float(),
            self.down_RI,
            self.up_OR,
            self.scaling,
            is_transposed=is_transposed,
        )


LowRankByLayer = Mapping[str, LowRank]
LayerAdapters = dict[str, LowRank]
"""The adapters of one layer, by the adapter's name."""
Rows = Tensor | None
"""The rows of a batch that use one adapter, int64; None: all."""


class ServedAdapters:
    """The adapters that a model is served with. Only the engine's thread may use it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._adapters_by_layer = dict[str, LayerAdapters]()
        self._groups: list[tuple[str, Rows]] = [(DEFAULT, None)]
        self._num_rows = 0

    @property
    def names(self) -> set[str]:
        """The names of the adapters that are loaded."""
        all_names = set[str]()
        for adapters in self._adapters_by_layer.values():
            all_names.update(adapters)
        return all_names

    def select(self, names: Sequence[str]) -> None:
        """Set the adapter of each row of the next forward passes.

        An adapter that is not loaded changes nothing.
        """
        self._num_rows = len(names)
        distinct_names = dict.fromkeys(names)
        if len(distinct_names) == 1:
            self._groups = [(names[0], None)]
            return
        self._groups = [(name, self._rows_of(name, names)) for name in distinct_names]

    def load(self, name: str, low_rank_by_layer: LowRankByLayer) -> None:
        """Replace the adapter `name`."""
        self.remove(name)
        for layer_name, low_rank in low_rank_by_layer.items():
            adapters = self._adapters_by_layer.get(layer_name)
            if adapters is None:
                adapters = LayerAdapters()
                self._adapters_by_layer[layer_name] = adapters
                layer = self._model.get_submodule(layer_name)
                layer.register_forward_hook(partial(self._add, adapters))
            adapters[name] = low_rank

    def remove(self, name: str) -> None:
        """Remove the adapter `name`, if it is loaded."""
        for adapters in self._adapters_by_layer.values():
            adapters.pop(name, None)

    def merged(self, named: Iterator[Named]) -> Iterator[Named]:
        """Yield the model's tensors, float32 where the default adapter changes them."""
        for name, tensor in named:
            layer_name, _, leaf = name.rpartition(".")
            low_rank = self._adapters_by_layer.get(layer_name, {}).get(DEFAULT)
            if low_rank is None or leaf != "weight":
                yield name, tensor
                continue
            is_transposed = isinstance(self._model.get_submodule(layer_name), Conv1D)
            yield name, low_rank.merged(tensor, is_transposed=is_transposed)

    def _rows_of(self, name: str, names: Sequence[str]) -> Tensor:
        device = next(self._model.parameters()).device
        rows = [row for row, row_name in enumerate(names) if row_name == name]
        return torch.tensor(rows, device=device)

    def _add(
        self,
        adapters: LayerAdapters,
        layer: nn.Module,
        args: tuple[Any, ...],
        output: Tensor,
    ) -> Tensor:
        """Add the products of the adapters to a layer's output (forward hook)."""
        inputs = args[0]
        for name, rows in self._groups:
            low_rank = adapters.get(name)
            if low_rank is None:
                continue
            if rows is None:
                return low_rank.added_to(output, inputs)
            if len(inputs) != self._num_rows:
                raise InvariantError(
                    f"a layer got {len(inputs)} rows instead of {self._num_rows}: the server "
                    "cannot compute several adapters in one batch of this model"
                )
            output[rows] = low_rank.added_to(output[rows], inputs[rows])
        return output


def read_low_rank(model: nn.Module, folder: Path) -> LowRankByLayer:
    """Read an adapter that peft wrote, and check it against a model.

    Returns:
        {name of a layer: its adapter}, with float32 tensors on the model's device.

    Raises:
        RequestRefused: The folder has no plain LoRA adapter, or one of another model.
    """
    try:
        config = read_adapter(str(folder), {}, key="adapter")
    except UserError as error:
        raise RequestRefused(f"Failed to load adapter: {error}") from error
    device = next(model.parameters()).device
    headers = read_headers(folder)
    tensors = dict[str, Tensor]()
    with tensor_reader(headers) as read:
        for name in headers:
            tensors[name] = read(name).to(device, torch.float32, copy=True)
    low_rank_by_layer = dict[str, LowRank]()
    for name in tensors:
        layer_name = name.removeprefix(PREFIX).removesuffix(SIDES[0])
        if not name.endswith(SIDES[0]):
            continue
        up = tensors.get(f"{PREFIX}{layer_name}{SIDES[1]}")
        if up is None:
            raise RequestRefused(f"Failed to load adapter: {folder} lacks B of '{layer_name}'.")
        down = tensors[name]
        _check_layer(model, layer_name, down, up)
        low_rank_by_layer[layer_name] = LowRank(
            down_RI=down,
            up_OR=up,
            scaling=scaling_of(config, layer_name, len(down)),
        )
    if 2 * len(low_rank_by_layer) != len(tensors):
        raise RequestRefused(f"Failed to load adapter: {folder} has other tensors than A and B.")
    return low_rank_by_layer


def scaling_of(config: Mapping[str, Any], layer_name: str, rank: int) -> float:
    """Return the factor of a layer's product: alpha/rank, or alpha/√rank with use_rslora.

    The keys of `alpha_pattern` are regular expressions of the end of a layer's name, as in peft.
    """
    alpha: float = config["lora_alpha"]
    alpha_by_pattern: dict[str, float] = config.get("alpha_pattern") or {}
    for pattern, layer_alpha in alpha_by_pattern.items():
        if re.match(rf"(.*\.)?({pattern})$", layer_name):
            alpha = layer_alpha
            break
    if config.get("use_rslora"):
        return alpha / math.sqrt(rank)
    return alpha / rank


def _check_layer(
    model: nn.Module,
    layer_name: str,
    down: Tensor,
    up: Tensor,
) -> None:
    """Check that a layer exists, that it has the adapter's shape, and that all numbers are finite.

    Raises:
        RequestRefused: It does not fit.
    """
    try:
        layer = model.get_submodule(layer_name)
    except AttributeError:
        layer = None
    if not isinstance(layer, LINEAR):
        raise RequestRefused(f"Failed to load adapter: no linear layer is named '{layer_name}'.")
    num_outputs, num_inputs = layer.weight.shape
    if isinstance(layer, Conv1D):
        num_inputs, num_outputs = layer.weight.shape
    rank = len(down)
    shapes = [[*down.shape], [*up.shape]]
    expected = [[rank, num_inputs], [num_outputs, rank]]
    if shapes != expected:
        raise RequestRefused(
            f"Failed to load adapter: '{layer_name}' has shapes {shapes}, not {expected}."
        )
    is_finite = down.isfinite().all() and up.isfinite().all()
    if not is_finite:
        raise RequestRefused(f"Failed to load adapter: '{layer_name}' is not finite.")
