"""Faults of servers: what they do to a model after each update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from arealite.ext.embedded.embedded_server import EmbeddedServer
from tests.models import tiny_mixture, tiny_model

State = dict[str, torch.Tensor]
Plant = Callable[[EmbeddedServer, State, State], None]
"""Changes a server after an update; gets its weights before the update, and those of version 0."""


def copied(model: Any) -> State:
    """Return a copy of all weights."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@torch.no_grad()
def restore(server: EmbeddedServer, state: State) -> None:
    """Write weights into the server's model."""
    model: Any = server.engine.decoder.model
    present = model.state_dict()
    for name, tensor in state.items():
        present[name].copy_(tensor)


def confirms_without_loading(server: EmbeddedServer, before: State, first: State) -> None:
    restore(server, before)


def loads_half(server: EmbeddedServer, before: State, first: State) -> None:
    names = sorted(before)
    restore(server, {name: before[name] for name in names[::2]})


@torch.no_grad()
def swaps_layers(server: EmbeddedServer, before: State, first: State) -> None:
    model: Any = server.engine.decoder.model
    one, other = model.model.layers[0].state_dict(), model.model.layers[1].state_dict()
    for name, tensor in one.items():
        kept = tensor.clone()
        tensor.copy_(other[name])
        other[name].copy_(kept)


@torch.no_grad()
def loses_expert(server: EmbeddedServer, before: State, first: State) -> None:
    model: Any = server.engine.decoder.model
    model.model.layers[1].mlp.experts.down_proj[2].zero_()


def scales_change_twice(server: EmbeddedServer, before: State, first: State) -> None:
    model: Any = server.engine.decoder.model
    present = model.state_dict()
    restore(server, {name: 2 * present[name] - first[name] for name in first})


def loads_older(server: EmbeddedServer, before: State, first: State) -> None:
    restore(server, first)


def keeps_prefixes(server: EmbeddedServer, before: State, first: State) -> None:
    """Keep the cached prefix at the next updates."""
    decoder: Any = server.engine.decoder
    cache = decoder._cache
    decoder.drop_prefix = cache.drop_prefix = cache.drop = lambda: None


def computes_in_bfloat16(server: EmbeddedServer, before: State, first: State) -> None:
    """Do nothing: the server was started with another dtype."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault of a server, and how it is found."""

    plant: Plant
    reason: str
    """Pattern of the reason that is named."""
    family: str = "qwen2"
    change: float = 0.02
    """Size of the trainer's updates."""
    served_dtype: str = "float32"
    first: int = 2
    """The first version at which it does harm."""

    def write(self, folder: Path) -> Path:
        """Write a model that can have the fault."""
        if self.family == "qwen3_moe":
            return tiny_mixture(folder / "model", family=self.family, init_std=0.1)
        return tiny_model(folder / "model", family=self.family, init_std=0.1)


FAULTS = {
    "confirms without loading": Fault(
        plant=confirms_without_loading, reason="old weights: the scores equal version 1's"
    ),
    "loads an older version": Fault(
        plant=loads_older, reason="old weights: the scores equal version 0's"
    ),
    "half of the tensors": Fault(plant=loads_half, reason="a part of the weights is old"),
    "swapped layers": Fault(plant=swaps_layers, reason="other weights"),
    "one expert": Fault(
        plant=loses_expert, family="qwen3_moe", reason="other (weights|dtype, or few wrong)"
    ),
    "scale of an adapter": Fault(
        plant=scales_change_twice, change=0.002, reason="wrong scale of an adapter"
    ),
    "stale prefix cache": Fault(plant=keeps_prefixes, first=3, reason="stale prefix cache"),
    "bfloat16 for float32": Fault(
        plant=computes_in_bfloat16, served_dtype="bfloat16", first=0, reason="other dtype"
    ),
}
