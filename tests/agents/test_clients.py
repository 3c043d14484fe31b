"""Real clients play conversations with tools against the gateway and a scripted sampler.

Run it with `make test-agents`, which installs the clients. Each client plays sessions in all ten
chat families, with weights published in the middle of answers. out/agents.json has the figures.
AGENTS_RECORD=1 also writes tests/fakes/corpora.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from arealite.api.llm import LLMRequest
from tests.fakes.chat_families import FAMILIES
from tests.fakes.cutting import cutting
from tests.fakes.family_answers import ONE_CALL, Plan, Reply, words
from tests.fakes.gateway_sessions import GatewaySessions
from tests.fakes.recording import CORPORA, Recorder, recording
from tests.fakes.scripted_tokens import Verdict

pytestmark = [pytest.mark.agents, pytest.mark.timeout(1800)]

HERE = Path(__file__).parent
OUT = Path("out/agents.json")
QUESTIONS = ["How warm is it in Zürich, and what is 12 + 30?", "And in München? Add 1 to it."]
LENGTH = int(os.environ.get("AGENTS_WORDS", "80"))
"""Mean words of an answer."""
CUTS = int(os.environ.get("AGENTS_CUTS", "1000"))
REWRITES = frozenset({"qwen3", "glm4_5", "gpt_oss", "mistral"})
"""Templates that change the past when a second question comes."""


@dataclass(frozen=True)
class Client:
    """A driver in tests/agents/clients, and what its model does."""

    module: str
    tools: str = "functions"
    streams: tuple[bool, ...] = (False, True)
    questions: int = 2
    linear: tuple[str, ...] = ("whole_1", "whole_2", "streamed_1", "streamed_2")
    """The ways and numbers of questions for which the client only appends to its history."""
    venv: str = ""
    """A folder of the clients' virtual environment with one for this client."""
    turns: int = 5
    """Answers to a question; the last one ends it."""


CLIENTS = {
    "openai chat": Client("openai_chat"),
    "openai responses": Client("openai_responses"),
    "anthropic": Client("anthropic_messages"),
    "openai-agents": Client("openai_agents"),
    "langgraph": Client("langgraph_agent"),
    "smolagents": Client("smolagents_agent", "final_answer", linear=()),
    "camel-ai": Client("camel_agent", linear=("whole_1",)),
    "verifiers": Client("verifiers_agent", streams=(False,), venv="verifiers"),
    "mini-swe-agent": Client("mini_swe_agent", "bash", (False,), 1),
    "claude-code": Client("claude_code", "claude", (True,)),
    "codex": Client("codex", "codex", (True,)),
}
IN_PART = ("openai chat", "openai responses")
"""Clients whose package the tests of make test need, too."""


def calls(tools: str, rng: random.Random, is_last: bool) -> list[tuple[str, dict[str, Any]]]:
    """Return calls of the tools that a client offers; the last answer of some is a call, too."""
    echo = f"echo {rng.randrange(10**6)}"
    if tools == "bash":
        return [
            ("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT" if is_last else echo})
        ]
    if is_last:
        return [("final_answer", {"answer": words(rng, 5)})] if tools == "final_answer" else []
    if tools == "claude":
        return [("Bash", {"command": echo, "description": "Prints a number"})]
    if tools == "codex":
        return [("exec_command", {"cmd": echo})]
    add = ("add", {"a": rng.randrange(100), "b": rng.randrange(100)})
    weather = ("weather", {"city": f"Zürich {words(rng, 2)}"})
    return rng.sample([add, weather], rng.randrange(1, 3))


def plan(client: Client, family: str, length: int, replies: list[Any] | None = None) -> Plan:
    """Return what the model says to a client; `replies` gets each reply."""

    def reply(request: LLMRequest, prompt: str, rng: random.Random) -> Reply:
        index = int(request.request_id.rpartition("/")[2])
        made = calls(client.tools, rng, index % client.turns == client.turns - 1)
        made = made[:1] if family in ONE_CALL else made
        said = "" if made and family == "llama3_1" else words(rng, rng.randrange(1, 2 * length))
        thought = words(rng, rng.randrange(1, length))
        if replies is not None:
            replies.append([said, thought, made])
        return Reply(said, thought, made)

    return reply


