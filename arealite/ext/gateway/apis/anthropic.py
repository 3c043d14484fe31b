"""Anthropic Messages."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw

from arealite.ext.gateway.apis import common
from arealite.ext.gateway.apis.common import (
    Api,
    Block,
    Deltas,
    Events,
    RequestBody,
    Stops,
    dumps,
    sse,
)
from arealite.ext.gateway.apis.past_messages import ITEM, MessageItem, decode
from arealite.ext.gateway.request_data import ApiError, ChatRequest, ParsedAnswer

STOP = {
    "stop": "end_turn",
    "stop_string": "end_turn",
    "calls": "tool_use",
    "length": "max_tokens",
}
"""`stop_reason` by `ParsedAnswer.stop_reason`."""
STEPS = {"added": "start", "delta": "delta", "done": "stop"}
"""End of the type of an event, by the step of a block."""
DELTAS = {"text": "text", "thought": "thinking", "call": "input_json"}
"""Type of a delta, and but for calls its field, by `Block.kind`."""


class MessageBody(RequestBody, kw_only=True, frozen=True):
    """Body of POST /v1/messages and of POST /v1/messages/count_tokens."""

    messages: Annotated[list[Raw], Meta(min_length=1)]
    system: str | list[MessageItem] | None = None
    stop: Stops | None = msgspec.field(default=None, name="stop_sequences")
    context_management: dict[str, list[dict[str, Any]]] | None = None


class Messages(Api):
    """POST /v1/messages and POST /v1/messages/count_tokens."""

    request_type = MessageBody
    function_type = "custom"
    keep_alive = sse({"type": "ping"})

    def read(self, body: MessageBody) -> dict[str, Any]:
        management = body.context_management or {}
        for edit in management.get("edits", ()):
            if not str(edit.get("type")).startswith("clear_thinking"):
                raise ApiError(400, "context_management: remove all edits but clear_thinking")
        last_message = decode(ITEM, bytes(body.messages[-1]))
        if last_message.role == "assistant":
            raise ApiError(400, "the last message must not be the assistant's: send the user's")
        instructions = common.message("system", body.system)
        return {"items": [*instructions, *map(bytes, body.messages)]}

    def encode(self, request: ChatRequest, answers: list[ParsedAnswer], model: str) -> bytes:
        answer = answers[0]
        content = [_block(block, answer.id) for block in common.blocks_of(answer)]
        return dumps(
            {
                **_head(answer.id, model),
                "content": content,
                **_stop(request, answer),
                "usage": _usage(answer),
            }
        )

    async def events(
        self,
        request: ChatRequest,
        deltas: Deltas,
        model: str,
        id: str,
    ) -> Events:
        message = {
            **_head(id, model),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": 0, "output_tokens": 0},
        }
        yield sse({"type": "message_start", "message": message})
        async for step, block, delta in common.steps(deltas):
            if delta.answer and step == "end":
                yield sse(
                    {
                        "type": "message_delta",
                        "delta": _stop(request, delta.answer),
                        "usage": _usage(delta.answer),
                    }
                )
                yield sse({"type": "message_stop"})
            elif step == "added":
                yield _block_event(step, block, {"content_block": _block(block, "")})
            elif step == "delta":
                yield _block_event(step, block, {"delta": _delta(block)})
            elif step == "done":
                if block.kind == "thought":
                    signature = {"type": "signature_delta", "signature": id}
                    yield _block_event("delta", block, {"delta": signature})
                yield _block_event(step, block, {})

    def error(self, error: ApiError) -> dict[str, Any]:
        return {"type": "error", **super().error(error)}


def _block_event(step: str, block: Block, fields: dict[str, Any]) -> bytes:
    """Return the event of a step of a block."""
    return sse(
        {
            "type": f"content_block_{STEPS[step]}",
            "index": block.index,
            **fields,
        }
    )


def _delta(block: Block) -> dict[str, str]:
    """Return the latest part of a block."""
    kind = DELTAS[block.kind]
    field_name = "partial_json" if block.call else kind
    return {"type": f"{kind}_delta", field_name: block.parts[-1]}


def _block(block: Block, id: str) -> dict[str, Any]:
    """Return a block; the signature of a thought is the id of its answer."""
    if block.call:
        arguments = block.text.encode() or b"{}"
        return {
            "type": "tool_use",
            "id": block.call.id,
            "name": block.call.name,
            "input": Raw(arguments),
        }
    if block.kind == "thought":
        return {"type": "thinking", "thinking": block.text, "signature": id}
    return {"type": "text", "text": block.text}


def _head(id: str, model: str) -> dict[str, Any]:
    """Return the first fields of a message."""
    return {
        "id": f"msg_{id}",
        "type": "message",
        "role": "assistant",
        "model": model,
    }


def _stop(request: ChatRequest, answer: ParsedAnswer) -> dict[str, Any]:
    """Return the reason of the end. A stop string of the run's options is a normal end."""
    if answer.stop_string and answer.stop_string in request.stop:
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_string}
    return {"stop_reason": STOP[answer.stop_reason], "stop_sequence": None}


def _usage(answer: ParsedAnswer) -> dict[str, int]:
    """Return the numbers of tokens; those of the cache are not input tokens here."""
    return {
        "input_tokens": answer.prompt_tokens - answer.cached_tokens,
        "cache_read_input_tokens": answer.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": common.sampled(answer),
    }
