"""An adapter that was added to an engine by name, with an optimizer of its own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from arealite.api.engine import Named
from arealite.ext.models import lora
from arealite.impl.engine import checkpoint
from arealite.impl.engine.optimizer import Optimizer
from arealite.impl.engine.training_state import OptimizedWeights
from arealite.impl.weights.tensor_names import Tensors


class NamedAdapter(OptimizedWeights):
    """Implements TrainedWeights on one rank. Names in its files do not depend on its name."""

    def __init__(self, optimizer: Optimizer, *, config: Any, base: Path) -> None:
        """Note the adapter.

        Args:
            optimizer: Has its parameters, by their names in peft's file.
            config: peft's config of it.
            base: The folder of the model.
        """
        self._optimizer = optimizer
        self.adapter_config = lora.config_fields(config, base.resolve())
        self._config = config
        self._base = base

    @property
    def optimizer(self) -> Optimizer:
        return self._optimizer

    def live_weights(self) -> Tensors:
        return {name: param.detach() for name, param in self._optimizer.parameters.items()}

    def export(self, path: Path) -> None:
        tensors = dict(self.stream_adapter())
        lora.write(tensors, self._config, checkpoint.begin(path), base=self._base)
        checkpoint.commit(path, {**checkpoint.versions()})

    def stream_adapter(self) -> Iterator[Named]:
        for name, tensor in self.live_weights().items():
            yield name, tensor.cpu()
