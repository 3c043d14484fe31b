"""What real clients sent is replayed: every token is exact, in each chat family."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from arealite.api.llm import LLMRequest
from tests.fakes.chat_families import FAMILIES
from tests.fakes.family_answers import ONE_CALL, Reply
from tests.fakes.gateway_sessions import GatewaySessions
from tests.fakes.recording import CORPORA, read_corpus, replay

RECORDED = sorted(CORPORA.glob("*.jsonl"))


@pytest.mark.parametrize("path", RECORDED, ids=[path.stem for path in RECORDED])
async def test_replayed_client_has_exact_tokens_in_each_family(path: Path) -> None:
    about, requests = read_corpus(path)
    replies: list[Any] = [request["reply"] for request in requests if request["reply"]]

    def plan(request: LLMRequest, prompt: str, rng: random.Random) -> Reply:
        return Reply(*replies[int(request.request_id.rpartition("/")[2])])

    has_pairs = any(len(calls) > 1 for _, _, calls in replies)
    for family in FAMILIES.keys() - (ONE_CALL if has_pairs else set()):
        sessions = GatewaySessions(family, plan, seed=3)
        async with sessions, aiohttp.ClientSession() as http:
            session = sessions.open()
            endpoint = session.endpoint
            await replay(http, endpoint.anthropic_base_url, endpoint.api_key, requests)
            rows = await sessions.close(session)
        verdict = sessions.verdict()
        assert (verdict.wrong, verdict.lost, verdict.doubled) == (0, 0, 0), verdict.details
        assert verdict.trained == verdict.tokens > 0
        if family == about["family"]:
            assert rows == about["rows"]
