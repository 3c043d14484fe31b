"""An adapter that was added to an engine by name, with an optimizer of its own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from arealite.api.engine import Named
from arealite.ext.models import lora
from arealite.impl.engine import checkpoint
from arealite.impl.engine.optimizer import Optimizer
from arealite.impl.engine.training_state import OptimizedWeights
from arealite.impl.weights.tensor_names import Tensors


class ReplicatedOptimizer(Optimizer):
    """The optimizer of parameters that every rank has: it adds the gradients of the ranks."""

    def _gradients(self) -> list[torch.Tensor]:
        if dist.get_world_size() > 1:
            self._add_ranks()
        return super()._gradients()

    def _add_ranks(self) -> None:
        """Add the gradients of all ranks; a rank without rows of the adapter has none."""
        params = [*self.parameters.values()]
        has_gradient = [param.grad is not None for param in params]
        gradients = [
            torch.zeros_like(param) if param.grad is None else param.grad for param in params
        ]
        counts = torch.tensor(has_gradient, dtype=torch.float32, device=params[0].device)
        flat = torch.cat([counts, *[gradient.flatten() for gradient in gradients]])
        dist.all_reduce(flat)
        counts, *sums = flat.split([len(params), *[param.numel() for param in params]])
        for param, count, total in zip(params, counts.tolist(), sums, strict=True):
            param.grad = total.view_as(param) if count else None


class NamedAdapter(OptimizedWeights):
    """Implements TrainedWeights; every rank has all of it. Its name is not in its files."""

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
