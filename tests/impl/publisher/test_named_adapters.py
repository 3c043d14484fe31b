"""Adapters of SGLang and vLLM: each version has its own name, and requests name it."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from arealite.api.llm import SamplingConfig
from arealite.api.publisher import Generate
from arealite.api.server_protocol import GenerateRequest, adapter_of
from arealite.ext.server_processes.named_adapters import NAME_WITH_VERSION
from arealite.ext.sglang.sglang_protocol import SGLangProtocol
from arealite.impl.client.server_choice import LLMServerState
from arealite.impl.publisher import servers as base
from tests.fakes.scripted_server import ScriptedServer
from tests.fakes.server_kinds import kind as kind
from tests.fakes.sglang import FakeSGLang
from tests.fakes.vllm import FakeVLLM
from tests.impl.publisher.adapter_sites import AdapterSite, adapter_site
from tests.impl.publisher.sites import paths
from tests.waiting import eventually


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "WATCH_S", 0.02)
    monkeypatch.setattr(base, "RETRY_S", 0.02)


@pytest.fixture
async def site(tmp_path: Path, kind: type[ScriptedServer]) -> AsyncIterator[AdapterSite]:
    """One server, to which nothing was published."""
    async with adapter_site(tmp_path, kind) as made:
        yield made


def adapters(server: ScriptedServer) -> list[str]:
    """Return the adapters that requests for tokens named, in their order."""
    return [sent.adapter for sent in server.requests]


def loaded(server: Any) -> set[str]:
    return {*server.adapters.content_of_name}


def probes(server: Any) -> int:
    """Forget the requests so far."""
    server.requests.clear()
    server.calls.clear()
    return 0


async def test_adapter_is_loaded_beside_generation(site: AdapterSite) -> None:
    (server,) = site.servers
    for version in range(3):
        report = await site.publish(version)
        assert (server.version, loaded(server)) == (f"policy-{version}", {f"policy-{version}"})
        assert site.is_adapter() and report.stall_s == report.pause_s == 0.0 < report.load_s
    assert not {server.pause_path, server.load_path} & {*paths(server)}


async def test_requests_continue_under_the_new_adapter(site: AdapterSite) -> None:
    """The tokens have the version of the adapter that sampled them, not the server's label."""
    (server,) = site.servers
    await site.publish(1)
    await site.known("policy-1")
    probes(server)
    server.hold_after = 3
    generating = asyncio.ensure_future(site.generate())
    await server.held(1)
    await site.publish(2)
    server.release()
    response = await generating
    assert response.versions == [1, 1, 1, 2, 2, 2]
    named = adapters(server)
    assert (named[0], named[-1], response.interruptions) == ("policy-1", "policy-2", 1)
    assert getattr(server, "stale_prefix_hits", 0) == 0


async def test_request_that_names_an_old_adapter_gets_its_tokens_or_none(
    site: AdapterSite,
) -> None:
    """SGLang loads the old adapter again; vLLM refuses, and the client waits for the entry."""
    (server,) = site.servers
    await site.publish(1)
    await site.known("policy-1")
    probes(server)
    (state,) = site.client._router.servers.values()
    site.silent.add(server)
    await site.publish(2)
    server.requests.clear()
    state.set_label("policy-1")
    generating = asyncio.ensure_future(site.generate())
    await server.received(1)
    site.silent.clear()
    response = await generating
    named = adapters(server)
    assert response.versions == [int(named[-1].removeprefix("policy-"))] * 6
    if isinstance(server, FakeVLLM):
        assert named[-1] == "policy-2" and {*named[:-1]} == {"policy-1"}
    await site.publish(3)
    assert loaded(server) == {"policy-3"}


async def test_restarted_server_does_not_answer_with_its_base_model(site: AdapterSite) -> None:
    (server,) = site.servers
    await site.publish(1)
    await site.known("policy-1")
    site.silent.add(server)  # its supervisor has not noticed the restart
    await server.restart()
    server.requests.clear()
    generating = asyncio.ensure_future(site.generate(min_version=1))
    await server.received(1)
    site.silent.clear()
    response = await generating
    assert response.versions == [1] * 6
    answered = [name for name in adapters(server) if name]
    assert {*answered} == {"policy-1"} and site.client.stats()["stale_answers"] >= 1


