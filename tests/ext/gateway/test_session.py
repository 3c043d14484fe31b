"""Sessions of foreign agents: repeated, undelivered and failed requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from arealite.base.errors import ContextOverflow, GenerationRefused, ServerUnavailable
from arealite.ext.gateway import gateway as gateway_module
from arealite.ext.gateway.apis import APIS
from arealite.ext.gateway.session import GatewaySession
from tests.fakes.gateway import CHAT, Served, chat, serving
from tests.waiting import eventually
from tools.lessons import calculator


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving() as made:
        yield made


def turns(session: GatewaySession) -> int:
    return sum(len(agent.record.turns) for agent in session.agents.values())


async def cut(served: Served, session: GatewaySession, body: Any) -> None:
    """Send a request, and disconnect after its generation began."""
    served.client.gate.clear()
    count = len(served.client.requests)
    sending = asyncio.ensure_future(served.send(session.endpoint.api_key, body))
    await served.client.received(count + 1)
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    await eventually(lambda: session.in_flight == 0)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("headers", [{}, {"x_stainless_retry_count": "1"}])
async def test_retry_after_a_cut_connection_gets_the_same_answer_and_one_turn(
    served: Served, is_stream: bool, headers: dict[str, str]
) -> None:
    session, body = served.open(), chat(stream=is_stream)
    await cut(served, session, body)
    served.client.gate.set()
    status, answer = await served.send(session.endpoint.api_key, body, **headers)
    assert (status, b"1" in answer) == (200, True)
    again = await served.send(session.endpoint.api_key, body, x_stainless_retry_count="2")
    assert again == (200, answer)
    await session.close()
    assert (turns(session), len(served.client.requests)) == (1, 1)
    assert session.stats["undelivered_turns"] == 0


async def test_equal_concurrent_requests_share_an_answer_and_a_later_one_is_a_new_sample(
    served: Served,
) -> None:
    session = served.open()
    served.client.gate.clear()
    asked = [asyncio.ensure_future(served.ask(session)) for _ in range(5)]
    await eventually(lambda: session.stats["repeated_requests"] == 4)
    served.client.gate.set()
    assert await asyncio.gather(*asked) == ["answer 1"] * 5
    assert await served.ask(session) == "answer 2"
    assert (turns(session), session.stats["requests"]) == (2, 2)


async def test_idempotency_key_repeats_the_answer_to_the_same_body(served: Served) -> None:
    session = served.open()
    key = session.endpoint.api_key
    first = await served.send(key, chat("a"), Idempotency_Key="1")
    assert await served.send(key, chat("a"), Idempotency_Key="1") == first
    assert await served.send(key, chat("a"), Idempotency_Key="2") != first
    assert await served.send(key, chat("b"), Idempotency_Key="1") != first
    assert turns(session) == 3


async def test_turn_that_no_client_received_is_not_in_the_record(served: Served) -> None:
    session = served.open()
    assert await served.ask(session, "a") == "answer 1"
    kept = session.agents["agent"].record.turns[:]
    await cut(served, session, chat("b", stream=True))
    served.client.gate.set()
    await eventually(lambda: turns(session) == 2)
    await session.close()
    assert session.agents["agent"].record.turns == kept
    assert (session.stats["undelivered_turns"], session.answer) == (1, "answer 1")


async def test_turn_that_the_client_continues_was_received(served: Served) -> None:
    session = served.open()
    await cut(served, session, chat("a"))
    served.client.gate.set()
    await eventually(lambda: turns(session) == 1)
    agent = session.agents["agent"]
    first = agent.record.turns[0]
    await agent.generate([*first.input_ids, *first.response.output_ids, 5])
    await session.close()
    assert (turns(session), session.stats["undelivered_turns"]) == (2, 0)


async def test_answer_names_the_model_that_the_client_asked_for(served: Served) -> None:
    session = served.open()
    for name, own in (("claude-x", "claude-x"), ("", session.endpoint.model)):
        status, body = await served.send(session.endpoint.api_key, chat("a", model=name))
        assert (status, json.loads(body)["model"]) == (200, own)


async def test_n_answers_share_a_prompt(served: Served) -> None:
    session = served.open()
    status, body = await served.send(session.endpoint.api_key, chat(n=3))
    texts = {choice["message"]["content"] for choice in json.loads(body)["choices"]}
    assert (status, texts) == (200, {"answer 1", "answer 2", "answer 3"})
    assert turns(session) == 3
    assert len({tuple(request.input_ids) for request in served.client.requests}) == 1


async def test_answer_is_shortened_to_the_room_that_the_context_leaves(served: Served) -> None:
    session, context, script = served.open(), 150, served.client.script

    def limited(request: Any) -> Any:
        room = context - len(request.input_ids)
        is_long = request.sampling.max_new_tokens > room
        return ContextOverflow("too long", room) if is_long else script(request)

    served.client.script = limited
    assert await served.ask(session, "a" * 80, max_tokens=1000) == "answer 2"
    assert served.client.requests[-1].sampling.max_new_tokens < 64
    status, body = await served.send(session.endpoint.api_key, chat("b" * 200))
    assert (status, json.loads(body)["error"]["code"]) == (400, "context_length_exceeded")
    assert len(served.client.requests) == 2, "the second prompt needs no server to be refused"
    assert session.error is None


async def test_first_prompt_beyond_the_context_is_refused_with_both_lengths(served: Served) -> None:
    session = served.open()
    served.client.script = lambda request: ContextOverflow("g0/0", 20 - len(request.input_ids))
    status, body = await served.send(session.endpoint.api_key, chat("b" * 200))
    error, (request,) = json.loads(body)["error"], served.client.requests
    assert (status, error["code"]) == (400, "context_length_exceeded")
    length = f"the prompt has {len(request.input_ids)} tokens, and the model's context 20:"
    assert length in error["message"] and "Shorten the history" in error["message"]


async def test_tools_that_the_chat_template_ignores_are_refused(served: Served) -> None:
    session, tool = served.open(), {"type": "function", "function": {"name": "add"}}
    status, body = await served.send(session.endpoint.api_key, chat(tools=[tool]))
    assert (status, "the model's chat template ignores them" in body.decode()) == (400, True)


async def test_tools_of_a_template_with_calls_alone_are_accepted(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that learned the calls without the schemas, as in the calculator lesson."""
    session, tool = served.open(), {"type": "function", "function": {"name": "add"}}
    tokenizer = session.agents["agent"].tokenizer
    monkeypatch.setattr(tokenizer, "chat_template", calculator.TEMPLATE)
    status, _ = await served.send(session.endpoint.api_key, chat(tools=[tool]))
    assert status == 200


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "fails"),
    [
        (ContextOverflow("too long", 5), 400, False),
        (GenerationRefused("no"), 400, False),
        (ServerUnavailable("none"), 503, True),
        (ValueError("a bug"), 500, True),
    ],
)
async def test_failed_generation_has_a_status_and_only_faults_of_the_run_fail_the_episode(
    served: Served, error: Exception, status: int, fails: bool, is_stream: bool
) -> None:
    session, script = served.open(), served.client.script
    served.client.script = lambda _: error
    found, body = await served.send(session.endpoint.api_key, chat(stream=is_stream))
    assert found == status
    assert "a bug" not in json.loads(body)["error"]["message"]
    assert session.error is (error if fails else None)
    assert session.ended.is_set() == fails
    served.client.script = script
    again = await served.send(session.endpoint.api_key, chat(stream=is_stream))
    assert again[0] == 200, "a failed request can be repeated"


