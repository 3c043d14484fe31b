"""Answers in the forms of the APIs: streams equal whole bodies, and come back as history."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from arealite.api.llm import LLMResponse
from arealite.ext.gateway.apis import APIS, Api
from arealite.ext.gateway.apis.past_messages import messages as messages_of
from arealite.ext.gateway.request_data import ApiError, ChatRequest, Delta, ParsedAnswer, ParsedCall
from tests.ext.gateway.answers import random_answer, random_deltas, stream

SCHEMA = {"type": "object", "properties": {"n": {}}}
MESSAGES = [{"role": "user", "content": "hi"}]
CHAT, RESPONSES, ANTHROPIC = "/v1/chat/completions", "/v1/responses", "/v1/messages"
COMPLETIONS = "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {
        "messages": MESSAGES,
        "n": 3,
        "logprobs": True,
        "stream_options": {"include_usage": True},
        "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
    },
    COMPLETIONS: {"prompt": "hi", "n": 3, "logprobs": 1, "stream_options": {"include_usage": True}},
    RESPONSES: {
        "input": "hi",
        # A client may send JSON with line breaks; the response has the tools as they were sent.
        "tools": [
            {"type": "function", "name": "f", "parameters": SCHEMA},
            {"type": "namespace", "name": "ns", "tools": [{"type": "function", "name": "g"}]},
        ],
    },
    ANTHROPIC: {
        "messages": MESSAGES,
        "max_tokens": 9,
        "stop_sequences": ["STOP"],
        "tools": [{"name": "f", "input_schema": SCHEMA}],
    },
}


def request(path: str, **fields: Any) -> tuple[Api, ChatRequest]:
    api = APIS[path]
    return api, api.decode(json.dumps({**BODIES[path], **fields}, indent=1).encode())


def parse(chunks: list[bytes]) -> list[dict[str, Any]]:
    """Return the data of events, read as a client does that splits lines at every line break."""
    events: list[dict[str, Any]] = []
    for chunk in chunks:
        assert chunk.endswith(b"\n\n")
        *names, data = chunk.decode().removesuffix("\n").splitlines(keepends=True)
        assert data.startswith("data: ")
        if data == "data: [DONE]\n":
            continue
        events.append(json.loads(data.removeprefix("data: ")))
        assert names == ([f"event: {events[-1]['type']}\n"] if "type" in events[-1] else [])
    return events


def events_of(path: str, made: ChatRequest, deltas: list[Delta], id: str) -> list[dict[str, Any]]:
    async def read() -> list[bytes]:
        events = APIS[path].events(made, stream(deltas), "policy", id=id)
        return [event async for event in events]

    return parse(asyncio.run(read()))


def fold_choices(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Build the body of (chat) completions from its events."""
    choices: dict[int, Any] = defaultdict(lambda: {"message": {"refusal": None}})
    for event in events:
        for choice in event.pop("choices"):
            whole = choices[choice["index"]]
            assert whole.get("finish_reason") is None, "an event after the end"
            for name, value in choice.pop("delta", {}).items():
                if name == "tool_calls":
                    calls = whole["message"].setdefault(name, [])
                    assert value[0].pop("index") == len(calls)
                    calls += value
                else:
                    whole["message"][name] = whole["message"].get(name, "") + value
            whole |= {**choice, "text": whole.get("text", "") + choice.get("text", "")}
    whole = [choices[index] for index in sorted(choices)]
    for choice in whole:
        if "content" in (message := choice["message"]):
            message["content"] = message["content"] or (None if "tool_calls" in message else "")
    return {**events[-1], "choices": whole}


