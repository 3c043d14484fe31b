"""An LLM client that answers from a script, for tests of agents, collectors and workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from arealite.api.llm import LLMClient, LLMRequest, LLMResponse


def echo(request: LLMRequest) -> LLMResponse:
    """Return the prompt's last three tokens, version 1, all with logprob -0.5."""
    ids = request.input_ids[-3:]
    return response(ids)


def response(
    ids: list[int], *, version: int = 1, stop_reason: str = "stop", interruptions: int = 0
) -> LLMResponse:
    """Return a response of one version."""
    count = len(ids)
    return LLMResponse(
        output_ids=ids,
        logprobs=[-0.5] * count,
        versions=[version] * count,
        stop_reason=stop_reason,
        interruptions=interruptions,
    )


class ScriptedClient(LLMClient):
    """Answers each request with `script(request)`, or raises it if it is an error."""

    def __init__(self, script: Callable[[LLMRequest], LLMResponse | Exception] = echo) -> None:
        self.script = script
        self.requests: list[LLMRequest] = []
        self.cancelled: list[str] = []
        self.gate = asyncio.Event()
        """Generations block while this event is not set."""
        self.gate.set()
        self.arrived = asyncio.Condition()
        self.is_open = False

    async def start(self) -> None:
        """Open."""
        self.is_open = True

    async def close(self) -> None:
        """Close."""
        self.is_open = False

    def stats(self) -> dict[str, float]:
        """Return a counter."""
        return {"requests": float(len(self.requests))}

    async def generate(self, request: LLMRequest) -> LLMResponse:
        """Return or raise the result of the script."""
        self.requests.append(request)
        try:
            async with self.arrived:
                self.arrived.notify_all()
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.append(request.request_id)
            raise
        answer = self.script(request)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def received(self, count: int, *, seconds: float = 60.0) -> None:
        """Wait until `count` generations were requested."""
        async with asyncio.timeout(seconds), self.arrived:
            await self.arrived.wait_for(lambda: len(self.requests) >= count)
