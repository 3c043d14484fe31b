"""Generations through vLLM servers that fail in each step of their updates.

The tokens of the servers depend on their weights, so a token shows the version that sampled it.
VLLM_FAULTS=10000 injects more faults; VLLM_SEED=7 changes their order.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
from safetensors.torch import load_file

from arealite.api.llm import (
    LLMClientConfig,
    LLMRequest,
    LLMResponse,
    SamplingConfig,
    ServersClientConfig,
)
from arealite.base.errors import ServerUnavailable
from arealite.impl.client import servers_client
from arealite.impl.client.servers_client import ServersClient
from tests.fakes.scripted_server import Job, ScriptedServer
from tests.fakes.vllm import FakeVLLM
from tests.impl.publisher.sites import Site, publishing
from tests.waiting import eventually

FAULTS = int(os.environ.get("VLLM_FAULTS", "1000"))
SEED = int(os.environ.get("VLLM_SEED", "0"))
NUM_TOKENS = 12
HANG_S = 0.02
NUM_GENERATIONS = 3
"""Generations at any time."""
ROUTES = (
    *("/is_paused", "/version", "/pause", "/start_weight_update", "/update_weights"),
    *("/finish_weight_update", "/reset_prefix_cache", "/resume", "/weight_info"),
    *("/update_weight_version", "/abort_requests"),
    "/collective_rpc arealite_check_weights",
    "/collective_rpc arealite_state",
    "/collective_rpc reload_weights",
)
FAULT_TYPES = [
    *((kind, route) for route in ROUTES for kind in ("die", "die", "500", "reset", "hang")),
    *((kind, "/inference/v1/generate") for kind in ("die", "500", "reset", "abort")),
]
"""A hanging generation would end only at its deadline."""


def token_after(tokens: list[int], version: int) -> int:
    """Return the token that the weights of a version sample."""
    return 3 + (tokens[-1] * 7 + len(tokens) + 31 * version) % 256


class WeighedVLLM(FakeVLLM):
    """A server whose tokens depend on its weights. It is restarted when it ends."""

    def set_up(self) -> None:
        super().set_up()
        self.token_s = 0.002
        self.faults = Counter[str]()
        self.ended = asyncio.Event()
        self.weights.read_folder = _version_in_folder

    def entry(self) -> dict[str, Any]:
        return super().entry() | {"pid": self.start_id}

    async def sample(self, job: Job) -> int:
        await super().sample(job)
        content = self.weights.content
        return token_after(job.prompt + job.output, 0 if content == "start" else int(content))

    def suffer(self, kind: str, route: str) -> None:
        self.faults[f"{kind} {route}"] += 1
        super().suffer(kind, route)

    async def _stop(self) -> None:
        await super()._stop()
        self.ended.set()

    def end_hang(self) -> None:
        """Kill the server soon, as a supervisor does when a server hangs."""
        number = self.num_starts
        asyncio.get_running_loop().call_later(
            HANG_S,
            lambda: self._tasks.create_task(self.kill_start(number)),
        )

    async def supervise(self) -> None:
        """Restart the server whenever it ends."""
        while True:
            await self.ended.wait()
            await self.restart()
            self.ended.clear()


def _version_in_folder(path: str) -> str:
    """Return the version that `Site.publish` wrote into the weights."""
    return str(int(load_file(f"{path}/model.safetensors")["a.weight"][0, 0]))


class Generations:
    """Generates until `stop`, and checks each response."""

    def __init__(self, client: ServersClient) -> None:
        self.client = client
        self.finished = Counter[str]()
        self.versions = set[int]()
        self.is_stopped = False

    async def run(self, number: int) -> None:
        """Generate one response after the other."""
        turn = 0
        while not self.is_stopped:
            turn += 1
            await self.generate([3 + number, 3 + turn % 200], is_stream=number % 3 == 0)

    async def generate(self, prompt: list[int], *, is_stream: bool) -> None:
        """Generate and check one response."""
        streamed = list[int]()
        request = LLMRequest(
            request_id=f"{prompt}",
            group_id=f"{prompt}",
            input_ids=prompt,
            sampling=SamplingConfig(max_new_tokens=NUM_TOKENS),
            on_tokens=streamed.extend if is_stream else None,
        )
        try:
            response = await self.client.generate(request)
        except ServerUnavailable as error:
            # A stream that is lost has tokens without versions.
            assert is_stream and "streamed" in str(error), error
            self.finished["lost streams"] += 1
            return
        self.check(prompt, response)
        assert not is_stream or streamed == response.output_ids
        self.finished["streams" if is_stream else "responses"] += 1

    def check(self, prompt: list[int], response: LLMResponse) -> None:
        """Check that each token was sampled once, by the weights of its version."""
        assert response.stop_reason == "length"
        assert len(response.output_ids) == len(response.versions) == NUM_TOKENS
        tokens = list(prompt)
        for token, version in zip(response.output_ids, response.versions, strict=True):
            assert token == token_after(tokens, version), (response, len(tokens))
            tokens.append(token)
        self.versions.update(response.versions)


@pytest.fixture
def kind() -> type[ScriptedServer]:
    return WeighedVLLM


@asynccontextmanager
async def generating(site: Site, servers: list[WeighedVLLM]) -> AsyncIterator[Generations]:
    """Generate through registered servers, which are restarted when they end."""
    options = ServersClientConfig(refresh_s=0.05, request_timeout_s=60.0, connect_timeout_s=60.0)
    client = ServersClient(
        replace(publishing(site.tmp_path, site.tmp_path / "model"), server_wait_s=60.0),
        LLMClientConfig(servers=options),
    )
    registry = replace(site.names, heartbeat_s=0.05)
    async with AsyncExitStack() as stack:
        for index, server in enumerate(servers):
            await stack.enter_async_context(server)
            server.on_hang = server.end_hang
            name = registry.registered("llm_server", f"s{index}", server.entry)
            await stack.enter_async_context(name)
        await client.start()
        stack.push_async_callback(client.close)
        generations = Generations(client)
        supervisors = [asyncio.ensure_future(server.supervise()) for server in servers]
        running = [
            asyncio.ensure_future(generations.run(number)) for number in range(NUM_GENERATIONS)
        ]
        try:
            yield generations
            generations.is_stopped = True
            await asyncio.gather(*running)
        finally:
            for task in (*running, *supervisors):
                task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(*running, *supervisors)


@pytest.mark.parametrize(
    ("mode", "has_modules"),
    [("retract", True), ("abort", True), ("in_place", True), ("retract", False)],
    ids=["retract", "abort", "in_place", "stock"],
)
async def test_tokens_are_right_while_servers_fail_in_each_step_of_updates(
    site: Site, monkeypatch: pytest.MonkeyPatch, mode: str, has_modules: bool
) -> None:
    monkeypatch.setattr(servers_client, "MAX_BACKOFF_S", 0.02)
    rng = random.Random(f"{SEED} {mode} {has_modules}")
    servers = [WeighedVLLM(has_modules=has_modules) for _ in range(2)]
    async with generating(site, servers) as generations:
        version = 0
        while sum(server.faults.total() for server in servers) < FAULTS / 4:
            version += 1
            for server in servers:
                server.recover()
                for kind, route in rng.sample(FAULT_TYPES, 3):
                    server.fail_next(kind, path=route)
            await site.publish(version, float(version), pause_mode=mode)
        for server in servers:
            server.recover()
        await eventually(
            lambda: all(
                server.version == f"{version}" and server.paused is None for server in servers
            ),
            "the newest version at each server",
        )
    assert sum(server.broken_tokens for server in servers) == 0
    if mode != "in_place":  # running requests hold the cache of an update in place
        assert sum(server.stale_prefix_hits for server in servers) == 0
    assert generations.finished["responses"] > NUM_GENERATIONS
    assert len(generations.versions) > 2
