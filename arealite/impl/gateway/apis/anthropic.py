"""Anthropic Messages."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw

from arealite.impl.gateway.apis import shared
from arealite.impl.gateway.apis.history import ITEM, Item, decode
from arealite.impl.gateway.apis.shared import Api, Block, Body, Deltas, Events, Stops, dumps, sse
from arealite.impl.gateway.exchange import Answer, ApiError, ChatRequest

STOP = {"stop": "end_turn", "stop_string": "end_turn", "calls": "tool_use", "length": "max_tokens"}
STEPS = {"added": "start", "delta": "delta", "done": "stop", "end": ""}
DELTAS = {"text": "text", "thought": "thinking", "call": "input_json"}
"""Type of a delta, and but for calls its field, by `Block.kind`."""


class MessageBody(Body, kw_only=True, frozen=True):
    """Body of POST /v1/messages and of POST /v1/messages/count_tokens."""

    messages: Annotated[list[Raw], Meta(min_length=1)]
    system: str | list[Item] | None = None
    stop: Stops | None = msgspec.field(default=None, name="stop_sequences")
    context_management: dict[str, list[dict[str, Any]]] | None = None


class Messages(Api):
    """POST /v1/messages and POST /v1/messages/count_tokens."""

    request_type = MessageBody
    function_type = "custom"
    keep_alive = sse({"type": "ping"})

    def read(self, body: MessageBody) -> dict[str, Any]:
        edits = (body.context_management or {}).get("edits", ())
        if not all(str(edit.get("type")).startswith("clear_thinking") for edit in edits):
            raise ApiError(400, "context_management: remove all edits but clear_thinking")
        if decode(ITEM, bytes(body.messages[-1])).role == "assistant":
            raise ApiError(400, "the last message must not be the assistant's: send the user's")
        return {"items": [*shared.message("system", body.system), *map(bytes, body.messages)]}

    def encode(self, request: ChatRequest, answers: list[Answer], model: str) -> bytes:
        answer = answers[0]
        content = [_block(block, answer.id) for block in shared.blocks_of(answer)]
        end = {"content": content, **_stop(request, answer), "usage": _usage(answer)}
        return dumps({**_head(answer.id, model), **end})

    async def events(self, request: ChatRequest, deltas: Deltas, model: str, id: str) -> Events:
        message = {**_head(id, model), "content": [], "stop_reason": None}
        message |= {"stop_sequence": None, "usage": {"input_tokens": 0, "output_tokens": 0}}
        yield sse({"type": "message_start", "message": message})
        async for step, block, delta in shared.steps(deltas):
            event: dict[str, Any] = {"type": f"content_block_{STEPS[step]}", "index": block.index}
            if step == "added":
                yield sse({**event, "content_block": _block(block, "")})
            elif step == "delta":
                kind = DELTAS[block.kind]
                name = "partial_json" if block.call else kind
                yield sse({**event, "delta": {"type": f"{kind}_delta", name: block.parts[-1]}})
            elif step == "done":
                if block.kind == "thought":
                    signed = {"type": "signature_delta", "signature": id}
                    yield sse({**event, "type": "content_block_delta", "delta": signed})
                yield sse(event)
            elif delta.answer:
                usage = _usage(delta.answer)
                stop = _stop(request, delta.answer)
                yield sse({"type": "message_delta", "delta": stop, "usage": usage})
                yield sse({"type": "message_stop"})

    def error(self, error: ApiError) -> dict[str, Any]:
        return {"type": "error", **super().error(error)}


def _block(block: Block, id: str) -> dict[str, Any]:
    if block.call:
        call = {"id": block.call.id, "name": block.call.name}
        return {"type": "tool_use", **call, "input": Raw(block.text.encode() or b"{}")}
    if block.kind == "thought":
        return {"type": "thinking", "thinking": block.text, "signature": id}
    return {"type": "text", "text": block.text}


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
