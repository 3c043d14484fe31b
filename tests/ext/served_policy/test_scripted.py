"""Scripted SGLang and vLLM servers that lie about their weights."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from structlog.testing import capture_logs

from arealite.api.engine import Sequence
from arealite.api.engine_config import FSDPConfig, TrainEngineConfig
from arealite.api.experiment_config import run_paths
from arealite.api.llm_server import ExternalServersConfig
from arealite.base.errors import InvariantError
from arealite.ext.external.external_servers import ExternalServers
from arealite.ext.served_policy.canary import Canary
from arealite.ext.served_policy.proof_file import ProofFile, ServerProof, proof_notes
from arealite.impl.publisher import servers as base
from arealite.impl.publisher.disk import DiskPublisher
from arealite.impl.trainer.rank_group import World
from tests.fakes.scores import prompt_scores, weights_of
from tests.fakes.scripted_server import ScriptedServer
from tests.fakes.weight_faults import FAULTS, ignores_loads, loads
from tests.impl.publisher.sites import Site, publishing, servers
from tests.waiting import eventually


class ScoredEngine:
    """The engine of a trainer whose model does not exist."""

    version = 0

    def forward(self, rows: list[Sequence]) -> dict[str, list[np.ndarray]]:
        weights = weights_of(str(self.version))
        scores = [prompt_scores(weights, row.tokens.tolist()) for row in rows]
        return {"logprobs": [np.array([0.0, *row]) for row in scores]}


class Publishing:
    """A publisher with a canary, for the servers of a site."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.engine = ScoredEngine()

    async def publish(self, version: int) -> None:
        site = self.site
        if site.publisher is None:
            config = publishing(site.tmp_path, site.tmp_path / "model", timeout_s=60.0)
            ppo = config.trainer.ppo
            engine_options = TrainEngineConfig(fsdp=FSDPConfig(dtype="float32"))
            ppo = replace(ppo, engine=engine_options)
            config = replace(config, trainer=replace(config.trainer, ppo=ppo))
            engine = cast(Any, self.engine)
            site.publisher = DiskPublisher(config, engine)
            site.publisher.proof = Canary(config, engine, World())
            self.file = ProofFile(run_paths(config).root)
        self.engine.version = version
        assert site.publisher.proof is not None
        await asyncio.to_thread(site.publisher.proof.expect, version)
        await site.publish(version, float(version))

    def proofs(self) -> list[ServerProof]:
        return [line for line in self.file.lines() if isinstance(line, ServerProof)]


@pytest.fixture
async def publishing_site(site: Site, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Publishing]:
    monkeypatch.setattr(ScriptedServer, "scores", True)
    (site.tmp_path / "model" / "config.json").write_text('{"vocab_size": 320}')
    yield Publishing(site)


async def test_honest_server_is_proven_at_each_version(publishing_site: Publishing) -> None:
    async with servers(publishing_site.site, 2):
        for version in range(4):
            await publishing_site.publish(version)
        proofs = publishing_site.proofs()
        assert len(proofs) == 8
        assert all(proof.is_proven for proof in proofs), proofs


async def test_server_that_ignores_loads_stops_the_run(publishing_site: Publishing) -> None:
    async with servers(publishing_site.site, 1) as (server,):
        await publishing_site.publish(0)
        server.weights_after = ignores_loads
        with pytest.raises(InvariantError, match="old weights: the scores equal version 0's"):
            await publishing_site.publish(1)
        assert server.version == "-1"


@pytest.mark.parametrize("name", FAULTS)
async def test_planted_fault_stops_the_run_at_its_first_version(
    publishing_site: Publishing, name: str
) -> None:
    fault, reason = FAULTS[name]
    async with servers(publishing_site.site, 1) as (server,):
        for version in range(2):
            await publishing_site.publish(version)
        server.weights_after = fault
        with pytest.raises(InvariantError, match=reason):
            await publishing_site.publish(2)
        *earlier, first, second = publishing_site.proofs()
        assert [proof.is_proven for proof in earlier] == [True, True]
        assert first.fault == second.fault


@pytest.mark.parametrize("name", FAULTS)
async def test_planted_fault_of_an_external_server_stops_the_run(
    publishing_site: Publishing, name: str
) -> None:
    fault, reason = FAULTS[name]
    site = publishing_site.site
    model = {"vocab_size": 320, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    (site.tmp_path / "model" / "config.json").write_text(json.dumps(model))
    async with site.server_kind() as server:
        address = server.url.removeprefix("http://")
        config = publishing(site.tmp_path, site.tmp_path / "model")
        config = replace(config, llm_server=ExternalServersConfig(addresses=[address]))
        external = asyncio.create_task(ExternalServers(config).run())
        try:
            for version in range(2):
                await publishing_site.publish(version)
            server.weights_after = fault
            with pytest.raises(InvariantError, match=reason):
                await publishing_site.publish(2)
        finally:
            external.cancel()
            await asyncio.wait([external])
        proven = [proof.version for proof in publishing_site.proofs() if proof.is_proven]
        assert proven == [0, 1]


async def test_one_of_two_servers_that_ignores_loads_is_quarantined(
    publishing_site: Publishing,
) -> None:
    async with servers(publishing_site.site, 2) as (first, second):
        await publishing_site.publish(0)
        second.weights_after = ignores_loads
        await publishing_site.publish(1)
        assert publishing_site.site.quarantined() == ["s1"]
        assert first.version == "1"
        second.weights_after = loads
        await publishing_site.publish(2)
        await eventually(lambda: second.version == "2", "its update")
        await eventually(lambda: not publishing_site.site.quarantined(), "its proof")


async def test_cached_prefix_of_the_old_weights_is_named(publishing_site: Publishing) -> None:
    async with servers(publishing_site.site, 1) as (server,):
        server.keeps_prefixes = True
        await publishing_site.publish(0)
        with pytest.raises(InvariantError, match="stale prefix cache: it changes the next token"):
            await publishing_site.publish(1)


async def test_server_without_scores_is_named_once(publishing_site: Publishing) -> None:
    async with servers(publishing_site.site, 1) as (server,):
        server.scores = False
        with capture_logs() as events:
            for version in range(3):
                await publishing_site.publish(version)
        warnings = [event for event in events if event["event"] == "served weights not proven"]
        assert [(warning["server"], warning["version"]) for warning in warnings] == [("s0", 0)]
        reason = "server s0: servers of this kind return no log-probabilities of prompts"
        note = f"served weights never proven at versions 0, 1, 2 (3 in all; {reason})"
        assert proof_notes(publishing_site.file.path.parent) == [note]


async def test_late_proof_of_a_busy_server_stops_the_run(
    publishing_site: Publishing, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with servers(publishing_site.site, 1) as (server,):
        await publishing_site.publish(0)
        server.weights_after = ignores_loads
        server.hold_after = 0
        monkeypatch.setattr(base, "LATER_PROOF_S", 0.0)
        await publishing_site.publish(1)
        publisher = publishing_site.site.publisher
        assert publisher is not None and not publisher.needs_republish
        server.release()

        def is_stopped() -> bool:
            try:
                return publisher.needs_republish
            except InvariantError as error:
                return "old weights: the scores equal version 0's" in str(error)

        await eventually(is_stopped, "the end of the run")
