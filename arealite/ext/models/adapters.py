"""Adapters as an extension of the engine: the model is frozen, and its adapters train.

Exports, and servers that cannot load adapters, get merged weights under the names of the Hugging
Face folder.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path

import torch
import torch.distributed as dist

from arealite.api.engine import Named
from arealite.api.engine_extension import EngineExtension, EngineSetup, Full
from arealite.ext.models import lora


class Adapters(EngineExtension):
    """The adapters of one engine."""

    def __init__(self, setup: EngineSetup) -> None:
        """Put adapters into the model, with the config of `setup.adapter` if it is set."""
        self._module = setup.module
        self._source = setup.source
        self._folder = setup.adapter
        options = setup.config.lora
        self._config = lora.inject(self._module, options, setup.head, self._folder)
        if dist.get_rank() == 0:
            lora.report(self._module, [] if self._folder else options.targets)
        if setup.is_trained:
            self.adapter_config = lora.config_fields(self._config, self._source.resolve())
        self.own_parameters = lora.adapter_names(self._module)
        self.file_names = lora.file_names(self._module)
        self._values = dict[str, torch.Tensor]()
        """Values of the adapters in `forward`; {}: those of the parameters."""

    def first_value(
        self,
        name: str,
        shape: torch.Size,
        generator: torch.Generator,
    ) -> torch.Tensor:
        """Return the initial value of an adapter's matrix."""
        return lora.first_value(name, shape, generator)

    def finish_loading(self) -> None:
        """Load the adapter of the folder from which the training starts."""
        if self._folder:
            lora.load_adapter(self._module, self._folder)

    def frozen(self) -> EngineExtension:
        """Return the adapters as they are now."""
        frozen = copy(self)
        frozen._values = lora.values(self._module)
        return frozen

    @contextmanager
    def forward_passes(self) -> Iterator[None]:
        """Set the parameters to the values of a frozen engine."""
        with lora.replaced(self._module, self._values):
            yield

    def merged(
        self,
        name: str,
        weight: torch.Tensor,
        full: Full,
    ) -> torch.Tensor | None:
        """Return the weight of a layer with its adapter, float32."""
        return lora.merged(self._module, name, weight, full)

    def stream_adapter(self, full: Full) -> Iterator[Named]:
        """Yield the adapters' matrices."""
        return lora.matrices(self._module, full)

    def export(self, folder: Path | None, full: Full) -> None:
        """Write `adapter/` for peft."""
        adapter_folder = folder / "adapter" if folder else None
        lora.write(self._module, full, self._config, adapter_folder, base=self._source)
