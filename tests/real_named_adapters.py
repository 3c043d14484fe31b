"""A session with two adapters by name, on a real server that it starts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import arealite
from arealite.base.errors import RoleError
from arealite.ext.session.adapter_server import NamedVersionServer, StagedAdapter
from arealite.ext.session.policy import Policy
from tests.ext.session.test_adapters import PROMPT, difference, train
from tests.real_adapters import CONTEXT, LONG
from tests.vllm.real import ROOT, generations_held, hold_environment
from tests.waiting import eventually

NAMES = ("alice", "bob")
TOLERANCE = 1e-3
"""Largest difference of a log-probability in float32, in nats."""


async def check_named_adapters(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch, *server_options: str
) -> None:
    """Check tokens of two adapters beside each other, across a publish, and a wrong scale."""
    overrides: dict[str, Any] = {
        "cluster.name_root": str(folder / "names"),
        "cluster.run_root": str(folder / "runs"),
        "cluster.user": "test",
        "cluster.security": False,
        "optimizer.type": "sgd",
        "optimizer.warmup_steps": 0,
        "engine.fsdp.lora.targets": ["all-linear"],
        "launcher.server_args": [*server_options, f"llm_server.context_length={CONTEXT}"],
    }
    hold_folder = folder / "hold"
    hold_folder.mkdir()
    for name, value in hold_environment(hold_folder, ROOT).items():
        monkeypatch.setenv(name, value)
    async with arealite.session(model, adapters=NAMES, lora=0, overrides=overrides) as session:
        await train(session, {"alice": 9, "bob": 11}, updates=2)
        for name in NAMES:
            assert (await session.publish(adapter=name)).servers == 1
        samples = await asyncio.gather(
            *(session.sample(PROMPT, n=4, max_tokens=32, adapter=name) for name in ("", *NAMES))
        )
        for version, adapter_samples in zip((0, 1, 1), samples, strict=True):
            assert await difference(session, adapter_samples) < TOLERANCE
            versions = {v for sample in adapter_samples for v in sample.versions}
            assert versions == {version}
        await _check_across_versions(session, hold_folder)
        await _check_wrong_scale(session, monkeypatch)


async def _check_across_versions(session: arealite.Session, hold_folder: Path) -> None:
    """Publish `alice` while both adapters answer."""
    await session.save("alice-1", adapter="alice")
    await train(session, {"alice": 13}, updates=1)
    with generations_held(hold_folder):
        sampling = {
            name: session.sample(PROMPT, n=8, max_tokens=LONG, adapter=name) for name in NAMES
        }
        await session.publish(adapter="alice")
    samples = {name: await call for name, call in sampling.items()}
    assert {v for sample in samples["bob"] for v in sample.versions} == {1}
    assert await difference(session, samples["bob"]) < TOLERANCE
    assert any({*sample.versions} == {1, 2} for sample in samples["alice"])
    newer = await session.forward([sample.row() for sample in samples["alice"]])
    await session.save("alice-2", adapter="alice")
    await session.load("alice-1", adapter="alice")
    older = await session.forward([sample.row() for sample in samples["alice"]])
    await session.load("alice-2", adapter="alice")
    for version, rows in ((1, older), (2, newer)):
        for sample, logprobs_T in zip(samples["alice"], rows, strict=True):
            versions = np.array(sample.versions)
            assert (np.diff(versions) >= 0).all()
            expected = logprobs_T[len(PROMPT) :]
            differences = np.abs(np.array(sample.logprobs) - expected)
            assert differences[versions == version].max(initial=0.0) < TOLERANCE


async def _check_wrong_scale(session: arealite.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Publish an adapter that the server scales twice: it is refused, and the older one stays."""
    stage = Policy.stage_adapter

    def stage_twice_scaled(policy: Policy, name: str, version: int) -> StagedAdapter:
        staged = stage(policy, name, version)
        file = staged.folder / "adapter_config.json"
        config = json.loads(file.read_text())
        config["lora_alpha"] *= 2
        file.write_text(json.dumps(config))
        return staged

    looks = list[str]()
    holds = NamedVersionServer.holds

    async def counted_holds(server: NamedVersionServer, adapter: StagedAdapter) -> bool:
        looks.append(adapter.name)
        return await holds(server, adapter)

    monkeypatch.setattr(NamedVersionServer, "holds", counted_holds)
    monkeypatch.setattr(Policy, "stage_adapter", stage_twice_scaled)
    sampling = session.sample(PROMPT, n=8, max_tokens=LONG, adapter="bob")
    with pytest.raises(RoleError, match="other log-probabilities with version 2 of 'bob'"):
        await session.publish(adapter="bob")
    looks.clear()
    await eventually(lambda: looks.count("bob") > 1, "looks for the refused version")
    for samples in (await sampling, await session.sample(PROMPT, n=4, adapter="bob")):
        assert await difference(session, samples) < TOLERANCE
        assert {version for sample in samples for version in sample.versions} == {1}
