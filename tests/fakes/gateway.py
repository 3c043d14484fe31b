"""A gateway on loopback whose sampler is scripted, and a small HTTP client."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp

from arealite.api.agent import Agent
from arealite.api.episode import Action, Seat
from arealite.api.llm import LLMRequest, LLMResponse, SamplingConfig
from arealite.api.task import Task
from arealite.api.trial import TrialConfig
from arealite.ext.gateway.config import GatewayConfig
from arealite.ext.gateway.gateway import Gateway
from arealite.ext.gateway.session import GatewaySession
from tests.fakes.client import ScriptedClient, response
from tests.fakes.experiment import tokenizer

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
TASK = Task(task_id="train-0", prompt="1+1=", ground_truth="2", extra_info={})


class Foreign(Agent):
    """An agent whose prompts come from outside."""

    async def act(self, observation: object) -> Action:
        """Refuse: only `generate` is used."""
        raise NotImplementedError


class Served:
    """A gateway and its clients. Generation number N answers `text`, by default "answer N"."""

    def __init__(self, gateway: Gateway, http: aiohttp.ClientSession) -> None:
        self.gateway, self.http = gateway, http
        self.text: Callable[[int], str] = "answer {}".format
        self.client = ScriptedClient(self._sample)

    def _sample(self, request: LLMRequest) -> LLMResponse | Exception:
        ids = tokenizer().encode(self.text(len(self.client.requests)))
        if request.on_tokens is not None:
            for token in ids:
                request.on_tokens([token])
        return response([*ids, tokenizer().eos_token_id])

    def open(self, *seats: str, **sampling: Any) -> GatewaySession:
        """Open a session with these seats, or one seat `agent`."""
        options = replace(SamplingConfig(max_new_tokens=64), **sampling)
        own = {name: Seat(name=name, sampling=options) for name in seats or ("agent",)}
        made = {
            name: Foreign(None, client=self.client, tokenizer=tokenizer(), seat=seat)
            for name, seat in own.items()
        }
        return self.gateway.open(TASK, made)

    async def send(
        self, key: str, body: Any, path: str = CHAT, method: str = "POST", **headers: str
    ) -> tuple[int, bytes]:
        """Send a request; return the status and the body of the answer."""
        sent = {"Authorization": f"Bearer {key}"} if key else {}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        data = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
        async with self.http.request(method, path, data=data, headers=sent) as answer:
            return answer.status, await answer.read()

    async def ask(self, session: GatewaySession, text: str = "hi", **more: Any) -> str:
        """Return the answer to a message of the user."""
        status, body = await self.send(session.endpoint.api_key, chat(text, **more))
        assert status == 200, body
        return content(body)


def chat(text: str = "hi", **more: Any) -> dict[str, Any]:
    """Return a body of /v1/chat/completions or of /v1/messages."""
    return {
        "model": "policy",
        "max_tokens": 32,
        "messages": [{"role": "user", "content": text}],
        **more,
    }


def content(body: bytes) -> str:
    """Return the text of the first choice."""
    return json.loads(body)["choices"][0]["message"]["content"]


@asynccontextmanager
async def serving(token: str = "", **options: Any) -> AsyncIterator[Served]:
    """Run a gateway."""
    gateway = Gateway(GatewayConfig(**options), args=TrialConfig(), token=token)
    await gateway.start()
    try:
        async with aiohttp.ClientSession(gateway.url) as http:
            yield Served(gateway, http)
    finally:
        await gateway.close()