@pytest.fixture(scope="module")
def results() -> Iterator[dict[str, Any]]:
    """Collect the figures of all tests; write out/agents.json."""
    found: dict[str, Any] = {"rows": [], "verdict": Verdict(), "linear": [], "cuts": {}}
    yield found
    verdict: Verdict = found["verdict"]
    linear = found["linear"]
    figures = {
        "tokens": verdict.tokens,
        "wrong_tokens": verdict.wrong,
        "rows_per_linear_session": sum(linear) / len(linear) if linear else None,
        "linear_sessions": len(linear),
        **({"cut": 0, "lost": 0, "doubled": 0} | found["cuts"]),
        "clients": found["rows"],
    }
    figures["lost"] += verdict.lost
    figures["doubled"] += verdict.doubled
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(figures, indent=1), encoding="utf-8")


async def run(
    module: str, jobs: list[dict[str, Any]], home: Path, *, at_once: int = 4, venv: str = ""
) -> list[dict[str, str]]:
    """Play all jobs in one process of the client; return their ends."""
    python = Path(os.environ.get("AGENTS_PYTHON", sys.executable))
    python = python.parents[1] / venv / "bin" / python.name
    environment = {
        "HOME": str(home),
        "PYTHONPATH": str(Path.cwd()),
        "PYTHONWARNINGS": "ignore",
        "OPENAI_API_KEY": "unused",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    names = ("CLAUDE_PROGRAM", "CODEX_PROGRAM")
    kept |= {name: os.environ[name] for name in names if name in os.environ}
    process = await asyncio.create_subprocess_exec(
        str(python),
        str(HERE / "run_client.py"),
        module,
        str(at_once),
        env=kept | environment,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        given = "".join(json.dumps(job) + "\n" for job in jobs)
        out, errors = await process.communicate(given.encode())
    finally:
        if process.returncode is None:
            process.kill()
    ends = [json.loads(line[4:]) for line in out.decode().splitlines() if line.startswith("END ")]
    assert len(ends) == len(jobs), errors.decode()[-3000:]
    return ends


def job(
    session: Any, folder: Path, *, stream: bool, questions: int, url: str = ""
) -> dict[str, Any]:
    """Return the job of a session."""
    endpoint = session.endpoint
    folder.mkdir(parents=True)
    base = url or endpoint.anthropic_base_url
    return {
        "base_url": f"{base}/v1",
        "anthropic_base_url": base,
        "api_key": endpoint.api_key,
        "model": endpoint.model,
        "is_stream": stream,
        "questions": QUESTIONS[:questions],
        "folder": str(folder),
    }


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.part if name in IN_PART else ()) for name in CLIENTS],
)
async def test_client_has_exact_tokens_in_each_family(
    name: str, tmp_path: Path, results: dict[str, Any]
) -> None:
    client = CLIENTS[name]
    jobs: list[dict[str, Any]] = []
    opened: list[tuple[GatewaySessions, Any, bool, int]] = []
    async with AsyncExitStack() as stack:
        for family in FAMILIES:
            sessions = GatewaySessions(family, plan(client, family, LENGTH), seed=len(jobs))
            await stack.enter_async_context(sessions)
            for stream in client.streams:
                for questions in range(1, client.questions + 1):
                    session = sessions.open()
                    folder = tmp_path / f"{len(jobs)}"
                    jobs.append(job(session, folder, stream=stream, questions=questions))
                    opened.append((sessions, session, stream, questions))
        ends = await run(client.module, jobs, tmp_path, venv=client.venv)
        failed = [end["error"] for end in ends if "error" in end]
        assert not failed, failed[0]
        total = Verdict()
        for family in FAMILIES:
            row: dict[str, Any] = {"client": name, "family": family}
            own = [each for each in opened if each[0].family == family]
            for sessions, session, stream, questions in own:
                rows = await sessions.close(session)
                kind = f"{'streamed' if stream else 'whole'}_{questions}"
                row[f"rows_{kind}"] = rows
                row["malformed"] = row.get("malformed", 0) + session.stats["malformed_calls"]
                for key, value in session.stats.items():
                    if key.startswith("branches_"):
                        row[key] = row.get(key, 0) + value
                if kind in client.linear and (questions == 1 or family not in REWRITES):
                    results["linear"].append(rows)
            verdict = own[0][0].verdict()
            total.add(verdict)
            row |= {"tokens": verdict.tokens, "wrong": verdict.wrong}
            row |= {"lost": verdict.lost, "doubled": verdict.doubled}
            results["rows"].append(row)
            results["verdict"].add(verdict)
    assert (total.wrong, total.lost, total.doubled) == (0, 0, 0), total.details
    assert total.tokens == total.trained > 0


