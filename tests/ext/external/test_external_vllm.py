"""External vLLM servers: recognised, used beside SGLang servers, and refused with a reason."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from arealite.api.llm import LLMClientConfig, LLMRequest, SamplingConfig
from arealite.ext.external.external_servers import ExternalServers
from arealite.ext.vllm.vllm_protocol import VLLMProtocol
from arealite.impl.client.servers_client import ServersClient
from tests.ext.external.test_external import at, examine, experiment, refusal, registering
from tests.fakes.sglang import FakeSGLang
from tests.fakes.vllm import FakeVLLM


async def test_vllm_server_is_recognised(tmp_path: Path) -> None:
    async with FakeVLLM(version="7") as server:
        (entry,) = await examine(experiment(tmp_path, at(server)))
    assert entry.value == {
        "address": server.url,
        "type": "external",
        "protocol": "vllm",
        "model_path": "fake-model",
        "model_type": None,
        "architectures": None,
        "context_length": 2048,
        "dtype": "float32",
        "version": "7",
        "host": "127.0.0.1",
        "pid": server.start_id,
        "vocab_size": 320,
    }


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"program_version": "0.31.1"}, "it is vLLM 0.31.1, which does not report the version"),
        ({"dev_mode": False}, "it is vLLM without the routes for weights"),
        ({"logprobs_mode": "raw_logprobs"}, "it is vLLM with raw_logprobs"),
        ({"context_length": 4096}, "it serves another model: its context is 4096"),
    ],
)
async def test_vllm_server_that_cannot_be_used_is_refused_by_name(
    tmp_path: Path, settings: dict[str, Any], reason: str
) -> None:
    async with FakeSGLang() as usable, FakeVLLM(**settings) as server:
        line = await refusal(experiment(tmp_path, at(usable), at(server)))
    assert line.startswith(f"llm_server.addresses: {at(server)}: {reason}")
    assert "\n" not in line


async def test_servers_of_both_kinds_generate_for_one_run(tmp_path: Path) -> None:
    async with FakeSGLang(version="3") as sglang, FakeVLLM(version="4") as vllm:
        config = experiment(tmp_path, at(sglang), at(vllm))
        async with registering(config, updates=False) as named:
            await named(lambda value: value["address"] == sglang.url)
            await named(lambda value: value["address"] == vllm.url)
            client = ServersClient(config, LLMClientConfig())
            await client.start()
            versions = set[int]()
            for number in range(4):
                request = LLMRequest(
                    request_id=f"{number}",
                    group_id=f"g{number}",
                    input_ids=[10, 20],
                    sampling=SamplingConfig(max_new_tokens=3),
                )
                versions.update((await client.generate(request)).versions)
            await client.close()
        assert versions == {3, 4}
        assert len(sglang.requests) == len(vllm.requests) == 2


async def test_load_of_a_vllm_server_is_registered(tmp_path: Path) -> None:
    load = {"running": 2, "waiting": 1, "capacity": 0}
    async with (
        FakeVLLM(load=lambda: load) as server,
        registering(experiment(tmp_path, at(server))) as named,
    ):
        await named(lambda value: value.get("load") == load)


@pytest.mark.parametrize("is_alive", [True, False])
async def test_busy_server_is_kept_while_it_answers_its_health(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_alive: bool
) -> None:
    """The first question for its version is not answered; after it, /health decides."""
    monkeypatch.setattr(VLLMProtocol, "status_s", 0.0)
    async with FakeVLLM() as server:
        servers = ExternalServers(experiment(tmp_path, at(server)))
        entry = await servers.describe(at(server))
        servers.registry.ttl_s = 0.3
        server.fail_next("hang", path="/weight_info")
        server.fail_next("500", path="/weight_info")
        if not is_alive:
            server.fail_next("500", path="/health")
        error = await servers._until_silent(entry, asyncio.Event())
        servers.pool.close()
    assert ("/weight_info answered an error" in error) == is_alive
    assert is_alive or "waited 0.3 s" in error
