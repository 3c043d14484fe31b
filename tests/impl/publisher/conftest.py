"""A site for each test: a model folder, a registry, and a publisher, closed at the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from safetensors.torch import save_file

from arealite.impl.publisher import control
from arealite.impl.publisher import servers as base
from tests.fakes.deadlines import Clock, WaitExpirer
from tests.fakes.scripted_server import ScriptedServer
from tests.fakes.server_kinds import kind as kind
from tests.impl.engine.conftest import group as group
from tests.impl.publisher.sites import Site, tensors


@pytest.fixture
async def site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[ScriptedServer]
) -> AsyncIterator[Site]:
    monkeypatch.setattr(base, "WATCH_S", 0.02)
    monkeypatch.setattr(base, "RETRY_S", 0.02)
    for module in (base, control):
        monkeypatch.setattr(module, "CONTINUE_S", 60.0)
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "old.bin"):
        (model / name).write_text("{}")
    save_file(tensors(0.0), model / "model.safetensors")
    made = Site(tmp_path, kind)
    made.expirer, made.clock = WaitExpirer(monkeypatch, control), Clock(monkeypatch, base)
    yield made
    if made.publisher is not None:
        await asyncio.to_thread(made.publisher.close)