def fold_blocks(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Build the message of Anthropic's API from its events."""
    assert [events[0]["type"], events[-1]["type"]] == ["message_start", "message_stop"]
    message = events[0]["message"]
    content = message["content"]
    for event in events[1:-1]:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(content)
                content.append(event["content_block"])
            case "content_block_delta":
                kind = event["delta"].pop("type")
                [[name, text]] = event["delta"].items()
                assert kind == {"partial_json": "input_json"}.get(name, name) + "_delta"
                content[-1][name] = content[-1].get(name, "") + text
            case "content_block_stop":
                assert event["index"] == len(content) - 1
            case "message_delta":
                message |= event["delta"] | {"usage": event["usage"]}
    for block in content:
        if "partial_json" in block:
            block["input"] = json.loads(block.pop("partial_json"))
    return message


def fold_items(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Build the response from the events of its items; its own event must be equal."""
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    output: list[dict[str, Any]] = []
    for event in events[2:-1]:
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert event["output_index"] == len(output)
                output.append(event["item"])
            case "content_part.added":
                output[-1]["content"].append(event["part"])
            case "output_text.delta" | "reasoning_text.delta":
                output[-1]["content"][-1]["text"] += event["delta"]
            case "function_call_arguments.delta":
                output[-1]["arguments"] += event["delta"]
            case "output_item.done":
                output[-1]["status"] = "completed"
                assert output[-1] == event["item"]
    response = events[-1]["response"]
    assert events[-1]["type"] == f"response.{response['status']}"
    assert response["output"] == output
    return response


def merged(parts: list[dict[str, Any]], field: str) -> str:
    return "".join(part.get(field, "") for part in parts)


def facts(path: str, body: dict[str, Any]) -> object:
    """Return what a body says, without the borders between its blocks and without ids of items."""
    body.pop("created", 0), body.pop("created_at", 0), body.pop("object", 0)
    if path == ANTHROPIC:
        blocks = body.pop("content")
        calls = [block for block in blocks if block["type"] == "tool_use"]
        return body, merged(blocks, "text"), merged(blocks, "thinking"), calls
    if path == RESPONSES:
        items = body.pop("output")
        parts = [part for item in items for part in item.get("content", [])]
        texts = {
            kind: merged([part for part in parts if part["type"] == kind], "text")
            for kind in ("output_text", "reasoning_text")
        }
        calls = [item for item in items if item["type"] == "function_call"]
        return body, texts, calls
    for choice in body["choices"]:
        if path == CHAT:
            choice.pop("text", 0)
        else:
            choice.pop("message", 0)
    return body


FOLDS = {CHAT: fold_choices, COMPLETIONS: fold_choices, RESPONSES: fold_items}
FOLDS |= {ANTHROPIC: fold_blocks}


@pytest.mark.parametrize("path", BODIES)
def test_stream_adds_up_to_whole_body(path: str) -> None:
    rng = Random(path)
    for _ in range(150):
        api, made = request(path)
        names = [tool["function"]["name"] for tool in made.tools]
        answers = [random_answer(rng, names=names) for _ in range(made.n)]
        if path == COMPLETIONS:  # a raw text has no thoughts
            answers = [replace(answer, thought="") for answer in answers]
        deltas = [*random_deltas(rng, answers)]
        whole = json.loads(api.encode(made, answers, "policy"))
        folded = FOLDS[path](events_of(path, made, deltas, answers[0].id))
        assert facts(path, folded) == facts(path, whole)


@pytest.mark.parametrize("path", [CHAT, RESPONSES, ANTHROPIC])
def test_answer_sent_back_is_the_same_message(path: str) -> None:
    rng = Random(path)
    for _ in range(150):
        _, made = request(path, **({"n": 1} if path == CHAT else {}))
        names = [tool["function"]["name"] for tool in made.tools]
        answer = random_answer(rng, names=names)
        deltas = [*random_deltas(rng, [answer])]
        whole = FOLDS[path](events_of(path, made, deltas, answer.id))
        match path:
            case "/v1/chat/completions":
                items = [whole["choices"][0]["message"]]
            case "/v1/responses":
                items = whole["output"]
            case _:
                items = [{"role": "assistant", "content": whole["content"]}]
        messages = [each for item in items for each in messages_of(json.dumps(item).encode())]
        expected = answer.message()
        assert {message["role"] for message in messages} <= {"assistant"}
        for field in ("content", "reasoning_content"):
            sent = "".join(str(message.get(field, "")) for message in messages)
            assert sent == expected.get(field, "")
        calls = [call for each in messages for call in each.get("tool_calls", ())]  # type: ignore
        assert calls == expected.get("tool_calls", [])


ANSWER = ParsedAnswer(
    id="a1",
    thought="T",
    text="X",
    calls=(ParsedCall(id="c1", name="ns__g", arguments='{"n": 1}'),),
    stop_reason="calls",
    response=LLMResponse(
        output_ids=[1, 2], logprobs=[-1.0, -2.0], versions=[0, 0], stop_reason="stop"
    ),
    tokens=("X", "!"),
)
DELTAS = [
    Delta(kind="thought", text="T"),
    Delta(kind="text", text="X"),
    Delta(kind="call", call=ANSWER.calls[0]),
]
DELTAS += [Delta(kind="end", answer=ANSWER)]


def test_responses_events_have_the_order_of_openai() -> None:
    _, made = request(RESPONSES)
    events = events_of(RESPONSES, made, DELTAS, "a1")
    text = ["content_part.added", "{}.delta", "{}.done", "content_part.done", "output_item.done"]
    assert [event["type"].removeprefix("response.") for event in events] == [
        *("created", "in_progress"),
        *("output_item.added", *[name.format("reasoning_text") for name in text]),
        *("output_item.added", *[name.format("output_text") for name in text]),
        *("output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done", "completed"),
    ]
    call = events[-1]["response"]["output"][-1]
    assert (call["namespace"], call["name"], call["call_id"]) == ("ns", "g", "c1")
    assert events[0]["response"]["id"] == events[-1]["response"]["id"] == "resp_a1"
    assert made.tools[1]["function"]["name"] == "ns__g"
    following = APIS[RESPONSES].decode(b'{"input": "x", "previous_response_id": "resp_a1"}')
    assert following.previous == ANSWER.id


def test_anthropic_events_have_the_order_of_anthropic() -> None:
    _, made = request(ANTHROPIC)
    events = events_of(ANTHROPIC, made, DELTAS, "a1")
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    thought = [*block[:2], "content_block_delta", block[2]]
    types = [event["type"] for event in events]
    assert types == ["message_start", *thought, *block, *block, "message_delta", "message_stop"]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


def value_at(body: Any, place: str) -> Any:
    """Return the value at a place like `choices.0.text`; `items.*.type` is a list of values."""
    first, _, rest = place.partition(".")
    if not first:
        return body
    if first == "*":
        return [value_at(item, rest) for item in body]
    return value_at(body[int(first) if first.isdigit() else first], rest)


CUT = ParsedAnswer(id="a1", thought="T", text="", calls=(), stop_reason="length")
COUNTED = replace(ANSWER, calls=(), stop_reason="stop", prompt_tokens=11, cached_tokens=4)
STOPPED_BY_CLIENT = replace(COUNTED, stop_reason="stop_string", stop_string="STOP")
STOPPED_BY_RUN = replace(STOPPED_BY_CLIENT, stop_string="of the run")
COMPLETIONS_USAGE = {
    "prompt_tokens": 11,
    "completion_tokens": 2,
    "total_tokens": 13,
    "prompt_tokens_details": {"cached_tokens": 4},
}
WORDS: dict[str, tuple[str, ParsedAnswer, dict[str, Any]]] = {
    "length in chat": (CHAT, CUT, {"choices.0.finish_reason": "length"}),
    "length in completions": (COMPLETIONS, CUT, {"choices.0.finish_reason": "length"}),
    "length in messages": (ANTHROPIC, CUT, {"stop_reason": "max_tokens"}),
    "length in responses": (
        RESPONSES,
        CUT,
        {
            "incomplete_details": {"reason": "max_output_tokens"},
            # Clients of this API take a response without a message for an unfinished one.
            "output.*.type": ["reasoning", "message"],
        },
    ),
    "usage in chat": (CHAT, COUNTED, {"usage": COMPLETIONS_USAGE}),
    "usage in completions": (COMPLETIONS, COUNTED, {"usage": COMPLETIONS_USAGE}),
    "usage in messages": (
        ANTHROPIC,
        COUNTED,
        {
            # Anthropic's input_tokens are those that were not cached.
            "usage.input_tokens": 7,
            "usage.cache_read_input_tokens": 4,
            "usage.output_tokens": 2,
        },
    ),
    "usage in responses": (
        RESPONSES,
        COUNTED,
        {
            "usage.input_tokens": 11,
            "usage.input_tokens_details.cached_tokens": 4,
            "usage.output_tokens_details": {"reasoning_tokens": 1},
            "usage.total_tokens": 13,
        },
    ),
    "stop string of the client": (ANTHROPIC, STOPPED_BY_CLIENT, {"stop_reason": "stop_sequence"}),
    "stop string of the run": (ANTHROPIC, STOPPED_BY_RUN, {"stop_reason": "end_turn"}),
    "log-probabilities": (
        CHAT,
        ANSWER,
        {
            "choices.0.logprobs.content.*.token": ["X", "!"],
            "choices.0.logprobs.content.*.logprob": [-1.0, -2.0],
        },
    ),
}
"""The API, an answer, and values of the body in which this API sends the answer."""


@pytest.mark.parametrize(("path", "answer", "expected"), WORDS.values(), ids=WORDS)
def test_body_has_the_words_of_its_api(
    path: str, answer: ParsedAnswer, expected: dict[str, Any]
) -> None:
    api, chat_request = request(path)
    body = json.loads(api.encode(chat_request, [answer], "policy"))
    assert {place: value_at(body, place) for place in expected} == expected


@pytest.mark.parametrize("path", BODIES)
def test_answer_names_the_model(path: str) -> None:
    api, made = request(path, **({} if path == RESPONSES else {"n": 1}))
    assert json.loads(api.encode(made, [ANSWER], "policy"))["model"] == "policy"
    first = events_of(path, made, DELTAS, "a1")[0]
    assert first.get("message", first.get("response", first))["model"] == "policy"


def test_errors_have_the_form_of_their_api() -> None:
    error = ApiError(429, "wait", "slow")
    openai = {"type": "rate_limit_error", "message": "wait", "param": None, "code": "slow"}
    for path in (CHAT, COMPLETIONS, RESPONSES):
        assert APIS[path].error(error) == {"error": openai}
    assert parse([APIS[CHAT].failed(error)]) == [{"error": openai}]
    [failed] = parse([APIS[RESPONSES].failed(error)])
    assert failed["response"]["error"] == {"code": "slow", "message": "wait"}
    [failed] = parse([APIS[ANTHROPIC].failed(ApiError(500, "broken"))])
    assert (failed["type"], failed["error"]["type"]) == ("error", "api_error")
