"""Low-rank adapters beside the linear layers of a served model: y = W·x + alpha/rank · B·A·x.

A batch may mix rows of several adapters: the layers compute the base for all rows at once, and a
batched product the adapters, each for its own rows. As in peft, the products are in float32.

Shape letters: B = rows of a batch, I = inputs and O = outputs of a layer, R = rank of an adapter,
G = slots of a layer's adapters, M = the most rows of a slot, to which the others are padded, and
P = G · M.
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
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers.pytorch_utils import Conv1D

from arealite.api.engine import Named
from arealite.base.errors import InvariantError, UserError
from arealite.base.model_folder import Header
from arealite.ext.embedded.protocol import RequestRefused
from arealite.ext.embedded.staged_versions import is_staged_in_memory
from arealite.ext.models.adapter_folder import (
    PREFIX,
    read_adapter_config,
    read_adapter_headers,
)
from arealite.ext.models.lora import LINEAR, with_product
from arealite.impl.weights.float_file import map_floats
from arealite.impl.weights.tensor_names import Tensors, tensor_reader

DEFAULT = ""
"""The name of the adapter of requests that name none."""
SIDES = (".lora_A.weight", ".lora_B.weight")
LEAST_ROWS = 4
"""Rows of a product, at least: MKL adds the terms of a sum in another order for one to three rows,
so a request would get other numbers alone than beside others."""
SMALL_PRODUCT = 400
"""With fewer multiplications, `torch.bmm` does not call MKL, and adds in a third order."""
MOST_PADDING = 2.0
"""Largest size of a batched product, as a multiple of its rows. A larger one takes longer than two
smaller ones."""


@dataclass(frozen=True, kw_only=True)
class LowRank:
    """The adapter of one layer, in float32."""

    down_RI: Tensor
    """Matrix A."""
    up_OR: Tensor
    """Matrix B, times alpha/rank."""


LowRankByLayer = Mapping[str, LowRank]
Names = tuple[str, ...]
"""The adapters of a layer; the index of a name is its slot."""
RowsBySlot = dict[int, list[int]]


@dataclass(frozen=True, kw_only=True)
class Span:
    """Adjacent slots, and the rows of a batch that one batched product computes with them."""

    slots: slice
    rows_P: Tensor | None
    """The rows, slot after slot, int64; None: all rows of the batch use the only slot."""
    is_padding_GM11: Tensor | None
    """Rows of each slot of which nothing is computed, because it has fewer; None: none."""


class LayerAdapters:
    """All adapters of one layer, stacked. Lower ranks are padded with zeros."""

    def __init__(self) -> None:
        self.names: Names = ()
        self.down_GRI = torch.empty(0)
        self.up_GOR = torch.empty(0)

    def put(self, name: str, low_rank: LowRank) -> None:
        """Add or replace an adapter; a layer's only adapter is not copied."""
        if {*self.names} <= {name}:
            self.names = (name,)
            self.down_GRI = low_rank.down_RI[None]
            self.up_GOR = low_rank.up_OR[None]
            return
        rank = len(low_rank.down_RI)
        new_ranks = max(0, rank - self.down_GRI.shape[1])
        new_names = [name] if name not in self.names else []
        if new_ranks or new_names:
            self.names = (*self.names, *new_names)
            self.down_GRI = pad(self.down_GRI, (0, 0, 0, new_ranks, 0, len(new_names)))
            self.up_GOR = pad(self.up_GOR, (0, new_ranks, 0, 0, 0, len(new_names)))
        slot = self.names.index(name)
        self.down_GRI[slot, :rank] = low_rank.down_RI
        self.down_GRI[slot, rank:] = 0.0
        self.up_GOR[slot, :, :rank] = low_rank.up_OR

    def remove(self, name: str) -> None:
        """Remove an adapter, if the layer has it."""
        if name not in self.names:
            return
        kept_slots = [slot for slot, other in enumerate(self.names) if other != name]
        self.names = tuple(self.names[slot] for slot in kept_slots)
        self.down_GRI = self.down_GRI[kept_slots]
        self.up_GOR = self.up_GOR[kept_slots]

    def add(
        self,
        span: Span,
        inputs: Tensor,
        output: Tensor,
    ) -> None:
        """Add the products of a span to a layer's output [B, …, O], for its inputs [B, …, I]."""
        down_GRI = self.down_GRI[span.slots]
        up_GOR = self.up_GOR[span.slots]
        num_slots, rank, num_inputs = down_GRI.shape
        if span.rows_P is not None:
            inputs = inputs.index_select(0, span.rows_P)
        grouped_inputs = inputs.reshape(num_slots, -1, num_inputs)
        num_rows = grouped_inputs.shape[1]
        smallest_side = min(num_inputs, up_GOR.shape[1])
        least_rows = max(LEAST_ROWS, SMALL_PRODUCT // (rank * smallest_side) + 1)
        if num_rows < least_rows:
            grouped_inputs = pad(grouped_inputs, (0, 0, 0, least_rows - num_rows))
        low_rank = torch.bmm(grouped_inputs, down_GRI.transpose(1, 2))
        if span.is_padding_GM11 is not None:
            by_row = low_rank[:, :num_rows].unflatten(1, (span.is_padding_GM11.shape[1], -1))
            by_row.masked_fill_(span.is_padding_GM11, 0.0)
        change = torch.bmm(low_rank, up_GOR.transpose(1, 2))[:, :num_rows]
        change = change.reshape(len(inputs), *output.shape[1:])
        if span.rows_P is None:
            output += change
        else:
            output.index_add_(0, span.rows_P, change)


class ServedAdapters:
    """The adapters that a model is served with. Only the engine's thread may use it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._adapters_by_layer = dict[str, LayerAdapters]()
        self._row_names: list[str] = []
        self._spans_by_names = dict[Names, list[Span]]()
        """The spans of the present batch, by the names of a layer's adapters."""

    @property
    def names(self) -> set[str]:
        """The names of the adapters that are loaded."""
        layers = self._adapters_by_layer.values()
        return {name for adapters in layers for name in adapters.names}

    def select(self, names: Sequence[str]) -> None:
        """Set the adapter of each row of the next forward passes.

        An adapter that is not loaded changes nothing.
        """
        if self._row_names != [*names]:
            self._row_names = [*names]
            self._spans_by_names.clear()

    def load(self, name: str, low_rank_by_layer: LowRankByLayer) -> None:
        """Add or replace the adapter `name`."""
        for layer_name in self._adapters_by_layer.keys() - low_rank_by_layer.keys():
            self._adapters_by_layer[layer_name].remove(name)
        for layer_name, low_rank in low_rank_by_layer.items():
            adapters = self._adapters_by_layer.get(layer_name)
            if adapters is None:
                adapters = LayerAdapters()
                self._adapters_by_layer[layer_name] = adapters
                layer = self._model.get_submodule(layer_name)
                layer.register_forward_hook(partial(self._add, adapters))
            adapters.put(name, low_rank)

    def remove(self, name: str) -> None:
        """Remove the adapter `name`, if it is loaded."""
        for adapters in self._adapters_by_layer.values():
            adapters.remove(name)

    def merged(self, named: Iterator[Named]) -> Iterator[Named]:
        """Yield the model's tensors, float32 where the default adapter changes them."""
        for name, tensor in named:
            layer_name, _, leaf = name.rpartition(".")
            adapters = self._adapters_by_layer.get(layer_name)
            if adapters is None or DEFAULT not in adapters.names or leaf != "weight":
                yield name, tensor
                continue
            slot = adapters.names.index(DEFAULT)
            merged = with_product(
                tensor.float(),
                adapters.down_GRI[slot],
                adapters.up_GOR[slot],
                1.0,
                is_transposed=isinstance(self._model.get_submodule(layer_name), Conv1D),
            )
            yield name, merged

    def _spans_of(self, names: Names) -> list[Span]:
        """Return the spans of the present batch in a layer with these adapters."""
        spans = self._spans_by_names.get(names)
        if spans is not None:
            return spans
        rows_by_slot = RowsBySlot()
        for row, name in enumerate(self._row_names):
            if name in names:
                rows_by_slot.setdefault(names.index(name), []).append(row)
        spans = [self._span(part) for part in split_by_padding(rows_by_slot) if part]
        self._spans_by_names[names] = spans
        return spans

    def _span(self, rows_by_slot: RowsBySlot) -> Span:
        begin, end, most_rows = _extent(rows_by_slot)
        slots = slice(begin, end)
        if most_rows == len(self._row_names):
            return Span(slots=slots, rows_P=None, is_padding_GM11=None)
        rows = [torch.tensor(rows_by_slot.get(slot, [])).long() for slot in range(begin, end)]
        rows_GM = pad_sequence(rows, batch_first=True, padding_value=-1)
        rows_GM = rows_GM.to(next(self._model.parameters()).device)
        is_padding_GM = rows_GM < 0
        return Span(
            slots=slots,
            rows_P=rows_GM.flatten().clamp(min=0),
            is_padding_GM11=is_padding_GM[..., None, None] if is_padding_GM.any() else None,
        )

    def _add(
        self,
        adapters: LayerAdapters,
        layer: nn.Module,
        args: tuple[Any, ...],
        output: Tensor,
    ) -> Tensor:
        """Add the products of the adapters to a layer's output (forward hook)."""
        spans = self._spans_of(adapters.names)
        if not spans:
            return output
        inputs = args[0].float()
        output_float = output.float()
        for span in spans:
            if span.rows_P is not None and len(inputs) != len(self._row_names):
                raise InvariantError(
                    f"a layer got {len(inputs)} rows instead of {len(self._row_names)}: the server "
                    "cannot compute several adapters in one batch of this model"
                )
            adapters.add(span, inputs, output_float)
        return output_float.to(output.dtype)


def split_by_padding(rows_by_slot: RowsBySlot) -> list[RowsBySlot]:
    """Split slots into spans: each has few slots without rows, and similar numbers of rows."""
    spans = [RowsBySlot()]
    for slot in sorted(rows_by_slot):
        added = {slot: rows_by_slot[slot]}
        wider = spans[-1] | added
        begin, end, most_rows = _extent(wider)
        num_rows = sum(map(len, wider.values()))
        if (end - begin) * most_rows > MOST_PADDING * num_rows:
            spans.append(added)
        else:
            spans[-1] = wider
    return spans


def _extent(rows_by_slot: RowsBySlot) -> tuple[int, int, int]:
    """Return the first slot, the slot after the last, and the largest number of rows of a slot."""
    most_rows = max(map(len, rows_by_slot.values()))
    return min(rows_by_slot), max(rows_by_slot) + 1, most_rows


def read_low_rank(model: nn.Module, folder: Path) -> LowRankByLayer:
    """Read an adapter that peft wrote, and check it against a model.

    Returns:
        {name of a layer: its adapter}, with float32 tensors on the model's device. They are mapped
        from the files of a folder that a publisher has staged in memory.

    Raises:
        RequestRefused: The folder has no plain LoRA adapter, or one of another model.
    """
    option = f"adapter={folder}"
    folder = folder.expanduser()
    try:
        config = read_adapter_config(folder, option)
        headers = read_adapter_headers(folder, option)
    except UserError as error:
        raise RequestRefused(f"Failed to load adapter: {error}") from error
    tensors = _read_tensors(folder, headers, next(model.parameters()).device)
    layers = dict(model.named_modules())
    low_rank_by_layer = dict[str, LowRank]()
    for name, down in tensors.items():
        if not name.endswith(SIDES[0]):
            continue
        layer_name = name.removeprefix(PREFIX).removesuffix(SIDES[0])
        up = tensors.get(f"{PREFIX}{layer_name}{SIDES[1]}")
        if up is None:
            raise RequestRefused(f"Failed to load adapter: {folder} lacks B of '{layer_name}'.")
        _check_shapes(layers.get(layer_name), layer_name, down, up)
        scaling = scaling_of(config, layer_name, len(down))
        if scaling != 1.0:
            up = up * scaling
            _check_finite(up, f"{layer_name} with its scaling")
        low_rank_by_layer[layer_name] = LowRank(down_RI=down, up_OR=up)
    if 2 * len(low_rank_by_layer) != len(tensors):
        raise RequestRefused(f"Failed to load adapter: {folder} has other tensors than A and B.")
    return low_rank_by_layer


def _read_tensors(
    folder: Path,
    headers: Mapping[str, Header],
    device: torch.device,
) -> Tensors:
    """Return the tensors of an adapter, in float32 on `device`; map them if they are staged.

    Raises:
        RequestRefused: A number is not finite.
    """
    files = {header.file for header in headers.values()}
    is_float32 = all(header.dtype == "F32" for header in headers.values())
    is_mappable = is_float32 and len(files) == 1 and device.type == "cpu"
    if is_mappable and is_staged_in_memory(folder):
        numbers, tensors = map_floats(files.pop())
        if _is_finite(numbers):
            return tensors
    else:
        with tensor_reader(headers) as read:
            # The file may change, so the copies are checked.
            tensors = {name: read(name).to(device, torch.float32, copy=True) for name in headers}
    for name, tensor in tensors.items():
        _check_finite(tensor, name.removeprefix(PREFIX))
    return tensors


def _check_finite(matrix: Tensor, name: str) -> None:
    """Raise RequestRefused if a number is not finite."""
    if not _is_finite(matrix):
        raise RequestRefused(f"Failed to load adapter: '{name}' is not finite.")


def _is_finite(numbers: Tensor) -> bool:
    """Return whether all numbers are finite; a finite sum takes a tenth of the time of isfinite."""
    return bool(numbers.sum().isfinite() or numbers.isfinite().all())


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


def _check_shapes(
    layer: nn.Module | None,
    layer_name: str,
    down: Tensor,
    up: Tensor,
) -> None:
    """Check that a layer exists, and that it has the adapter's shape.

    Raises:
        RequestRefused: It does not fit.
    """
    if not isinstance(layer, LINEAR):
        raise RequestRefused(f"Failed to load adapter: no linear layer is named '{layer_name}'.")
    num_outputs, num_inputs = layer.weight.shape
    if isinstance(layer, Conv1D):
        num_inputs, num_outputs = layer.weight.shape
    rank = len(down)
    shapes = [[*down.shape], [*up.shape]]
    expected = [[rank, num_inputs], [num_outputs, rank]]
    if shapes != expected or not rank:
        raise RequestRefused(
            f"Failed to load adapter: '{layer_name}' has shapes {shapes}, not {expected}."
        )