async def test_refused_adapter_is_followed_by_merged_weights(
    tmp_path: Path, kind: type[ScriptedServer], capsys: pytest.CaptureFixture[str]
) -> None:
    async with adapter_site(tmp_path, kind, max_rank=2) as site:
        (server,) = site.servers
        assert site.publisher.takes_adapter
        for version in (1, 2):
            await site.publish(version)
            assert server.version == str(version) and not site.is_adapter()
            assert (await site.generate()).versions == [version] * 6
        assert not loaded(server) and adapters(server)[-1] == ""
    assert capsys.readouterr().out.count("adapter refused") == 1


@pytest.mark.parametrize(
    "config", [{"use_rslora": True}, {"alpha_pattern": {"a": 4}}, {"rank_pattern": {"a": 2}}]
)
async def test_adapter_with_another_scale_is_merged(
    tmp_path: Path, kind: type[ScriptedServer], config: dict[str, Any]
) -> None:
    async with adapter_site(tmp_path, kind, adapter_config=config) as site:
        (server,) = site.servers
        await site.publish(1)
        assert server.version == "1" and not site.is_adapter() and not loaded(server)


class WrongAdapters:
    """A proof that finds other weights in each server that requests must name an adapter for."""

    def __init__(self, server: ScriptedServer) -> None:
        self._server = server

    def expect(self, version: int) -> None:
        """Expect nothing."""

    async def fault(self, server_id: str, version: int, generate: Generate) -> str:
        sampling = SamplingConfig(max_new_tokens=1)
        await generate(GenerateRequest(rid="proof~", input_ids=[5, 6], sampling=sampling))
        return "other weights" if adapters(self._server)[-1] else ""


async def test_adapter_that_the_canary_refutes_is_followed_by_merged_weights(
    site: AdapterSite,
) -> None:
    """The proof names the adapter: else it would prove the base model."""
    (server,) = site.servers
    site.publisher.proof = WrongAdapters(server)  # type: ignore[assignment]
    await site.publish(3)
    assert (server.version, adapters(server)[-1]) == ("3", "")
    assert "policy-3" in adapters(server) and not loaded(server)


async def test_server_without_adapters_gets_merged_weights(
    tmp_path: Path, kind: type[ScriptedServer]
) -> None:
    async with adapter_site(tmp_path, kind, max_rank=0) as site:
        (server,) = site.servers
        assert not site.publisher.takes_adapter
        await site.publish(1)
        assert server.version == "1" and "/v1/models" not in paths(server)


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_merged_weights_end_the_requests_that_name_an_adapter(
    tmp_path: Path, kind: type[ScriptedServer], mode: str
) -> None:
    async with adapter_site(tmp_path, kind, pause_mode=mode) as site:
        (server,) = site.servers
        await site.publish(1)
        await site.known("policy-1")
        server.requests.clear()
        server.hold_after = 3
        generating = asyncio.ensure_future(site.generate())
        await server.held(1)
        (control,) = site.publisher._servers.values()
        control.serves_adapters = False
        await site.publish(2)
        assert server.version == "2"
        assert isinstance(server, FakeSGLang) or not loaded(server)  # SGLang loads old names again
        server.release()
        response = await generating
        assert response.versions == [1, 1, 1, 2, 2, 2]
        assert (adapters(server)[0], adapters(server)[-1]) == ("policy-1", "")


async def test_adapter_over_merged_weights_is_never_used(tmp_path: Path) -> None:
    """SGLang loads an old name again by itself; the label of the answer shows the base weights."""
    async with adapter_site(tmp_path, FakeSGLang) as site:
        (server,) = site.servers
        await site.publish(1)
        await site.known("policy-1")
        (state,) = site.client._router.servers.values()
        (control,) = site.publisher._servers.values()
        control.serves_adapters = False
        site.silent.add(server)
        await site.publish(2)
        server.requests.clear()
        state.set_label("policy-1")
        generating = asyncio.ensure_future(site.generate())
        await server.received(1)
        site.silent.clear()
        response = await generating
        named = adapters(server)
        assert (response.versions, named[0], named[-1]) == ([2] * 6, "policy-1", "")
        assert site.client.stats()["stale_answers"] >= 1


