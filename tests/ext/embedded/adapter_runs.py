"""Adapters with random matrices, and a trainer that publishes its adapter."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from arealite.api.engine_config import LoRAConfig
from arealite.api.publisher import PublishReport
from tests.ext.served_policy.runs import Run
from tests.impl.engine.helpers import make_engine

LORA = LoRAConfig(rank=4, alpha=8.0, targets=["all-linear"])


def adapter_folder(
    model: Path,
    folder: Path,
    seed: int,
    rank: int = 4,
    targets: Sequence[str] = ("all-linear",),
) -> Path:
    """Write an adapter with random matrices as peft does; return its folder."""
    engine = make_engine(model, lora=replace(LORA, rank=rank, targets=[*targets]))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in engine.module.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    folder.mkdir(parents=True)
    save_file(dict(engine.stream_adapter()), folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(engine.adapter_config))
    return folder


class AdapterRun(Run):
    """A trainer of adapters; it sends what the servers can take, as PPOTrainer does."""

    def __init__(self, folder: Path, *, lora: LoRAConfig = LORA, **options: Any) -> None:
        super().__init__(folder, **options)
        self.engine = make_engine(folder, lora=lora)

    def _publish(self, version: int) -> PublishReport:
        if not self.publisher.takes_adapter:
            return super()._publish(version)
        self.canary.expect(version)
        self.publisher.stage_adapter(version, self.engine.stream_adapter())
        return self.publisher.push(version)

    def staged(self) -> set[str]:
        folder = self.publisher._folder_of(self.publisher.newest or 0)
        return {path.name for path in folder.iterdir()}

    @torch.no_grad()
    def train(self, size: float = 0.02, seed: int = 0) -> None:
        torch.manual_seed(seed)
        for parameter in self.engine.module.parameters():
            if parameter.requires_grad:
                parameter += size * torch.randn_like(parameter)
