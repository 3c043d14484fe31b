"""OpenAI Responses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from itertools import count
from typing import Annotated, Any
from uuid import uuid4

import msgspec
from msgspec import Meta, Raw

from arealite.impl.gateway.apis import shared
from arealite.impl.gateway.apis.shared import TEXT_FORMAT, Body, Count, JsonApi, dumps, sse
from arealite.impl.gateway.exchange import Answer, ApiError, Call, ChatRequest, Delta

KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "thought": ("rs", {"type": "reasoning", "summary": []}, {"type": "reasoning_text"}),
    "text": (
        "msg",
        {"type": "message", "role": "assistant"},
        {"type": "output_text", "annotations": [], "logprobs": []},
    ),
}
"""Prefix of the id, item and part of each kind of Delta that has a text."""
ECHOED = ("instructions", "metadata", "previous_response_id", "temperature", "top_p")
"""Fields of a request that its response has, too."""
Events = Iterator[tuple[str, dict[str, Any]]]
"""Kinds and fields of events."""


class ResponseBody(Body, kw_only=True, frozen=True):
    """Body of POST /v1/responses."""

    input: str | Annotated[list[Raw], Meta(min_length=1)]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_tokens: Count | None = msgspec.field(default=None, name="max_output_tokens")
    text: dict[str, Any] | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None


class Responses(JsonApi):
    """POST /v1/responses."""

    request_type = ResponseBody
    refused = "background conversation prompt stop n logprobs context_management moderation"

    def decode(self, body: bytes) -> ChatRequest:
        fields: ResponseBody = self.body(body)
        if (fields.text or {}).get("format") not in (None, TEXT_FORMAT):
            raise ApiError(400, f"text.format is not supported: remove it. {shared.WHY}")
        if "message.output_text.logprobs" in (fields.include or ()):
            raise ApiError(400, "include: use /v1/chat/completions for logprobs")
        system = [{"role": "system", "content": fields.instructions}]
        user = [{"role": "user", "content": fields.input}]
        new = user if isinstance(fields.input, str) else fields.input
        items = [bytes(item) if isinstance(item, Raw) else dumps(item) for item in new]
        return self.request(
            fields,
            [*map(dumps, system if fields.instructions else ()), *items],
            previous=(fields.previous_response_id or "").removeprefix("resp_"),
        )

    def encode(self, request: ChatRequest, answers: list[Answer], model: str) -> bytes:
        answer, events = answers[0], list[tuple[str, dict[str, Any]]]()
        output = _Output(request, answer.id, model)
        calls = [Delta("call", call=call) for call in answer.calls]
        deltas = (Delta("thought", answer.thought), Delta("text", answer.text), *calls)
        for delta in (*deltas, Delta("end", answer=answer)):
            events += output.add(delta)
        return dumps(events[-1][1]["response"])

    async def events(
        self, request: ChatRequest, deltas: AsyncIterator[Delta], model: str, *, id: str
    ) -> AsyncIterator[bytes]:
        output, numbers = _Output(request, id, model), count()
        async for delta in deltas:
            for kind, fields in output.add(delta):
                number = {"type": f"response.{kind}", "sequence_number": next(numbers)}
                yield sse({**number, **fields})

    def failed(self, error: ApiError) -> bytes:
        about = {"code": error.code or "server_error", "message": error.message}
        response = {"id": f"resp_{uuid4().hex}", "object": "response", "status": "failed"}
        response |= {"error": about, "output": []}
        return sse({"type": "response.failed", "sequence_number": 0, "response": response})


class _Output:
    """The items of a response, and the events that build them."""

    def __init__(self, request: ChatRequest, id: str, model: str) -> None:
        self._request, self._id = request, id
        self._head = shared.head("response", f"resp_{id}", model)
        self._head["created_at"] = self._head.pop("created")
        self._namespaces = shared.read_tools(request.options.tools, "function")[1]
        self._items: list[dict[str, Any]] | None = None
        """The finished items; None before the first event."""
        self._kind, self._texts = "", list[str]()
        self._item: dict[str, Any] = {}
        self._part: dict[str, Any] = {}
        self._where: dict[str, Any] = {}

    def add(self, delta: Delta) -> Events:
        """Yield the events of a delta. The last one has the whole response."""
        if self._items is None:
            self._items = []
            for kind in ("created", "in_progress"):
                yield kind, {"response": self._response({"status": "in_progress"})}
        if delta.kind != self._kind:
            yield from self._close()
        if delta.call:
            yield from self._call(delta.call)
        elif delta.text:
            yield from self._text(delta.kind, delta.text)
        elif delta.answer:
            if not delta.answer.text and not delta.answer.calls:  # clients expect a message
                yield from self._text("text", "")
                yield from self._close()
            end = _end(delta.answer)
            yield end["status"], {"response": self._response(end)}

    def _text(self, kind: str, text: str) -> Events:
        if not self._kind:
            prefix, item, self._part = KINDS[kind]
            index = len(self._items or ())
            self._kind, self._texts = kind, []
            self._item = {**item, "id": f"{prefix}_{self._id}{index or ''}"}
            self._where = {"item_id": self._item["id"], "output_index": index, "content_index": 0}
            item = {**self._item, "status": "in_progress", "content": []}
            yield "output_item.added", {"output_index": index, "item": item}
            yield "content_part.added", {**self._where, "part": {**self._part, "text": ""}}
        self._texts.append(text)
        yield f"{self._part['type']}.delta", {**self._where, "delta": text, "logprobs": []}

    def _close(self) -> Events:
        """Yield the events that finish the open text."""
        if self._kind:
            self._kind, text = "", "".join(self._texts)
            part = {**self._part, "text": text}
            yield f"{part['type']}.done", {**self._where, "text": text, "logprobs": []}
            yield "content_part.done", {**self._where, "part": part}
            yield self._done({**self._item, "content": [part]})

    def _call(self, call: Call) -> Events:
        space, name = self._namespaces.get(call.name, (None, call.name))
        item = {"type": "function_call", "id": f"fc_{call.id}", "call_id": call.id, "name": name}
        item |= {"namespace": space} if space else {}
        index = len(self._items or ())
        where = {"item_id": item["id"], "output_index": index}
        added = {**item, "status": "in_progress", "arguments": ""}
        yield "output_item.added", {"output_index": index, "item": added}
        item["arguments"] = call.arguments
        yield "function_call_arguments.delta", {**where, "delta": call.arguments}
        done = {"name": name, "arguments": call.arguments}
        yield "function_call_arguments.done", {**where, **done}
        yield self._done(item)

    def _done(self, item: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        items = self._items = self._items or []
        items.append({**item, "status": "completed"})
        return "output_item.done", {"output_index": len(items) - 1, "item": items[-1]}

    def _response(self, end: dict[str, Any]) -> dict[str, Any]:
        body: ResponseBody = self._request.options
        echo = {name: getattr(body, name) for name in ECHOED}
        echo |= {"tools": body.tools if self._request.tools else []}
        echo |= {"tool_choice": body.tool_choice or "auto"}
        echo |= {"parallel_tool_calls": self._request.is_parallel, "error": None}
        return {**self._head, **echo, "output": self._items, **end}


def _end(answer: Answer) -> dict[str, Any]:
    """Return the fields of a response that are known at its end."""
    is_cut, tokens = answer.stop_reason == "length", shared.sampled(answer)
    return {
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": answer.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + tokens,
        },
    }
