"""OpenAI Responses."""

import time
from itertools import count
from typing import Annotated, Any
from uuid import uuid4

import msgspec
from msgspec import Meta, Raw

from arealite.impl.gateway.apis import shared
from arealite.impl.gateway.apis.shared import Api, Block, Body, Count, Deltas, Events, dumps, sse
from arealite.impl.gateway.exchange import Answer, ApiError, ChatRequest

KINDS = {"thought": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}
"""Name of the events of a block, by its kind."""
ECHOED = ("instructions", "metadata", "previous_response_id", "temperature", "top_p")
"""Fields of a request that its response has, too."""


class ResponseBody(Body, kw_only=True, frozen=True):
    """Body of POST /v1/responses."""

    input: str | Annotated[list[Raw], Meta(min_length=1)]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_tokens: Count | None = msgspec.field(default=None, name="max_output_tokens")
    include: list[str] | None = None
    metadata: dict[str, str] | None = None


class Responses(Api):
    """POST /v1/responses."""

    request_type = ResponseBody

    def read(self, body: ResponseBody) -> dict[str, Any]:
        if "message.output_text.logprobs" in (body.include or ()):
            raise ApiError(400, "include: use /v1/chat/completions for logprobs")
        text, rest = (body.input, []) if isinstance(body.input, str) else ("", body.input)
        items = [*shared.message("system", body.instructions), *shared.message("user", text)]
        previous = (body.previous_response_id or "").removeprefix("resp_")
        return {"items": [*items, *map(bytes, rest)], "previous": previous}

    def encode(self, request: ChatRequest, answers: list[Answer], model: str) -> bytes:
        answer = answers[0]
        items = [_item(request, answer.id, block) for block in shared.blocks_of(answer)]
        return dumps({**_begin(request, answer.id, model), "output": items, **_end(answer)})

    async def events(self, request: ChatRequest, deltas: Deltas, model: str, id: str) -> Events:
        numbers, response, item = count(), _begin(request, id, model), dict[str, Any]()

        def event(kind: str, **fields: Any) -> bytes:
            return sse({"type": f"response.{kind}", "sequence_number": next(numbers), **fields})

        yield event("created", response=response)
        yield event("in_progress", response=response)
        async for step, block, delta in shared.steps(deltas):
            if step == "end" and delta.answer:
                response |= _end(delta.answer)
                yield event(response["status"], response=response)
            else:
                item = item if step == "delta" else _item(request, id, block)
                for kind, fields in _events(step, block, item):
                    yield event(kind, **fields)
                response["output"] += [item] if step == "done" else []

    def failed(self, error: ApiError) -> bytes:
        about = {"code": error.code or "server_error", "message": error.message}
        response = {"id": f"resp_{uuid4().hex}", "object": "response", "status": "failed"}
        response |= {"error": about, "output": []}
        return sse({"type": "response.failed", "sequence_number": 0, "response": response})


def _item(request: ChatRequest, id: str, block: Block) -> dict[str, Any]:
    """Return a finished item."""
    if call := block.call:
        tools = shared.read_tools(request.options.tools, "function")
        _, space, name = tools.get(call.name, ({}, None, call.name))
        item = {"type": "function_call", "id": f"fc_{call.id}", "call_id": call.id, "name": name}
        item |= {"namespace": space} if space else {}
        return {**item, "arguments": block.text, "status": "completed"}
    number = block.index or ""
    part = {"type": KINDS[block.kind], "text": block.text}
    if block.kind == "thought":
        item = {"type": "reasoning", "id": f"rs_{id}{number}", "summary": []}
    else:
        item = {"type": "message", "id": f"msg_{id}{number}", "role": "assistant"}
        part |= {"annotations": [], "logprobs": []}
    return {**item, "content": [part], "status": "completed"}


def _events(step: str, block: Block, item: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return kind and fields of the events of one step of a block."""
    kind = KINDS[block.kind]
    call = block.call
    index = {"output_index": block.index}
    place = {**index, "item_id": item["id"]} | ({} if call else {"content_index": 0})
    place |= {"logprobs": []} if block.kind == "text" else {}
    if step == "delta":
        return [(f"{kind}.delta", {**place, "delta": block.parts[-1]})]
    part = [] if call else [(f"content_part.{step}", {**place, "part": item["content"][0]})]
    if step == "added":
        begun = {**item, "status": "in_progress"} | ({} if call else {"content": []})
        return [("output_item.added", {**index, "item": begun}), *part]
    whole = {"arguments": block.text, "name": item["name"]} if call else {"text": block.text}
    done = "output_item.done", {**index, "item": item}
    return [(f"{kind}.done", {**place, **whole}), *part, done]


def _begin(request: ChatRequest, id: str, model: str) -> dict[str, Any]:
    """Return a response without items."""
    body: ResponseBody = request.options
    response = {"id": f"resp_{id}", "object": "response", "created_at": int(time.time())}
    response |= {"model": model} | {name: getattr(body, name) for name in ECHOED}
    response |= {"tools": body.tools if request.tools else [], "error": None, "output": []}
    response |= {"tool_choice": body.tool_choice or "auto", "status": "in_progress"}
    return response | {"parallel_tool_calls": request.is_parallel}


def _end(answer: Answer) -> dict[str, Any]:
    """Return the fields of a response that are known at its end.

    The number of tokens of the thought is estimated by its share of the characters.
    """
    prompt = answer.prompt_tokens
    tokens = shared.sampled(answer)
    cached = {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0}
    usage = {"input_tokens": prompt, "input_tokens_details": cached, "output_tokens": tokens}
    said = len(answer.text) + sum(len(call.arguments) for call in answer.calls)
    own = tokens * len(answer.thought) // max(1, len(answer.thought) + said)
    usage |= {"output_tokens_details": {"reasoning_tokens": own}, "total_tokens": prompt + tokens}
    is_cut = answer.stop_reason == "length"
    details = {"reason": "max_output_tokens"} if is_cut else None
    status = "incomplete" if is_cut else "completed"
    return {"status": status, "incomplete_details": details, "usage": usage}
