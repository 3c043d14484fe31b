"""Requests in the forms of the APIs: equal conversations are equal messages; others are refused."""

from __future__ import annotations

import json
from copy import deepcopy
from random import Random
from typing import Any

import pytest

from arealite.ext.gateway.apis import APIS
from arealite.ext.gateway.apis.past_messages import messages as messages_of
from arealite.ext.gateway.request_data import ApiError, ChatRequest

CHAT, RESPONSES, ANTHROPIC = "/v1/chat/completions", "/v1/responses", "/v1/messages"
COMPLETIONS = "/v1/completions"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "description": "Weather", "parameters": SCHEMA}
ARGUMENTS = '{"city": "Köln"}'
DEEP = b"[" * 50_000 + b"]" * 50_000
CACHED = {"cache_control": {"type": "ephemeral"}}

CHAT_BODY: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": ARGUMENTS},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "12 °C"}]},
        {"role": "user", "content": "and now?"},
    ],
    "tools": [{"type": "function", "function": {**FUNCTION, "strict": True}}],
}
RESPONSES_BODY: dict[str, Any] = {
    "model": "m",
    "instructions": "Be short.",
    "input": [
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
        },
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
            "encrypted_content": None,
        },
        {
            "type": "function_call",
            "id": "fc_1",
            "call_id": "c1",
            "name": "weather",
            "arguments": ARGUMENTS,
            "status": "completed",
        },
        {"type": "function_call_output", "call_id": "c1", "output": "12 °C"},
        {"role": "user", "content": "and now?"},
    ],
    "tools": [{"type": "function", **FUNCTION, "strict": True}],
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "client_metadata": {"session_id": "1"},
}
ANTHROPIC_BODY: dict[str, Any] = {
    "model": "m",
    "max_tokens": 64,
    "system": [{"type": "text", "text": "Be short.", **CACHED}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Köln"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c1",
                    "content": [{"type": "text", "text": "12 °C"}],
                    "is_error": False,
                    **CACHED,
                },
                {"type": "text", "text": "and now?", **CACHED},
            ],
        },
    ],
    "tools": [{"name": "weather", "description": "Weather", "input_schema": SCHEMA, **CACHED}],
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
}
BODIES = {CHAT: CHAT_BODY, RESPONSES: RESPONSES_BODY, ANTHROPIC: ANTHROPIC_BODY}
BODIES |= {COMPLETIONS: {"prompt": "x"}, "/v1/messages/count_tokens": ANTHROPIC_BODY}
CALL = {"id": "c1", "type": "function"}
CALL |= {"function": {"name": "weather", "arguments": {"city": "Köln"}}}
MESSAGES = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "a\nb"},
    {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL]},
    {"role": "tool", "content": "12 °C", "tool_call_id": "c1"},
    {"role": "user", "content": "and now?"},
]


def decode(path: str, **fields: Any) -> ChatRequest:
    body = {**BODIES[path], **fields}
    return APIS[path].decode(json.dumps(body).encode())


def refusal(path: str, **fields: Any) -> str:
    with pytest.raises(ApiError) as caught:
        request = decode(path, **fields)
        for item in request.items:
            list(messages_of(item))
    assert caught.value.status == 400
    return caught.value.message


@pytest.mark.parametrize("path", [CHAT, RESPONSES, ANTHROPIC])
def test_equal_conversations_are_equal_messages_in_all_apis(path: str) -> None:
    request = decode(path)
    messages: list[dict[str, Any]] = []
    for item in request.items:
        for message in messages_of(item):
            is_same = messages and messages[-1]["role"] == message["role"] == "assistant"
            messages[-1:] = [{**messages[-1], **message}] if is_same else [*messages[-1:], message]
    assert messages == MESSAGES
    assert request.tools == [{"type": "function", "function": FUNCTION}]


@pytest.mark.parametrize("path", [CHAT, RESPONSES, ANTHROPIC])
def test_items_keep_the_bytes_of_the_client(path: str) -> None:
    name = "input" if path == RESPONSES else "messages"
    items = [b'{ "role":"user",\n"content":"\\u00e9" , "new": [1e0] }'] * 2
    rest = {key: value for key, value in BODIES[path].items() if key != name}
    body = b'{"%b": [%b],' % (name.encode(), b" , ".join(items)) + json.dumps(rest).encode()[1:]
    assert APIS[path].decode(body).items[-2:] == items


