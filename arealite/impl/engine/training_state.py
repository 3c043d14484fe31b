"""Weights with their optimizer, and the state of both in a checkpoint."""

import json
from abc import abstractmethod
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from arealite.api.engine import Stats, TrainedWeights
from arealite.api.engine_config import OptimizerConfig
from arealite.base.errors import UserError
from arealite.impl.engine.optimizer import Optimizer
from arealite.impl.weights.tensor_names import Tensors

EXTRA_FILE = "extra.json"
"""File of a checkpoint for the state of engine and trainer that is not in tensors."""


class OptimizedWeights(TrainedWeights):
    """Weights that an Optimizer trains."""

    @property
    @abstractmethod
    def optimizer(self) -> Optimizer:
        """Their optimizer."""

    @abstractmethod
    def live_weights(self) -> Tensors:
        """Return this rank's tensors that training changes, to save them or to load into them."""

    @property
    def loss_scale(self) -> float:
        """The factor of the loss; see TrainedWeights."""
        return self.optimizer.scale.value

    def optim_step(
        self,
        *,
        lr: float | None = None,
        optimizer: OptimizerConfig | None = None,
    ) -> Stats:
        """Apply the gradient; see TrainedWeights. Adds `loss_scale` in float16."""
        return self.optimizer.step(lr, optimizer)

    def drop_gradient(self) -> None:
        """Clear the gradients; see TrainedWeights."""
        self.optimizer.drop_gradient()

    def save(self, folder: Path, extra: dict[str, object]) -> None:
        """Write this rank's shards; see TrainedWeights."""
        optimizer = self.optimizer
        state = {"model": self.live_weights(), "optimizer": optimizer.state()}
        save_state(state, checkpoint_id=folder / "state")
        if dist.get_rank() != 0:
            return
        contents = {
            "updates": optimizer.updates,
            "loss_scale": [optimizer.scale.value, optimizer.scale.clean],
            "extra": extra,
        }
        (folder / EXTRA_FILE).write_text(json.dumps(contents))

    def load(self, folder: Path) -> dict[str, Any]:
        """Read this rank's shards; see TrainedWeights."""
        optimizer = self.optimizer
        optimizer.drop_gradient()
        state = {"model": self.live_weights(), "optimizer": optimizer.state()}
        _check_tensors(state, folder)
        load_state(state, checkpoint_id=folder / "state")
        contents = json.loads((folder / EXTRA_FILE).read_text())
        optimizer.updates = contents["updates"]
        scale = optimizer.scale
        if scale.enabled:
            scale.value, scale.clean = contents.get("loss_scale", [scale.value, 0])
        return contents["extra"]


def _check_tensors(state: dict[str, Tensors], folder: Path) -> None:
    """Raise UserError if a checkpoint lacks a tensor of `state`, or has it in another shape."""
    stored = FileSystemReader(folder / "state").read_metadata().state_dict_metadata
    for part, tensors in state.items():
        for name, tensor in tensors.items():
            key = f"{part}.{name}"
            if key not in stored:
                raise UserError(
                    f"Checkpoint '{folder}' has no '{key}': "
                    "use the model, engine.fsdp.lora and optimizer.type that it was written with, "
                    "or start a new run with resume=never."
                )
            stored_shape = getattr(stored[key], "size", tensor.shape)
            if stored_shape != tensor.shape:
                raise UserError(
                    f"Checkpoint '{folder}' has '{key}' with shape {[*stored_shape]}, not "
                    f"{[*tensor.shape]}: use the model and the rank that it was written with."
                )
