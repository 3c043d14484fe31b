"""Exact tokens with clients of each API, ten chat families and a scripted sampler."""

from __future__ import annotations

import json
import random

import aiohttp
import pytest

from arealite.api.llm import LLMRequest
from tests.fakes.chat_families import FAMILIES
from tests.fakes.family_answers import ONE_CALL, Plan, Reply, words
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


def tool(name: str, arguments: str) -> str:
    """Return the result of a tool call."""
    given = json.loads(arguments)
    return str(given["a"] + given["b"]) if name == "add" else f"{given['city']}: 21 °C ☁️"


def plan(family: str, turns: int) -> Plan:
    """Return a plan: `turns` answers to each question, the last one without calls."""

    def reply(request: LLMRequest, prompt: str, rng: random.Random) -> Reply:
        index = int(request.request_id.rpartition("/")[2])
        said, thought = words(rng, rng.randrange(1, 20)), words(rng, rng.randrange(1, 10))
        if index % turns == turns - 1:
            return Reply(said, thought)
        calls = [
            ("add", {"a": rng.randrange(100), "b": rng.randrange(100)}),
            ("weather", {"city": f"Zürich {words(rng, 2)}"}),
        ]
        count = 1 if family in ONE_CALL else rng.randrange(1, 3)
        said = said if rng.random() < 0.6 and family != "llama3_1" else ""
        return Reply(said, thought, rng.sample(calls, count))

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
            await client.play(asked, tool)
            rows = await sessions.close(session)
            expected = 2 if len(asked) > 1 and family in REWRITES else 1
            assert (rows, session.stats["malformed_calls"]) == (expected, 0), habits
    verdict = sessions.verdict()
    assert (verdict.wrong, verdict.lost, verdict.doubled) == (0, 0, 0), verdict.details
    assert verdict.tokens == verdict.trained > 500
    assert sessions.client.version > 5  # weights were published in the middle of answers
