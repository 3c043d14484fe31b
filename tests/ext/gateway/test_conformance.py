"""Exact tokens with clients of each API, ten chat families and a scripted sampler."""

from __future__ import annotations

import asyncio
import json
import random

import aiohttp
import pytest

from arealite.api.llm import LLMRequest
from arealite.ext.gateway import gateway
from arealite.ext.gateway.reply import Reply
from arealite.ext.gateway.request_data import ApiError
from tests.fakes.chat_families import FAMILIES
from tests.fakes.family_answers import ONE_CALL, Plan, words
from tests.fakes.family_answers import Reply as Said
from tests.fakes.gateway_sessions import GatewaySessions
from tests.fakes.simple_clients import CLIENTS

QUESTIONS = ("How warm is it in Zürich?", "And in München?")
REWRITES = frozenset({"qwen3", "glm4_5", "gpt_oss", "mistral"})
"""Templates that change the past when a second question comes."""
HABITS = {
    "chat": [["thoughts"], ["reserialised", "renamed"], ["trimmed", "extra"]],
    "responses": [["previous"], ["thoughts", "renamed"], ["reserialised", "trimmed"]],
    "messages": [["thoughts", "extra"], ["renamed"], ["reserialised", "trimmed", "extra"]],
}


class Tools:
    """Tools whose results are unique."""

    def __init__(self) -> None:
        self.results: list[str] = []

    def call(self, name: str, arguments: str) -> str:
        """Return the result of a tool call."""
        given = json.loads(arguments)
        assert given.keys() == ({"a", "b"} if name == "add" else {"city"})
        self.results.append(f"result {len(self.results)}: 21 °C ☁️")
        return self.results[-1]


def plan(family: str, turns: int) -> Plan:
    """Return a plan: `turns` answers to each question, the last one without calls."""

    def reply(request: LLMRequest, prompt: str, rng: random.Random) -> Said:
        index = int(request.request_id.rpartition("/")[2])
        said, thought = words(rng, rng.randrange(1, 20)), words(rng, rng.randrange(1, 10))
        if index % turns == turns - 1:
            return Said(said, thought)
        calls = [
            ("add", {"a": rng.randrange(100), "b": rng.randrange(100)}),
            ("weather", {"city": f"Zürich {words(rng, 2)}"}),
        ]
        count = 1 if family in ONE_CALL else rng.randrange(1, 3)
        said = said if rng.random() < 0.6 and family != "llama3_1" else ""
        return Said(said, thought, rng.sample(calls, count))

    return reply


@pytest.mark.parametrize("api", [*CLIENTS])
@pytest.mark.parametrize("family", [*FAMILIES])
async def test_all_sampled_tokens_are_trained_once_under_their_own_prefix(
    family: str, api: str
) -> None:
    sessions = GatewaySessions(family, plan(family, turns=3), seed=7)
    async with sessions, aiohttp.ClientSession() as http:
        for number, habits in enumerate(HABITS[api] * 2):
            asked = QUESTIONS[: 1 + number % 2]
            session = sessions.open()
            client = CLIENTS[api](http, session, stream=number % 3 > 0, habits=habits)
            tools = Tools()
            await client.play(asked, tools.call)
            rows = await sessions.close(session)
            text = sessions.text(sessions.segments[-1])
            shown = [json.dumps(each)[1:-1] if each not in text else each for each in tools.results]
            assert [text.count(each) for each in shown] == [1] * len(shown)
            assert sorted(shown, key=text.index) == shown
            expected = 2 if len(asked) > 1 and family in REWRITES else 1
            assert (rows, session.stats["malformed_calls"]) == (expected, 0), habits
    verdict = sessions.verdict()
    assert (verdict.wrong, verdict.lost, verdict.doubled) == (0, 0, 0), verdict.details
    assert verdict.tokens == verdict.trained > 500
    assert sessions.client.version > 5  # weights were published in the middle of answers


async def test_client_that_leaves_at_the_last_event_has_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """openai-agents, camel-ai and codex close the connection before the stream's end is written."""
    left, finish, finishing = asyncio.Event(), Reply.finish, list[asyncio.Task[None]]()

    def finish_later(reply: Reply, *error: ApiError) -> None:
        async def wait() -> None:
            await left.wait()
            finish(reply, *error)

        finishing.append(session.spawn(wait()))

    monkeypatch.setattr(Reply, "finish", finish_later)
    monkeypatch.setattr(gateway, "KEEP_ALIVE_S", 0.01)  # writing it ends a broken connection
    async with GatewaySessions("qwen2_5", plan("qwen2_5", turns=1)) as sessions:
        session = sessions.open()
        host, port = sessions.gateway.url.removeprefix("http://").split(":")
        body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "stream": True})
        head = f"Authorization: Bearer {session.endpoint.api_key}\r\nContent-Length: {len(body)}"
        reader, writer = await asyncio.open_connection(host, int(port))
        line = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost"
        writer.write(f"{line}\r\n{head}\r\n\r\n{body}".encode())
        await reader.readuntil(b"data: [DONE]\n\n")
        (served,) = [task for task in asyncio.all_tasks() if "RequestHandler.start" in repr(task)]
        writer.transport.abort()
        await asyncio.wait([served])
        left.set()
        await asyncio.wait(finishing)
        rows = await sessions.close(session)
    assert (rows, session.stats["undelivered_turns"]) == (1, 0)
    assert session.answer