async def test_cut_connections_lose_and_double_no_turn(
    tmp_path: Path, results: dict[str, Any]
) -> None:
    turns, at_once = 5, 8
    model = plan(Client("retrying", turns=turns), "qwen3", 20)
    totals = dict.fromkeys(("cut", "lost", "doubled", "sessions"), 0)
    while totals["cut"] < CUTS:
        async with GatewaySessions("qwen3", model, seed=totals["cut"]) as sessions:
            host, port = sessions.gateway.url.removeprefix("http://").split(":")
            async with cutting((host, int(port)), seed=totals["cut"], share=0.85) as proxy:
                url = f"http://{host}:{proxy.port}"
                opened = [sessions.open() for _ in range(40)]
                jobs = [
                    job(
                        session,
                        tmp_path / f"{totals['sessions'] + number}",
                        stream=number % 2 > 0,
                        questions=1,
                        url=url,
                    )
                    for number, session in enumerate(opened)
                ]
                ends = await run("retrying", jobs, tmp_path, at_once=at_once)
            failed = [end["error"] for end in ends if "error" in end]
            assert not failed, failed[0]
            rows = [await sessions.close(session) for session in opened]
            verdict = sessions.verdict()
            again = len(sessions.client.log) - turns * len(opened)
        totals["cut"] += proxy.cut
        totals["lost"] += verdict.lost
        totals["doubled"] += verdict.doubled + again
        totals["sessions"] += len(opened)
        results["cuts"] = totals
        assert rows == [1] * len(opened)
        assert (verdict.wrong, verdict.lost, verdict.doubled, again) == (0, 0, 0, 0)


@pytest.mark.skipif(not os.environ.get("AGENTS_RECORD"), reason="set AGENTS_RECORD=1 to record")
@pytest.mark.parametrize("name", [*CLIENTS])
async def test_client_is_recorded(name: str, tmp_path: Path) -> None:
    client, family = CLIENTS[name], "qwen3"
    for stream in client.streams:
        replies: list[Any] = []
        async with GatewaySessions(family, plan(client, family, 5, replies), seed=1) as sessions:
            session = sessions.open()
            async with recording(session.endpoint.anthropic_base_url) as recorder:
                made = job(
                    session,
                    tmp_path / f"{stream}",
                    stream=stream,
                    questions=client.questions,
                    url=recorder.url,
                )
                (end,) = await run(client.module, [made], tmp_path, venv=client.venv)
                assert "error" not in end, end["error"]
            rows = await sessions.close(session)
        write(recorder, client, stream, rows=rows, family=family, replies=replies)


def write(recorder: Recorder, client: Client, stream: bool, **about: Any) -> None:
    """Write a corpus; its replies follow the requests that generate."""
    replies = about.pop("replies")
    made = [each for each in recorder.requests if not each["path"].endswith("count_tokens")]
    recorder.requests = made
    name = f"{client.module}{'_streamed' * stream}"
    CORPORA.mkdir(exist_ok=True)
    recorder.write(CORPORA / f"{name}.jsonl", {"client": client.module} | about, replies)


def test_programs_are_installed() -> None:
    for variable, program in (("CLAUDE_PROGRAM", "claude"), ("CODEX_PROGRAM", "codex")):
        assert shutil.which(os.environ.get(variable, program)), f"{program}: run make test-agents"