async def test_base_weights_are_loaded_again_after_merged_ones(site: AdapterSite) -> None:
    (server,) = site.servers
    await site.publish(0)
    (control,) = site.publisher._servers.values()
    control.serves_adapters = False
    await site.publish(1)
    assert server.version == "1"
    control.serves_adapters = True
    base_content = server.weights.content
    probes(server)
    await site.publish(2)
    assert (server.version, loaded(server)) == ("policy-2", {"policy-2"})
    assert server.pause_path in paths(server) and server.load_path in paths(server)
    body = dict(server.calls)[server.load_path]
    assert str(site.publisher.model_path) in str(body) and server.weights.content != base_content
    probes(server)
    await site.publish(3)
    assert server.load_path not in paths(server)


async def test_adapters_of_an_earlier_run_are_unloaded(site: AdapterSite) -> None:
    (server,) = site.servers
    await site.publish(7)
    path = str(site.publisher._folder_of(7))
    assert server.adapters.refusal("policy-3", path) is None
    assert server.adapters.refusal("mine", path) is None
    await site.publish(8)
    assert loaded(server) == {"policy-8", "mine"}


async def test_version_that_is_trained_again_is_loaded_again(
    site: AdapterSite, tmp_path: Path
) -> None:
    """After a roll-back the name is the same, and no prefix of the old adapter is used."""
    (server,) = site.servers
    await site.publish(7)
    await site.known("policy-7")
    await site.generate()
    folder = tmp_path / "again"
    shutil.copytree(site.publisher._folder_of(7), folder)
    save_file({"x": torch.ones(3)}, folder / "adapter_model.safetensors")
    (control,) = site.publisher._servers.values()
    before = server.adapters.content_of_name["policy-7"]
    await asyncio.to_thread(site.publisher.call, control.load_adapter(folder, 7))
    assert server.adapters.content_of_name["policy-7"] != before
    assert (await site.generate()).versions == [7] * 6
    assert getattr(server, "stale_prefix_hits", 0) == 0


async def test_two_kinds_of_servers_serve_one_adapter(tmp_path: Path) -> None:
    async with adapter_site(tmp_path, FakeSGLang, FakeVLLM) as site:
        report = await site.publish(1)
        assert report.servers == 2
        await site.known("policy-1")
        answers = await asyncio.gather(*(site.generate(f"r{index}") for index in range(4)))
        assert all(answer.versions == [1] * 6 for answer in answers)
        for server in site.servers:
            assert loaded(server) == {"policy-1"} and adapters(server)[-1] == "policy-1"


async def test_server_without_adapters_that_joins_makes_all_merged(site: AdapterSite) -> None:
    (server,) = site.servers
    await site.publish(1)
    assert server.version == "policy-1"
    async with FakeVLLM(model_path=server.model_path) as late:
        site.names.put("llm_server", "late", late.entry())
        await eventually(lambda: site.publisher.needs_republish, "another server")
        await site.publish(2)
        await eventually(lambda: late.version == "2", "the update of a quarantined server")
        assert (server.version, loaded(server)) == ("2", set[str]())


async def test_failed_load_keeps_the_old_adapter(
    site: AdapterSite, kind: type[ScriptedServer]
) -> None:
    (server,) = site.servers
    await site.publish(1)
    path = "/load_lora_adapter" if kind is FakeSGLang else "/v1/load_lora_adapter"
    server.fail_next("reset", path=path)
    await site.publish(2)
    assert (server.version, loaded(server)) == ("policy-2", {"policy-2"})


def test_client_knows_the_name_of_each_version() -> None:
    names = ["policy", "policy-7", "up@9", "policy-1@3", "theirs@latest", "@2"]
    assert [adapter_of(name) for name in names] == ["", "policy-7", "", "", "", ""]
    adapters = [name for name in names if NAME_WITH_VERSION.fullmatch(name)]
    assert adapters == ["up@9", "policy-1@3"]
    server = LLMServerState(id="s", address="http://s", protocol=SGLangProtocol(), alive=True)
    server.adapter_versions = {"embedded": 2}
    assert (server.version_of("embedded"), server.version_name("embedded")) == (2, "")
    assert (server.version_of("none"), server.version_name("none")) == (-1, "")
    server.version_names["policy-1"] = "policy-1@3"
    assert (server.version_of("policy-1"), server.version_name("policy-1")) == (3, "policy-1@3")
    assert server.can_sample(3, "policy-1") and not server.can_sample(4, "policy-1")
    server.set_label("-1", "policy-1")
    assert (server.version_of("policy-1"), server.version_name("policy-1")) == (-1, "")
    server.set_label("-1")
    assert not server.can_sample(0, "embedded"), "the base weights are unknown"
