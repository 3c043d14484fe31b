"""Each planted fault is found within one version, and no ordinary publish raises an alarm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from arealite.base.errors import InvariantError
from arealite.ext.embedded.embedded_server import EmbeddedServer
from tests.ext.served_policy.runs import Plant, Run, State, restore
from tests.models import tiny_mixture, tiny_model


@pytest.fixture(autouse=True)
def _group(group: None) -> None:
    pass


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


PLANTS: dict[str, tuple[str, Plant, str]] = {
    "confirms without loading": ("qwen2", confirms_without_loading, "old weights: .* version 0's"),
    "half of the tensors": ("qwen2", loads_half, "a part of the weights is old"),
    "swapped layers": ("qwen2", swaps_layers, "other weights"),
    "one expert": ("qwen3_moe", loses_expert, "other (weights|dtype)"),
    "scale of an adapter": ("qwen2", scales_change_twice, "wrong scale of an adapter"),
}


def write(folder: Path, family: str = "qwen2") -> Path:
    if family == "qwen3_moe":
        return tiny_mixture(folder / "model", family=family, init_std=0.1)
    return tiny_model(folder / "model", init_std=0.1)


@pytest.mark.parametrize(("family", "plant", "reason"), PLANTS.values(), ids=PLANTS)
async def test_planted_fault_stops_the_run_with_its_reason(
    tmp_path: Path, family: str, plant: Plant, reason: str
) -> None:
    async with Run(write(tmp_path, family)).running() as run:
        await run.publish(0)
        run.plant(plant)
        run.train(0.002 if "scale" in reason else 0.02)
        with pytest.raises(InvariantError, match=reason):
            await run.publish(1)
        print(run.proofs())
        assert [proof.is_proven for proof in run.proofs()] == [True, False, False]
