"""Requests that schemathesis generates from /openapi.json: none is answered with 500."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from pathlib import Path

import pytest

from arealite.api.llm import LLMRequest
from tests.fakes.family_answers import Reply, words
from tests.fakes.gateway_sessions import GatewaySessions

pytestmark = [pytest.mark.agents, pytest.mark.timeout(900)]

EXAMPLES = 60
"""Largest number of examples of each route and phase."""
SECONDS = 600


def plan(request: LLMRequest, prompt: str, rng: random.Random) -> Reply:
    """Return a short answer, some with a call of a tool that may not exist."""
    calls = [("add", {"a": 1, "b": [None, {"c": "ü"}]})] * (rng.random() < 0.3)
    return Reply(words(rng, 3), words(rng, 2), calls)


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gpt_oss"])
async def test_fuzzed_requests_are_answered_or_refused(family: str, tmp_path: Path) -> None:
    python = Path(os.environ.get("AGENTS_PYTHON", sys.executable))
    async with GatewaySessions(family, plan, seed=5) as sessions:
        session = sessions.open()
        url, report = sessions.gateway.url, tmp_path / "requests.ndjson"
        key = json.dumps(f"Bearer {session.endpoint.api_key}")
        (tmp_path / "schemathesis.toml").write_text(f"[headers]\nAuthorization = {key}\n")
        process = await asyncio.create_subprocess_exec(
            *(str(python.parent / "schemathesis"), "run", f"{url}/openapi.json"),
            *("--phases", "coverage,fuzzing", "--max-examples", str(EXAMPLES), "--no-shrink"),
            *("--checks", "not_a_server_error", "--seed", "16", "--generation-deterministic"),
            *("--suppress-health-check", "all", "--continue-on-failure", "--warnings", "off"),
            *("--no-color", "--report-ndjson-path", str(report)),
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await asyncio.wait_for(process.communicate(), SECONDS)
        assert process.returncode == 0, output.decode()[-4000:]
        assert report.read_text().count('"status_code"') > 500
        await sessions.close(session)
    verdict = sessions.verdict()
    assert (verdict.wrong, verdict.lost, verdict.doubled) == (0, 0, 0), verdict.details
    assert verdict.tokens > 0
