"""A rollout worker on real servers, with its leases, episodes and HTTP answers."""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from arealite.api.experiment_config import ExperimentConfig, ModelConfig, name_dir
from arealite.api.llm import LLMClientConfig, LLMRequest, LLMResponse, SamplingConfig
from arealite.api.llm import ServersClientConfig as Options
from arealite.api.server_protocol import ServerAnswer
from arealite.api.trial import ClusterConfig
from arealite.ext.sglang.sglang_protocol import SGLangProtocol
from arealite.impl.client.server_choice import LLMServerState
from arealite.impl.client.servers_client import ServersClient
from arealite.impl.rollout.worker import RolloutWorker
from arealite.system.names.name_registry import NameRegistry
from tests.fakes import experiment as small
from tests.impl.rollout import worlds
from tests.impl.rollout.test_worker import FakeLink
from tests.sglang.shared import SharedServer
from tests.waiting import until

TOKENS = 160
EOS = 2
SILENT_S = 5.0
"""Seconds until the registry entry of a silent server expires."""
EXACT = SamplingConfig(max_new_tokens=TOKENS, min_new_tokens=TOKENS)
"""All generations have one length, so that a lost token is detected."""


class Client(ServersClient):
    """An environment that records the responses of agents."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.finished: list[tuple[LLMRequest, LLMResponse]] = []

    async def generate(self, request: LLMRequest) -> LLMResponse:
        response = await super().generate(request)
        self.finished.append((request, response))
        return response

    def server(self, server: SharedServer) -> LLMServerState:
        return next(s for s in self._router.servers.values() if s.address == server.address)


class Rollout:
    """A worker, its client, and the answers of servers by request id (without the attempt)."""

    def __init__(self, config: ExperimentConfig, monkeypatch: Any) -> None:
        self.names = NameRegistry(root=name_dir(config), ttl_s=600.0)
        self.client = Client(config, config.trainer.ppo.collector.client)
        self.link = FakeLink()
        self.worker = RolloutWorker(
            config, link=self.link, client=self.client, tokenizer=small.tokenizer()
        )
        self.answers: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        self.following: dict[str, asyncio.Task[None]] = {}
        self._leased = 0
        decode = SGLangProtocol.decode_answer

        def remember(
            protocol: SGLangProtocol, raw: bytes, num_before: int | None = None
        ) -> ServerAnswer:
            answer = json.loads(raw)
            self.answers[answer["meta_info"]["id"].rpartition("~")[0]].append(answer)
            return decode(protocol, raw, num_before)

        monkeypatch.setattr(SGLangProtocol, "decode_answer", remember)

    def add(self, server: SharedServer, **fields: Any) -> None:
        """Register a server and renew its entry, as its supervisor does."""
        assert server.real is not None
        entry = {"address": server.address, "pid": server.real.process.pid, "vocab_size": 64}
        entry |= {"context_length": 506, "type": "sglang"} | fields
        if task := self.following.pop(server.address, None):
            task.cancel()
        self.following[server.address] = asyncio.create_task(self._follow(server, entry))

    async def _follow(self, server: SharedServer, entry: dict[str, Any]) -> None:
        name, heard = server.address.rpartition(":")[2], time.monotonic()
        while True:
            try:
                answer = await asyncio.to_thread(server.get, "/model_info", seconds=1.0)
                heard = time.monotonic()
                value = entry | {"version": answer[1]["weight_version"]}
                await asyncio.to_thread(self.names.put, "llm_server", name, value)
            except OSError:
                if time.monotonic() - heard > SILENT_S:
                    await asyncio.to_thread(self.names.remove, "llm_server", name)
            await asyncio.sleep(0.1)

    def start(self, groups: int, *, members: int = 4, version: int = 0) -> None:
        """Add leases of episodes with one generation each."""
        for number in range(self._leased, self._leased + groups):
            lease = small.lease(number, members=members, prompt="ok", version=version)
            self.link.leases.put_nowait(lease)
        self._leased += groups

    async def end(self, episodes: int) -> list[LLMResponse]:
        """Wait for all episodes, check that none failed, and return the responses."""
        async with asyncio.timeout(120):
            while len(self.link.submitted) < episodes:
                self.link.seen.clear()
                await self.link.seen.wait()
        failures = [episode.failure for episode, _ in self.link.submitted if episode.failure]
        assert not failures, failures
        keys = {(episode.lease_id, episode.member) for episode, _ in self.link.submitted}
        assert len(keys) == len(self.link.submitted) == episodes
        return [response for _, response in self.client.finished]

    def kept(self) -> int:
        """Check that each output is the concatenation of its answers; return the number of
        tokens of partial answers."""
        partial = 0
        for request, response in self.client.finished:
            answers = self.answers[request.request_id]
            assert response.output_ids == [t for a in answers for t in a["output_ids"]]
            pairs = [p for a in answers for p in a["meta_info"]["output_token_logprobs"]]
            assert response.logprobs == [pair[0] for pair in pairs]
            partial += sum(len(answer["output_ids"]) for answer in answers[:-1])
        return partial


@asynccontextmanager
async def rollout(
    folder: Path, monkeypatch: Any, *servers: SharedServer, **options: Any
) -> AsyncIterator[Rollout]:
    """Run a worker on reset servers; `options` are options of the client."""
    assert worlds is not None
    assert servers
    base = small.experiment(
        "world",
        sampling=EXACT,
        concurrency=256,
        client=LLMClientConfig(servers=Options(**{"refresh_s": 0.2} | options)),
    )
    config = replace(
        base,
        cluster=ClusterConfig(name_root=str(folder / "names"), user="test", ttl_s=600.0),
        model=ModelConfig(path=servers[0].folders[0]),
    )
    made = Rollout(config, monkeypatch)
    for server in servers:
        made.add(server)
    task = asyncio.create_task(made.worker.run())
    try:
        ready = lambda: any(s.alive for s in made.client._router.servers.values())  # noqa: E731
        await eventually(ready, "a server in traffic")
        yield made
    finally:
        tasks = [task, *made.following.values()]
        for each in tasks:
            each.cancel()
        await asyncio.wait(tasks)


async def eventually(condition: Callable[[], object], what: str, seconds: float = 30.0) -> None:
    """Wait for a condition of a server without blocking the event loop."""
    await asyncio.to_thread(until, condition, what=what, seconds=seconds)


def running(server: SharedServer, at_least: int) -> Callable[[], bool]:
    """Return a condition: the server runs `count` requests."""

    def ask() -> bool:
        return server.get("/v1/loads")[1]["loads"][0]["num_running_reqs"] >= at_least

    return ask


async def update(server: SharedServer, mode: str, version: int) -> None:
    """Update the server to `folders[version]`, as a publisher does."""
    body = {"model_path": server.folders[version], "weight_version": str(version)}
    for path, more in (
        ("/pause_generation", {"mode": mode}),
        ("/update_weights_from_disk", body),
        ("/continue_generation", {}),
    ):
        status, answer = await asyncio.to_thread(server.post, path, **more)
        assert status == 200, answer


def logprobs_under(folder: str, prompt: list[int], output: list[int]) -> list[float]:
    """Return the output's logprobs by transformers without EOS, as the sampling options EXACT."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits_TV = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    logits_TV[:, EOS] = -torch.inf
    ids_T1 = torch.tensor(output)[:, None]
    return logits_TV.log_softmax(-1).gather(-1, ids_T1)[:, 0].tolist()
