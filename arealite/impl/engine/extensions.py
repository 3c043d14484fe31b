"""The extensions of an engine, as one extension, and the model's tensors as these see them."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import nn

from arealite.api.engine import LossFn, Named, NewAdapter, TrainedWeights
from arealite.api.engine import Sequence as Row
from arealite.api.engine_extension import (
    EngineExtension,
    EngineSetup,
    Full,
    MicroBatch,
)
from arealite.api.hooks import EngineExtensionMaker
from arealite.base import entries


class Extensions(EngineExtension):
    """Calls several extensions one after the other; without any, it changes nothing."""

    def __init__(self, parts: Sequence[EngineExtension]) -> None:
        self._parts = parts
        self._collect_names()
        for part in parts:
            self.num_sharing *= part.num_sharing
            self.is_counted &= part.is_counted
            self.adapter_config = self.adapter_config or part.adapter_config

    def _collect_names(self) -> None:
        """Set the names of the parts' tensors."""
        own_parameters = set[str]()
        file_names = dict[str, str]()
        for part in self._parts:
            own_parameters |= part.own_parameters
            file_names |= part.file_names
        self.own_parameters = frozenset(own_parameters)
        self.file_names = file_names

    @classmethod
    def of(cls, setup: EngineSetup) -> "Extensions":
        """Make the extensions whose options are on (hook `engine_extension`)."""
        makers: list[EngineExtensionMaker] = entries.hooks("engine_extension")
        return cls(entries.results(makers, setup))

    def change_layers(self) -> None:
        """Modify layers; see EngineExtension. The first layout of an extension is used."""
        for part in self._parts:
            part.change_layers()
            self.layout = self.layout or part.layout

    def first_value(
        self,
        name: str,
        shape: torch.Size,
        generator: torch.Generator,
    ) -> torch.Tensor:
        """Return the first value that the parameter's extension has for it."""
        owner = next(part for part in self._parts if name in part.own_parameters)
        return owner.first_value(name, shape, generator)

    def finish_loading(self) -> None:
        """Modify loaded parameters; see EngineExtension."""
        for part in self._parts:
            part.finish_loading()

    def add_adapter(self, adapter: NewAdapter) -> TrainedWeights | None:
        """Add an adapter to the first extension that takes it."""
        for part in self._parts:
            weights = part.add_adapter(adapter)
            if weights is not None:
                self._collect_names()
                return weights
        return None

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter from all extensions."""
        for part in self._parts:
            part.remove_adapter(name)
        self._collect_names()

    def frozen(self) -> "Extensions":
        """Return the extensions of a frozen engine; see EngineExtension."""
        frozen_parts = [part.frozen() for part in self._parts]
        return Extensions([part for part in frozen_parts if part is not None])

    @contextmanager
    def forward_passes(self) -> Iterator[None]:
        """Enter the contexts of all extensions."""
        with ExitStack() as stack:
            for part in self._parts:
                stack.enter_context(part.forward_passes())
            yield

    def gather_rows(self, rows: list[Row]) -> tuple[list[Row], int]:
        """Return the rows to compute, and the index of the first of `rows` in them."""
        first = 0
        for part in self._parts:
            rows, added = part.gather_rows(rows)
            first += added
        return rows, first

    def changed_batch(self, batch: MicroBatch) -> MicroBatch:
        """Return the micro-batch of this rank; see EngineExtension."""
        for part in self._parts:
            batch = part.changed_batch(batch)
        return batch

    def gather_outputs(
        self,
        outputs: dict[str, torch.Tensor],
        batch: MicroBatch,
    ) -> dict[str, torch.Tensor]:
        """Return the outputs of all loss tokens; the last extension comes first."""
        for part in reversed(self._parts):
            outputs = part.gather_outputs(outputs, batch)
        return outputs

    def added_loss(self, loss_fn: LossFn, rows: list[Row]) -> LossFn:
        """Return the loss function of an update; see EngineExtension."""
        for part in self._parts:
            loss_fn = part.added_loss(loss_fn, rows)
        return loss_fn

    def take_stats(self) -> dict[str, float]:
        """Return the stats of all extensions on this rank."""
        stats = dict[str, float]()
        for part in self._parts:
            stats |= part.take_stats()
        return stats

    def merged(
        self,
        name: str,
        weight: torch.Tensor,
        full: Full,
    ) -> torch.Tensor | None:
        """Return the value to export from the first extension that has one."""
        for part in self._parts:
            merged_weight = part.merged(name, weight, full)
            if merged_weight is not None:
                return merged_weight
        return None

    def stream_adapter(self, full: Full) -> Iterator[Named]:
        """Yield the matrices of all extensions."""
        for part in self._parts:
            yield from part.stream_adapter(full)

    def export(self, folder: Path | None, full: Full) -> None:
        """Write the files of all extensions."""
        for part in self._parts:
            part.export(folder, full)


def exported_weights(
    module: nn.Module,
    extensions: EngineExtension,
    full: Full,
    dtype: torch.dtype,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name in files and the full tensor of each parameter, rounded to `dtype`.

    Buffers keep their own dtype.
    """
    for name, tensor in state_tensors(module):
        if name in extensions.own_parameters:
            continue
        file_name = extensions.file_names.get(name, name)
        yield file_name, _exported(name, tensor, extensions, full, dtype)


def _exported(
    name: str,
    tensor: torch.Tensor,
    extensions: EngineExtension,
    full: Full,
    dtype: torch.dtype,
) -> torch.Tensor:
    merged_weight = extensions.merged(name, tensor, full)
    if merged_weight is not None:
        return merged_weight.to(dtype)
    is_buffer = not isinstance(tensor, nn.Parameter)
    return full(tensor.detach().to(tensor.dtype if is_buffer else dtype))


def state_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a model's files: parameters, tied ones once, and persistent buffers."""
    seen = set[int]()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor
