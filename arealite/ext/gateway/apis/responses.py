"""OpenAI Responses."""

import time
from collections.abc import Iterator
from itertools import count
from typing import Annotated, Any
from uuid import uuid4

import msgspec
from msgspec import Meta, Raw

from arealite.ext.gateway.apis import common
from arealite.ext.gateway.apis.common import (
    Api,
    Block,
    Deltas,
    Events,
    PositiveCount,
    RequestBody,
    dumps,
    sse,
)
from arealite.ext.gateway.request_data import ApiError, ChatRequest, ParsedAnswer, ParsedCall

KINDS = {"thought": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}
"""Name of the events of a block, by its kind."""
ECHOED = ("instructions", "metadata", "previous_response_id", "temperature", "top_p")
"""Fields of a request that its response has, too."""


class ResponseBody(RequestBody, kw_only=True, frozen=True):
    """Body of POST /v1/responses."""

    input: str | Annotated[list[Raw], Meta(min_length=1)]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_tokens: PositiveCount | None = msgspec.field(default=None, name="max_output_tokens")
    include: list[str] | None = None
    metadata: dict[str, str] | None = None


class Responses(Api):
    """POST /v1/responses."""

    request_type = ResponseBody

    def read(self, body: ResponseBody) -> dict[str, Any]:
        if "message.output_text.logprobs" in (body.include or ()):
            raise ApiError(400, "include: use /v1/chat/completions for logprobs")
        items = common.message("system", body.instructions)
        if isinstance(body.input, str):
            items += common.message("user", body.input)
        else:
            items += map(bytes, body.input)
        previous = (body.previous_response_id or "").removeprefix("resp_")
        return {"items": items, "previous": previous}

    def encode(self, request: ChatRequest, answers: list[ParsedAnswer], model: str) -> bytes:
        answer = answers[0]
        items = [_item(request, answer.id, block) for block in common.blocks_of(answer)]
        return dumps(
            {
                **_begin(request, answer.id, model),
                "output": items,
                **_end(answer),
            }
        )

    async def events(
        self,
        request: ChatRequest,
        deltas: Deltas,
        model: str,
        id: str,
    ) -> Events:
        numbers = count()
        response = _begin(request, id, model)
        item = dict[str, Any]()

        def event(kind: str, **fields: Any) -> bytes:
            return sse(
                {
                    "type": f"response.{kind}",
                    "sequence_number": next(numbers),
                    **fields,
                }
            )

        yield event("created", response=response)
        yield event("in_progress", response=response)
        async for step, block, delta in common.steps(deltas):
            if step == "end" and delta.answer:
                response |= _end(delta.answer)
                yield event(response["status"], response=response)
                continue
            if step != "delta":
                item = _item(request, id, block)
            for kind, fields in _events(step, block, item):
                yield event(kind, **fields)
            if step == "done":
                response["output"].append(item)

    def failed(self, error: ApiError) -> bytes:
        response = {
            "id": f"resp_{uuid4().hex}",
            "object": "response",
            "status": "failed",
            "error": {
                "code": error.code or "server_error",
                "message": error.message,
            },
            "output": [],
        }
        return sse(
            {
                "type": "response.failed",
                "sequence_number": 0,
                "response": response,
            }
        )


def _item(request: ChatRequest, id: str, block: Block) -> dict[str, Any]:
    """Return a finished item."""
    if block.call:
        return _call_item(request, block.call, block.text)
    number = block.index or ""
    part = {"type": KINDS[block.kind], "text": block.text}
    if block.kind == "thought":
        return {
            "type": "reasoning",
            "id": f"rs_{id}{number}",
            "summary": [],
            "content": [part],
            "status": "completed",
        }
    return {
        "type": "message",
        "id": f"msg_{id}{number}",
        "role": "assistant",
        "content": [{**part, "annotations": [], "logprobs": []}],
        "status": "completed",
    }


def _call_item(request: ChatRequest, call: ParsedCall, arguments: str) -> dict[str, Any]:
    """Return the finished item of a call, with the namespace of its function."""
    tools = common.read_tools(request.options.tools, "function")
    _, namespace, name = tools.get(call.name, (None, None, call.name))
    item = {
        "type": "function_call",
        "id": f"fc_{call.id}",
        "call_id": call.id,
        "name": name,
    }
    if namespace:
        item["namespace"] = namespace
    return {**item, "arguments": arguments, "status": "completed"}


def _events(step: str, block: Block, item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield kind and fields of the events of one step of a block."""
    kind = KINDS[block.kind]
    is_call = block.call is not None
    index = {"output_index": block.index}
    place: dict[str, Any] = {**index, "item_id": item["id"]}
    if not is_call:
        place["content_index"] = 0
    if block.kind == "text":
        place["logprobs"] = []
    if step == "added":
        begun = {**item, "status": "in_progress"}
        if not is_call:
            begun["content"] = []
        yield "output_item.added", {**index, "item": begun}
    if step == "delta":
        yield f"{kind}.delta", {**place, "delta": block.parts[-1]}
    if step == "done" and is_call:
        whole_call = {"arguments": block.text, "name": item["name"]}
        yield f"{kind}.done", {**place, **whole_call}
    elif step == "done":
        yield f"{kind}.done", {**place, "text": block.text}
    if step != "delta" and not is_call:
        yield f"content_part.{step}", {**place, "part": item["content"][0]}
    if step == "done":
        yield "output_item.done", {**index, "item": item}


def _begin(request: ChatRequest, id: str, model: str) -> dict[str, Any]:
    """Return a response without items."""
    body: ResponseBody = request.options
    return {
        "id": f"resp_{id}",
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        **{name: getattr(body, name) for name in ECHOED},
        "tools": body.tools if request.tools else [],
        "error": None,
        "output": [],
        "tool_choice": body.tool_choice or "auto",
        "status": "in_progress",
        "parallel_tool_calls": request.is_parallel,
    }


def _end(answer: ParsedAnswer) -> dict[str, Any]:
    """Return the fields of a response that are known at its end."""
    num_prompt = answer.prompt_tokens
    num_sampled = common.sampled(answer)
    usage = {
        "input_tokens": num_prompt,
        "input_tokens_details": {
            "cached_tokens": answer.cached_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": num_sampled,
        "output_tokens_details": {"reasoning_tokens": _thought_tokens(answer)},
        "total_tokens": num_prompt + num_sampled,
    }
    if answer.stop_reason == "length":
        status = "incomplete"
        details = {"reason": "max_output_tokens"}
    else:
        status = "completed"
        details = None
    return {
        "status": status,
        "incomplete_details": details,
        "usage": usage,
    }


def _thought_tokens(answer: ParsedAnswer) -> int:
    """Return the number of tokens of the thought, estimated by its share of the characters."""
    thought_size = len(answer.thought)
    call_size = sum(len(call.arguments) for call in answer.calls)
    answer_size = thought_size + len(answer.text) + call_size
    return common.sampled(answer) * thought_size // max(1, answer_size)
