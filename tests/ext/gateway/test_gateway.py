"""The gateway's HTTP server: keys, limits, errors, and agents that take tasks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from arealite.base.errors import EpisodeError
from arealite.ext.gateway import gateway as gateway_module
from tests.fakes.gateway import CHAT, MESSAGES, Served, chat, serving
from tests.waiting import eventually

RESPONSES, COMPLETIONS = "/v1/responses", "/v1/completions"
COUNT_TOKENS = f"{MESSAGES}/count_tokens"
SESSIONS = "/v1/rl/sessions"
TOKEN = "token of agents that take tasks"


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving(TOKEN, token_env="TASKS", max_body_mb=1, max_in_flight=2) as made:
        yield made


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES, COUNT_TOKENS])
async def test_refusals_have_the_form_of_their_api(served: Served, path: str) -> None:
    session, ended = served.open(), served.open()
    key = session.endpoint.api_key
    await ended.close()
    refusals: list[tuple[int, str, Any, dict[str, str]]] = [
        (401, "", chat(), {}),
        (401, "sk-wrong", chat(), {}),
        (401, TOKEN, chat(), {}),
        (403, key, chat(), {"Origin": "http://evil.example"}),
        (403, key, chat(), {"Host": "evil.example"}),
        (403, key, chat(), {"Host": ""}),
        (410, ended.endpoint.api_key, chat(), {}),
        (413, key, b" " * (2**20 + 1), {}),
        (415, key, chat(), {"Content_Encoding": "gzip"}),
        (400, key, b"{", {}),
        (400, key, b"[" * 100_000, {}),
        (400, key, b'{"messages": ' + b"[" * 100_000, {}),
        (413, key, b"[" * 500_000, {}),
        (400, key, b"\xff\xfe", {}),
    ]
    for status, sent, body, headers in refusals:
        found, answer = await served.send(sent, body, path, **headers)
        error = json.loads(answer)["error"]
        assert (found, bool(error["message"])) == (status, True), (body[:20], answer)
        assert json.loads(answer).get("type", "") == ("error" if "messages" in path else "")
    assert not served.client.requests


async def test_unknown_route_and_unknown_model_are_404(served: Served) -> None:
    key = served.open().endpoint.api_key
    for path in ("/v1/embeddings", "/v1/messages/batches", "/chat/completions", "/v1/models/gpt"):
        status, body = await served.send(key, b"", path, "GET")
        assert (status, "message" in json.loads(body)["error"]) == (404, True)
    status, body = await served.send(key, b"", "/v1/models", "GET")
    (model,) = json.loads(body)["data"]
    status, body = await served.send(key, b"", f"/v1/models/{model['id']}", "GET")
    assert (status, json.loads(body)) == (200, model)


async def test_request_beyond_the_limit_of_a_session_is_429(served: Served) -> None:
    session, other = served.open(), served.open()
    served.client.gate.clear()
    key = session.endpoint.api_key
    asked = [asyncio.ensure_future(served.send(key, chat(text))) for text in "ab"]
    await served.client.received(2)
    headers = {"Authorization": f"Bearer {key}"}
    async with served.http.post(CHAT, json=chat("c"), headers=headers) as answer:
        assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
    third = asyncio.ensure_future(served.ask(other))
    await served.client.received(3)
    served.client.gate.set()
    assert [status for status, _ in await asyncio.gather(*asked)] == [200, 200]
    assert await third


async def test_seats_of_a_session_have_keys_of_their_own(served: Served) -> None:
    session = served.open("main", "helper")
    helper = session.endpoint.seats["helper"]
    assert helper.api_key != session.endpoint.api_key == session.endpoint.seats["main"].api_key
    assert (await served.send(helper.api_key, chat()))[0] == 200
    record = {name: len(agent.record.turns) for name, agent in session.agents.items()}
    assert record == {"main": 0, "helper": 1}
    assert helper.api_key not in repr(session.endpoint) + repr(helper)


async def test_tokens_of_a_request_are_counted_without_a_generation(served: Served) -> None:
    session = served.open()
    key, body = session.endpoint.api_key, chat()
    _, counted = await served.send(key, body, COUNT_TOKENS)
    assert not served.client.requests
    await served.send(key, body, MESSAGES)
    (request,) = served.client.requests
    assert json.loads(counted) == {"input_tokens": len(request.input_ids)}


async def test_hostile_clients_hold_up_no_other_client(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    session, victim = served.open(), served.open()
    key = session.endpoint.api_key
    host, port = served.gateway.url.removeprefix("http://").split(":")
    slow: list[asyncio.StreamWriter] = []
    for number in range(8):  # half of them never end their headers, half of them their body
        _, writer = await asyncio.open_connection(host, int(port))
        head = f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nx-api-key: {key}\r\nContent-Length: 9\r\n"
        writer.write(head.encode() + (b"\r\n{" if number % 4 == 1 else b"X-Slow: "))
        slow.append(writer)
    await eventually(lambda: session.in_flight == 2)
    assert (await served.send(key, b"[" * 2**20))[0] == 429
    wrong = [(await served.send(f"sk-{number}", chat("x" * 999)))[0] for number in range(1000)]
    assert wrong == [401] * 1000
    assert await served.ask(victim) == "answer 1"
    assert session.in_flight == 2, "the slow clients are still connected"
    for writer in slow:
        writer.transport.abort()
    said = capsys.readouterr().out
    assert key not in said and "sk-" not in said


# ------------------------------------------------------------ agents that take tasks


async def lease(served: Served, **body: Any) -> tuple[int, Any]:
    status, answer = await served.send(TOKEN, body, SESSIONS)
    return status, json.loads(answer)


async def test_agent_takes_a_task_reports_its_reward_and_ends(served: Served) -> None:
    ended, session = served.open(), served.open("agent", "helper")
    await ended.close()
    for each in (ended, session):
        served.gateway.offered.put_nowait(each)
    status, leased = await lease(served, wait_s=5)
    assert session.leased.is_set() and not ended.leased.is_set()
    key, at = leased["api_key"], f"{SESSIONS}/{leased['session_id']}"
    assert (status, leased["task"]["prompt"]) == (200, "1+1=")
    assert ([*leased["seats"]], leased["seats"]["agent"]) == (["agent", "helper"], key)
    assert leased["base_url"] == f"{served.gateway.url}/v1"
    assert (await served.send(key, chat()))[0] == 200
    trace = json.loads((await served.send(key, b"", f"{at}/trace", "GET"))[1])
    (turn,) = trace["turns"]
    assert (turn["seat"], turn["reason"]) == ("agent", "first")
    assert turn["reused"] + turn["new"] == len(served.client.requests[0].input_ids)
    huge = {"parts": {"a": 1e308, "b": 1e308}}
    wrong = ({"reward": "x"}, {"reward": 1, "parts": {"a": "b"}}, {"rewrad": 1.0}, {})
    for bad in (*wrong, b"{", huge):
        assert (await served.send(key, bad, f"{at}/reward"))[0] == 400
    reward = {"reward": 0.5, "parts": {"style": 0.1}}
    assert (await served.send(key, reward, f"{SESSIONS}/current/reward"))[0] == 200
    assert session.reported == (0.5, {"style": 0.1})
    assert (await served.send(TOKEN, b"", f"{at}/end"))[0] == 200
    assert session.ended.is_set()
    await session.close()
    assert (await served.send(key, reward, f"{at}/reward"))[0] == 410
    assert (await served.send(TOKEN, reward, f"{at}/reward"))[0] == 404


async def test_session_of_another_key_is_unknown(served: Served) -> None:
    session, other = served.open(), served.open()
    key = session.endpoint.api_key
    for method, end in (("GET", ""), ("GET", "/trace"), ("POST", "/reward"), ("POST", "/end")):
        at = f"{SESSIONS}/{other.id}{end}"
        assert (await served.send(key, {"reward": 1}, at, method))[0] == 404
    assert other.reported is None
    assert not other.ended.is_set()


async def test_lease_needs_the_token_and_a_waiting_task(served: Served) -> None:
    assert (await lease(served, wait_s=0))[0] == 429
    assert (await lease(served, wait_s="x"))[0] == 400
    key = served.open().endpoint.api_key
    assert (await served.send(key, {}, SESSIONS))[0] == 403
    status, body = await served.send("", {}, SESSIONS)
    assert (status, b"gateway.token_env=TASKS as the API key ($TASKS)" in body) == (401, True)


async def test_session_fails_if_its_agent_disconnects_before_it_gets_the_key(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def disconnected(*_: object) -> None:
        raise ConnectionResetError

    monkeypatch.setattr(gateway_module, "_write", disconnected)
    served.gateway.offered.put_nowait(session := served.open())
    await served.send(TOKEN, {}, SESSIONS)
    assert session.ended.is_set()
    assert isinstance(session.error, EpisodeError)


async def test_openapi_describes_every_route(served: Served) -> None:
    _, body = await served.send("", b"", "/openapi.json", "GET")
    paths = json.loads(body)["paths"]
    known = {CHAT, COMPLETIONS, RESPONSES, MESSAGES, COUNT_TOKENS, "/v1/models", "/health"}
    known |= {f"{SESSIONS}/{{id}}{end}" for end in ("", "/reward", "/end", "/trace")}
    assert known | {"/openapi.json", SESSIONS} <= {*paths}
    for path in (CHAT, MESSAGES):
        assert "$ref" in str(paths[path]["post"]["requestBody"])