OPTIONS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "the newer limit wins": (
        CHAT,
        {"max_tokens": 7, "max_completion_tokens": 5},
        {"max_tokens": 5},
    ),
    "limit of responses": (RESPONSES, {"max_output_tokens": 5}, {"max_tokens": 5}),
    "limit of messages": (ANTHROPIC, {}, {"max_tokens": 64}),
    "one stop": (CHAT, {"stop": "S"}, {"stop": ("S",)}),
    "several stops": (CHAT, {"stop": ["S", "T"]}, {"stop": ("S", "T")}),
    "stop of messages": (ANTHROPIC, {"stop_sequences": ["S"]}, {"stop": ("S",)}),
    "sampling": (
        ANTHROPIC,
        {"temperature": 0.5, "top_p": 0.9},
        {"temperature": 0.5, "top_p": 0.9},
    ),
    "several choices in a stream": (
        CHAT,
        {"n": 3, "stream": True},
        {"n": 3, "is_stream": True},
    ),
    "no parallel calls": (CHAT, {"parallel_tool_calls": False}, {"is_parallel": False}),
    "prompt of tokens": (COMPLETIONS, {"prompt": [[3, 4]]}, {"prompt": [3, 4]}),
    "prompt in a list": (COMPLETIONS, {"prompt": ["a"]}, {"prompt": "a"}),
    "log-probabilities": (COMPLETIONS, {"logprobs": 0}, {"logprobs": True}),
}
"""The API, fields of a body, and the attributes of the request that they become."""


@pytest.mark.parametrize(("path", "fields", "expected"), OPTIONS.values(), ids=OPTIONS)
def test_options_are_read_from_all_their_names(
    path: str, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    request = decode(path, **fields)
    assert {name: getattr(request, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("path", "choice", "expected"),
    [
        *((path, None, "auto") for path in (CHAT, RESPONSES, ANTHROPIC)),
        *((path, kind, kind) for path in (CHAT, RESPONSES) for kind in ("none", "required")),
        (CHAT, {"type": "function", "function": {"name": "weather"}}, "=weather"),
        (RESPONSES, {"type": "function", "name": "weather"}, "=weather"),
        (ANTHROPIC, {"type": "any", "disable_parallel_tool_use": True}, "required"),
        (ANTHROPIC, {"type": "tool", "name": "weather"}, "=weather"),
        (ANTHROPIC, {"type": "none"}, "none"),
    ],
)
def test_tool_choice_has_one_form(path: str, choice: object, expected: str) -> None:
    request = decode(path, tool_choice=choice)
    assert request.tool_choice == expected
    assert request.is_parallel == ("disable" not in str(choice))


def calling(**call: Any) -> dict[str, Any]:
    """Return the fields of a request whose only message calls a tool."""
    message = {"role": "assistant", "tool_calls": [{"id": "c9", **call}]}
    return {"messages": [message]}


IMPOSSIBLE: dict[str, list[tuple[dict[str, Any], str]]] = {
    CHAT: [
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"top_logprobs": 2}, "top_logprobs is not supported: remove it. Only sampled tok"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"functions": [FUNCTION]}, "functions"),
        ({"temperature": "hot"}, "$.temperature"),
        ({"n": 0}, "$.n"),
        ({"stop": [""]}, "$.stop"),
        ({"stop": ["x" * 1001]}, "$.stop"),
        ({"tools": [{"type": "function", "function": {}}]}, "tool 0 has no name"),
        ({"messages": []}, "$.messages"),
        ({"tool_choice": {"type": "function", "function": {"name": "gone"}}}, "gone"),
        ({"tools": None, "tool_choice": "required"}, "required"),
        ({"messages": [{"role": "function", "content": ""}]}, "function"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
        ({"messages": [{"role": "user", "content": [{"type": "file"}]}]}, "file"),
        ({"messages": [{"role": "user", "content": 5}]}, "$.content"),
        (calling(type="custom"), "c9"),
        (calling(function={"name": "weather", "arguments": "{"}), "invalid request"),
        (calling(function={"name": "weather", "arguments": "[1]"}), "invalid request"),
        (calling(function={"name": "weather", "arguments": "5"}), "invalid request"),
        (calling(function={"name": "weather", "arguments": DEEP.decode()}), "invalid request"),
    ],
    COMPLETIONS: [
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 2}, "$.logprobs"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
    ],
    RESPONSES: [
        ({"tools": [{"type": "web_search"}]}, "web_search"),
        ({"tools": [{"type": "custom", "name": "patch"}]}, "patch"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "item_reference"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "image"),
    ],
    ANTHROPIC: [
        ({"stop_sequences": ["x"] * 65}, "$.stop_sequences"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_k": 40}, "top_k"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config"),
        ({"context_management": {"edits": [{"type": "clear_tool"}]}}, "context_manag"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "document"),
        ({"messages": [{"role": "assistant", "content": "{"}]}, "last message"),
    ],
}
"""Fields that an API refuses, and a part of its error message."""


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        pytest.param(path, fields, named, id=f"{path} {named:.20}")
        for path, rows in IMPOSSIBLE.items()
        for fields, named in rows
    ],
)
def test_impossible_request_is_refused_by_name(
    path: str, fields: dict[str, Any], named: str
) -> None:
    assert named in refusal(path, **fields)


