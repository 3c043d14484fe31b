"""Extensions of the train engine `fsdp`, which change its model, its micro-batches or its weights.

Adapters, ranks that share rows and experts that servers recorded are such extensions. Shape
letters: B = rows (1 where they are packed), W = input width, N = loss tokens, K = top ids of a
token, R = bytes of a token's recorded experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol

from arealite.api.engine import LossFn, Named, NewAdapter, Sequence, TrainedWeights
from arealite.api.engine_config import FSDPConfig, Head

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import torch
    from transformers import PreTrainedModel

Plan = list[list[int]]
"""Row indices of each micro-batch."""
Full = Callable[["torch.Tensor"], "torch.Tensor"]
"""Gathers a parameter's shards. All ranks call it."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Tensors of one forward pass, on the engine's device."""

    input_ids_BW: torch.Tensor
    """int64: rows right-padded with 0, or packed prefix trees [1, W]. The last token of a row is no
    input."""
    attention: dict[str, object]
    """Further arguments of the decoder for packed rows; {} for padded ones."""
    inputs: list[torch.Tensor]
    """int64 for each row: positions of its inputs in the flattened [B · W] tokens."""
    index_N: torch.Tensor
    """int64: which of the flattened [B · W] hidden states predicts each loss token."""
    targets_N: torch.Tensor
    """int64: the loss tokens."""
    temperature_N: torch.Tensor
    rows_N: torch.Tensor
    fields: dict[str, torch.Tensor]
    top_ids_NK: torch.Tensor | None = None
    """int64, -1: none. None: no row has top ids."""
    is_truncated_N: torch.Tensor | None = None
    """bool: as in Sequence. None: no token is truncated."""
    own_N: torch.Tensor | None = None
    """int64: the loss tokens that this rank computes, of those in `rows_N` and `fields`; None:
    all. Only ranks that share rows divide them; `index_N` and what the head needs are its own."""
    routing_BWR: torch.Tensor | None = None
    """uint8: the recorded experts of each input, R bytes, 255 where none are recorded; None: no
    row has a record."""
    replays_routing: bool = True
    """As in TrainEngine."""
    adapters: tuple[str, ...] = ()
    """The adapter of each row; rows of one adapter are side by side."""


class Placement(NamedTuple):
    """The positions of the inputs of some rows in a micro-batch."""

    shape: tuple[int, int]
    """[B, W]"""
    place_I: np.ndarray
    """int64: the position of each input among the flattened [B · W] tokens, row after row."""
    attention: dict[str, object]
    """As in MicroBatch."""


class RowLayout(Protocol):
    """Divides rows into micro-batches, and places them there."""

    def plan(self, rows: list[Sequence], budget: int, *, rows_per_example: int) -> Plan:
        """Return micro-batches of at most `budget` tokens; a single example may have more."""
        ...

    def place(self, rows: Seq[Sequence]) -> Placement:
        """Return the positions of the inputs in the micro-batch of `rows`."""
        ...


@dataclass(frozen=True, kw_only=True)
class EngineSetup:
    """An engine under construction."""

    config: FSDPConfig
    module: PreTrainedModel
    """The model. Its parameters are on the meta device."""
    source: Path
    """The model's folder."""
    head: Head
    device: torch.device
    is_trained: bool
    adapter: Path | None
    """Folder of an adapter from which the training starts."""


class EngineExtension:
    """Extends one engine. All ranks call its methods in the same order.

    A method that a class does not override changes nothing.
    """

    own_parameters: frozenset[str] = frozenset()
    """Parameters that the extension put into the model. They are float32, and are neither in the
    model's files nor among the exported weights."""
    file_names: Mapping[str, str] = MappingProxyType({})
    """The name in the model's files of each tensor that has another name in the model."""
    num_sharing: int = 1
    """Number of ranks that compute the same rows together."""
    is_counted: bool = True
    """Whether the stats of this rank count: one of the ranks that share rows."""
    adapter_config: Mapping[str, object] | None = None
    """Content of adapter_config.json, as peft writes it, if adapters alone are trained."""
    layout: RowLayout | None = None
    """The layout of rows, which `change_layers` may set; None: rows are padded."""

    def change_layers(self) -> None:
        """Modify layers or attention, before sharding."""

    def first_value(self, name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
        """Return the first value of one of `own_parameters`, equal on all ranks."""
        raise NotImplementedError

    def finish_loading(self) -> None:
        """Modify parameters, after they have the values of the model's folder."""

    def add_adapter(self, adapter: NewAdapter) -> TrainedWeights | None:
        """Put an adapter into the model; see TrainEngine. None: it is not for this extension."""
        return None

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter that this extension has added."""

    def frozen(self) -> EngineExtension | None:
        """Return the extension of a frozen engine on the same parameters, or None.

        This engine keeps the current outputs.
        """
        return self

    def forward_passes(self) -> AbstractContextManager[None]:
        """Return a context of all passes of `TrainEngine.forward`."""
        return nullcontext()

    def gather_rows(self, rows: list[Sequence]) -> tuple[list[Sequence], int]:
        """Return the rows to compute, and the index of the first of `rows` in them."""
        return rows, 0

    def changed_batch(self, batch: MicroBatch) -> MicroBatch:
        """Return the micro-batch that this rank computes next."""
        return batch

    def gather_outputs(
        self, outputs: dict[str, torch.Tensor], batch: MicroBatch
    ) -> dict[str, torch.Tensor]:
        """Return the outputs of all loss tokens of a micro-batch from those of this rank."""
        return outputs

    def added_loss(self, loss_fn: LossFn, rows: list[Sequence]) -> LossFn:
        """Return the loss function of an update over `rows`, which is called per micro-batch."""
        return loss_fn

    def take_stats(self) -> dict[str, float]:
        """End a `forward` or an update; return its stats on this rank, to be summed over ranks."""
        return {}

    def merged(self, name: str, weight: torch.Tensor, full: Full) -> torch.Tensor | None:
        """Return the full value to export for a parameter; None: its own value."""
        return None

    def stream_adapter(self, full: Full) -> Iterator[Named]:
        """Yield (name in peft's file, full tensor) of each adapter's matrix."""
        yield from ()

    def export(self, folder: Path | None, full: Full) -> None:
        """Write further files into an exported folder; None: only gather parameters."""
