"""Anthropic Messages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw

from arealite.impl.gateway.apis import shared
from arealite.impl.gateway.apis.history import Item, decode
from arealite.impl.gateway.apis.shared import Body, Count, JsonApi, Text, Tool, dumps, sse
from arealite.impl.gateway.exchange import Answer, ApiError, ChatRequest, Delta

STOP = {"stop": "end_turn", "stop_string": "end_turn", "calls": "tool_use", "length": "max_tokens"}
BLOCKS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "text": ("text_delta", "text", {"type": "text", "text": ""}),
    "thought": (
        "thinking_delta",
        "thinking",
        {"type": "thinking", "thinking": "", "signature": ""},
    ),
    "call": ("input_json_delta", "partial_json", {"type": "tool_use", "input": {}}),
}
"""Type of the delta, its field, and an empty block for each kind of Delta."""


class Role(msgspec.Struct):
    """The role of a message."""

    role: Any = None


_role = msgspec.json.Decoder(Role)


class CountBody(Body, kw_only=True, frozen=True):
    """Body of POST /v1/messages/count_tokens."""

    messages: Annotated[list[Raw], Meta(min_length=1)]
    system: str | list[Item] | None = None
    stop: list[Text] | None = msgspec.field(default=None, name="stop_sequences")
    output_config: dict[str, Any] | None = None
    context_management: dict[str, list[dict[str, Any]]] | None = None


class MessageBody(CountBody, kw_only=True, frozen=True):
    """Body of POST /v1/messages."""

    max_tokens: Count


class Messages(JsonApi):
    """POST /v1/messages."""

    request_type = MessageBody
    refused = "mcp_servers container n logprobs"
    function_type, server_error = "custom", "api_error"
    keep_alive = sse({"type": "ping"})

    def decode(self, body: bytes) -> ChatRequest:
        fields: CountBody = self.body(body)
        if (fields.output_config or {}).get("format"):
            raise ApiError(400, f"output_config.format is not supported: remove it. {shared.WHY}")
        edits = (fields.context_management or {}).get("edits", ())
        if not all(str(edit.get("type")).startswith("clear_thinking") for edit in edits):
            raise ApiError(400, "context_management: remove all edits but clear_thinking")
        if decode(_role, bytes(fields.messages[-1])).role == "assistant":
            raise ApiError(400, "the last message must not be the assistant's: send the user's")
        choice, system = fields.tool_choice, {"role": "system", "content": fields.system}
        return self.request(
            fields,
            [*map(dumps, [system] if fields.system else []), *map(bytes, fields.messages)],
            is_parallel=not (isinstance(choice, Tool) and choice.disable_parallel_tool_use),
        )

    def encode(self, request: ChatRequest, answers: list[Answer], model: str) -> bytes:
        answer = answers[0]
        thought = {"type": "thinking", "thinking": answer.thought, "signature": answer.id}
        text = {"type": "text", "text": answer.text}
        calls = [
            {
                "type": "tool_use",
                "id": each.id,
                "name": each.name,
                "input": Raw(each.arguments.encode()),
            }
            for each in answer.calls
        ]
        content = [thought] * bool(answer.thought) + [text] * bool(answer.text) + calls
        message = {**_head(answer.id, model), "content": content, **_stop(request, answer)}
        return dumps({**message, "usage": _usage(answer)})

    async def events(
        self, request: ChatRequest, deltas: AsyncIterator[Delta], model: str, *, id: str
    ) -> AsyncIterator[bytes]:
        blocks = _Blocks(id, model)
        async for delta in deltas:
            for event in blocks.add(delta):
                yield sse(event)
            if delta.answer:
                end = {"delta": _stop(request, delta.answer), "usage": _usage(delta.answer)}
                yield sse({"type": "message_delta", **end})
                yield sse({"type": "message_stop"})

    def error_body(self, error: ApiError) -> dict[str, Any]:
        return {"type": "error", **super().error_body(error)}


class CountTokens(Messages):
    """POST /v1/messages/count_tokens. The answer is its `prompt_tokens`."""

    request_type = CountBody

    def encode(self, request: ChatRequest, answers: list[Answer], model: str) -> bytes:
        return dumps({"input_tokens": answers[0].prompt_tokens})


class _Blocks:
    """The events of content blocks."""

    def __init__(self, id: str, model: str) -> None:
        self._id, self._model, self._kind, self._index = id, model, "", -1
        self._is_started = False

    def add(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """Yield the events of a delta."""
        if not self._is_started:
            self._is_started = True
            usage = {"input_tokens": 0, "output_tokens": 0}
            fields = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
            yield {"type": "message_start", "message": {**_head(self._id, self._model), **fields}}
        is_new = delta.call is not None or delta.kind != self._kind
        if is_new and self._kind:
            if self._kind == "thought":
                yield self._delta({"type": "signature_delta", "signature": self._id})
            yield {"type": "content_block_stop", "index": self._index}
            self._kind = ""
        text = delta.call.arguments if delta.call else delta.text
        if text:
            kind, field, block = BLOCKS[delta.kind]
            if is_new:
                self._kind, self._index = delta.kind, self._index + 1
                block = block | (
                    {"id": delta.call.id, "name": delta.call.name} if delta.call else {}
                )
                yield {"type": "content_block_start", "index": self._index, "content_block": block}
            yield self._delta({"type": kind, field: text})

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def _head(id: str, model: str) -> dict[str, Any]:
    return {"id": f"msg_{id}", "type": "message", "role": "assistant", "model": model}


def _stop(request: ChatRequest, answer: Answer) -> dict[str, Any]:
    """Return the reason of the end. A stop string of the run's options is a normal end."""
    if answer.stop_string and answer.stop_string in request.stop:
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_string}
    return {"stop_reason": STOP[answer.stop_reason], "stop_sequence": None}


def _usage(answer: Answer) -> dict[str, int]:
    cached = answer.cached_tokens
    prompt = {"input_tokens": answer.prompt_tokens - cached, "cache_read_input_tokens": cached}
    return {**prompt, "cache_creation_input_tokens": 0, "output_tokens": shared.sampled(answer)}