async def test_stream_that_fails_after_its_first_event_ends_with_an_error(served: Served) -> None:
    session = served.open()

    def fail(request: Any) -> Exception:
        request.on_tokens([20, 21])
        return ServerUnavailable("none")

    served.client.script = fail
    status, body = await served.send(session.endpoint.api_key, chat(stream=True))
    last = [line for line in body.split(b"\n") if line.startswith(b"data: ")][-1]
    assert (status, "error" in json.loads(last[6:])) == (200, True)
    assert isinstance(session.error, ServerUnavailable)


async def test_sampling_is_that_of_the_run_unless_requests_may_choose(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with serving() as served:
        session = served.open(stop=["x"])
        for _ in range(2):
            await served.ask(session, temperature=0.2, max_tokens=5, stop=["y"])
        sent = served.client.requests[-1].sampling
        assert (sent.temperature, sent.max_new_tokens, sent.stop) == (1.0, 5, ["x", "y"])
        assert session.stats["sampling_ignored"] == 2
        assert capsys.readouterr().out.count("are ignored") == 1
    async with serving(sampling="request") as served:
        session = served.open()
        await served.ask(session, temperature=0.2)
        assert served.client.requests[-1].sampling.temperature == 0.2
        status, _ = await served.send(session.endpoint.api_key, chat(temperature=0))
        assert status == 400
        status, refusal = await served.send(session.endpoint.api_key, chat(top_p=0.9))
        assert status == 400 and "larger trainer.ppo.collector.sampling.top_log" in str(refusal)
        recorded = served.open(top_logprobs=5)
        await served.ask(recorded, top_p=0.9)
        assert served.client.requests[-1].sampling.top_p == 0.9


async def test_close_cancels_generations_and_answers_with_410(served: Served) -> None:
    session, other = served.open(), served.open()
    served.client.gate.clear()
    key = session.endpoint.api_key
    asked = [asyncio.ensure_future(served.send(key, chat(stream=s))) for s in (False, True)]
    await served.client.received(2)
    await session.close()
    assert [status for status, _ in await asyncio.gather(*asked)] == [410, 410]
    assert len(served.client.cancelled) == 2
    assert (await served.send(key, chat()))[0] == 410
    served.client.gate.set()
    assert await served.ask(other) == "answer 3"


async def test_stream_gets_keep_alives_while_it_has_no_events(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_module, "KEEP_ALIVE_S", 0.01)
    session = served.open()
    served.client.gate.clear()
    headers = {"x-api-key": session.endpoint.api_key}
    async with served.http.post(CHAT, json=chat(stream=True), headers=headers) as answer:
        assert await answer.content.readline() == b": keep-alive\n"
        served.client.gate.set()
        assert b"data: " in await answer.read()


async def test_client_that_does_not_read_is_disconnected_and_its_turn_is_dropped(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gateway_module, "WRITE_S", 0.0)
    session, other = served.open(), served.open()
    host, port = served.gateway.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port), limit=2)
    body = json.dumps(chat()).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n"
    head += f"x-api-key: {session.endpoint.api_key}\r\n\r\n"
    with monkeypatch.context() as patch:  # more than the buffers of two sockets
        patch.setattr(type(APIS[CHAT]), "encode", lambda *_: b"a" * 2**24)
        writer.write(head.encode() + body)
        await eventually(lambda: session.stats["requests"] and not session.in_flight)
    assert await served.ask(other) == "answer 2"
    await session.close()
    assert (turns(session), session.stats["undelivered_turns"]) == (0, 1)
    assert not caplog.records, "no error of aiohttp"
    writer.transport.abort()
