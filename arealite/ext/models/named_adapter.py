"""An adapter that was added to an engine by name, with an optimizer of its own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from arealite.api.engine import Named, Stats, TrainedWeights
from arealite.api.engine_config import OptimizerConfig
from arealite.ext.models import lora
from arealite.impl.engine import checkpoint
from arealite.impl.engine.optimizer import Optimizer
from arealite.impl.engine.training_state import load_training, save_training
from arealite.impl.weights.tensor_names import Tensors


class NamedAdapter(TrainedWeights):
    """Implements TrainedWeights on one rank. Names in its files do not depend on its name."""

    def __init__(self, optimizer: Optimizer, *, config: Any, base: Path) -> None:
        """Note the adapter.

        Args:
            optimizer: Has its parameters, by their names in peft's file.
            config: peft's config of it.
            base: The folder of the model.
        """
        self.optimizer = optimizer
        self.adapter_config = lora.config_fields(config, base.resolve())
        self._config = config
        self._base = base

    @property
    def loss_scale(self) -> float:
        return self.optimizer.scale.value

    def optim_step(
        self,
        *,
        lr: float | None = None,
        optimizer: OptimizerConfig | None = None,
    ) -> Stats:
        return self.optimizer.step(lr, optimizer)

    def drop_gradient(self) -> None:
        self.optimizer.drop_gradient()

    def save(self, folder: Path, extra: dict[str, object]) -> None:
        save_training(folder, self._weights(), self.optimizer, extra)

    def load(self, folder: Path) -> dict[str, Any]:
        return load_training(folder, self._weights(), self.optimizer)

    def export(self, path: Path) -> None:
        tensors = dict(self.stream_adapter())
        lora.write(tensors, self._config, checkpoint.begin(path), base=self._base)
        checkpoint.commit(path, {**checkpoint.versions()})

    def stream_adapter(self) -> Iterator[Named]:
        for name, tensor in self._weights().items():
            yield name, tensor.to("cpu", copy=True)

    def _weights(self) -> Tensors:
        return {name: param.detach() for name, param in self.optimizer.parameters.items()}
