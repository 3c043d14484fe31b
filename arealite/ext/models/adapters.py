"""Adapters as an extension of the engine: the model is frozen, and its adapters train.

The default adapter is that of the config. Others are added by name, and compute the rows that name
them. Exports, and servers that cannot load adapters, get weights with the default adapter merged,
under the names of the Hugging Face folder.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path

import torch
import torch.distributed as dist

from arealite.api.engine import Named, NewAdapter, TrainedWeights
from arealite.api.engine_extension import EngineExtension, EngineSetup, Full, MicroBatch
from arealite.base.errors import UserError
from arealite.base.model_folder import experts_of
from arealite.ext.models import lora
from arealite.ext.models.adapter_rows import AdapterRows
from arealite.ext.models.fast_linear import use_fast_linear
from arealite.ext.models.named_adapter import NamedAdapter, ReplicatedOptimizer


class Adapters(EngineExtension):
    """The adapters of one engine; without any, it changes nothing."""

    def __init__(self, setup: EngineSetup) -> None:
        """Put the default adapter into the model, with the config of `setup.adapter` if it is set.

        With `only_named`, there is none.
        """
        self._setup = setup
        self._module = setup.module
        self._source = setup.source
        self._folder = setup.adapter
        self._is_frozen = False
        self._rows = AdapterRows()
        self._values = dict[str, torch.Tensor]()
        """Values of the default adapter in `forward`; {}: those of the parameters."""
        self._owners = dict[str, tuple[torch.nn.Module, str]]()
        """Module and attribute of each parameter of the default adapter, by its name in files."""
        self._has_default = bool(setup.config.lora.rank or setup.adapter)
        if self._has_default:
            self._inject_default()
        else:
            self._module.requires_grad_(False)

    def _inject_default(self) -> None:
        options = self._setup.config.lora
        self._config = lora.inject(self._module, options, self._setup.head, self._folder)
        if dist.get_rank() == 0:
            lora.report(self._module, [] if self._folder else options.targets)
        self.adapter_config = lora.config_fields(self._config, self._source.resolve())
        self._owners = lora.parameter_owners(self._module)
        self._note_layers()

    def _note_layers(self) -> None:
        """Let the layers compute by rows, after adapters were added or removed."""
        self._rows.attach(self._module)
        self.own_parameters = lora.adapter_names(self._module)
        self.file_names = lora.file_names(self._module)

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
        if self._has_default and self._folder:
            lora.load_adapter(self._module, self._folder)

    # ------------------------------------------------------------ adapters by name

    def add_adapter(self, adapter: NewAdapter) -> TrainedWeights:
        """Add an adapter by name; see TrainEngine.add_adapter."""
        self._check_addable(adapter)
        key = lora.key_of(adapter.name)
        setup = self._setup
        try:
            config = lora.inject(self._module, adapter.config, setup.head, adapter.folder, key=key)
            with torch.no_grad():
                lora.materialize(self._module, key, seed=adapter.seed, device=setup.device)
                if adapter.folder:
                    lora.load_adapter(self._module, adapter.folder, key)
        except BaseException:
            self.remove_adapter(adapter.name)
            raise
        use_fast_linear(self._module)
        self._note_layers()
        optimizer = ReplicatedOptimizer(
            lora.trained_parameters(self._module, key),
            adapter.training,
            scales_loss=setup.config.dtype == "float16",
        )
        return NamedAdapter(optimizer, config=config, base=self._source)

    def _check_addable(self, adapter: NewAdapter) -> None:
        """Refuse an adapter that this engine cannot compute beside others.

        Raises:
            UserError: See there.
        """
        setup = self._setup
        name = adapter.name
        if setup.head == "value":
            raise UserError(f"add_adapter '{name}': a value head has no adapters by name.")
        if experts_of(setup.module.config.to_dict()) is not None:
            raise UserError(
                f"add_adapter '{name}': a mixture of experts cannot tell the rows of adapters "
                "apart. Use one session for each adapter."
            )

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter that was added by name."""
        lora.delete(self._module, lora.key_of(name))
        self._note_layers()

    def changed_batch(self, batch: MicroBatch) -> MicroBatch:
        """Set the adapter of each row of the next passes."""
        self._rows.select([self._key_of_row(name) for name in batch.adapters])
        return batch

    def _key_of_row(self, name: str) -> str:
        if not name:
            return lora.DEFAULT
        return "" if self._is_frozen else lora.key_of(name)

    # ------------------------------------------------------------ the default adapter

    def frozen(self) -> EngineExtension:
        """Return the default adapter as it is now; rows of all others use the base model."""
        frozen = copy(self)
        frozen._is_frozen = True
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
        """Yield the adapter's matrices."""
        for name, (owner, attribute) in self._owners.items():
            yield name, full(getattr(owner, attribute).detach())

    def export(self, folder: Path | None, full: Full) -> None:
        """Write `adapter/` for peft."""
        if not self._has_default:
            return
        tensors = {name: tensor.cpu() for name, tensor in self.stream_adapter(full)}
        if folder:
            lora.write(tensors, self._config, folder / "adapter", base=self._source)