@pytest.mark.parametrize("path", BODIES)
def test_values_without_effect_are_accepted(path: str) -> None:
    nothing: dict[str, Any] = {"logit_bias": {}, "presence_penalty": 0.0, "top_logprobs": None}
    nothing |= {"n": 1, "best_of": 1, "top_k": -1, "response_format": {"type": "text"}}
    nothing |= {"seed": 1, "user": "u", "service_tier": "auto", "unknown": {"x": [1]}}
    assert decode(path, **nothing).n == 1


@pytest.mark.parametrize("path", BODIES)
def test_deep_json_is_refused(path: str) -> None:
    body = json.dumps({**BODIES[path], "new": "HERE"}).encode()
    with pytest.raises(ApiError) as caught:
        APIS[path].decode(body.replace(b'"HERE"', DEEP))
    assert caught.value.status == 400
    if path != COMPLETIONS:
        tools = b'{"name": "f", "parameters": {"deep": %b}}' % DEEP
        with pytest.raises(ApiError):
            APIS[path].decode(
                json.dumps({**BODIES[path], "tools": ["X"]}).encode().replace(b'"X"', tools)
            )
        with pytest.raises(ApiError):
            list(messages_of(b'{"role": "user", "content": "x", "new": %b}' % DEEP))


CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "no arguments": (
        calling(function={"name": "weather", "arguments": ""})["messages"][0],
        {"name": "weather", "arguments": {}},
    ),
    "an object": (
        calling(function={"name": "weather", "arguments": {"city": "x"}})["messages"][0],
        {"name": "weather", "arguments": {"city": "x"}},
    ),
    "a namespace": (
        {
            "type": "function_call",
            "call_id": "c1",
            "namespace": "ns",
            "name": "g",
            "arguments": "{}",
        },
        {"name": "ns__g", "arguments": {}},
    ),
}
"""An item of a request, and the function that its message calls."""


@pytest.mark.parametrize(("item", "function"), CALLS.values(), ids=CALLS)
def test_call_has_the_name_and_arguments_of_its_tool(
    item: dict[str, Any], function: dict[str, Any]
) -> None:
    [message] = messages_of(json.dumps(item).encode())
    calls: Any = message["tool_calls"]
    assert [call["function"] for call in calls] == [function]


HOSTILE = [b"", b"null", b"[]", b'"x"', b"{", b"\xff", b'{"model": "\xff"}', DEEP]


@pytest.mark.parametrize("path", BODIES)
def test_random_bodies_raise_nothing_but_refusals(path: str) -> None:
    """Values of valid bodies are exchanged at random places, and bytes are changed."""
    rng, api = Random(path), APIS[path]
    values: list[Any] = [None, True, -1, 10**400, 1e300, "", "x", [], {}, [[]], {"type": 5}, [None]]
    whole = json.dumps(BODIES[path]).encode()
    bodies = [*HOSTILE, *[whole.replace(b'"m"', each) for each in HOSTILE]]
    for _ in range(1500):
        body = json.loads(whole)
        for _ in range(rng.randrange(1, 4)):
            parent: Any = body
            while True:
                keys = [*parent] if isinstance(parent, dict) else [*range(len(parent))]
                if not keys:
                    break
                key = rng.choice(keys)
                if rng.random() < 0.3 or not isinstance(parent[key], dict | list):
                    parent[key] = deepcopy(rng.choice(values))
                    break
                parent = parent[key]
        data = bytearray(json.dumps(body).encode())
        if rng.random() < 0.3:
            data[rng.randrange(len(data))] = rng.randrange(256)
        bodies.append(bytes(data))
    accepted = 0
    for data in bodies:
        try:
            request = api.decode(data)
            messages = [message for item in request.items for message in messages_of(item)]
            assert all(isinstance(message["content"], str) for message in messages)
            accepted += 1
        except ApiError as error:
            assert error.status == 400 and api.error(error)["error"]["message"]
    assert 10 < accepted < len(bodies)
