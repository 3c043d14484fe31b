"""OpenAI Chat Completions."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any

from msgspec import Meta, Raw

from arealite.impl.gateway import exchange
from arealite.impl.gateway.apis.shared import Api, Body, Count, dumps, head, sampled, sse
from arealite.impl.gateway.exchange import Answer, Call, ChatRequest, Delta

FINISH = {"stop": "stop", "stop_string": "stop", "calls": "tool_calls", "length": "length"}


class ChatBody(Body, kw_only=True, frozen=True):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Raw], Meta(min_length=1)]
    max_completion_tokens: Count | None = None


class ChatCompletions(Api):
    """POST /v1/chat/completions."""

    request_type = ChatBody
    names = "chatcmpl", "chat.completion", "chat.completion.chunk"
    """Prefix of the id; `object` of an answer and of an event."""

    def read(self, body: Any) -> dict[str, Any]:
        limit = body.max_completion_tokens or body.max_tokens
        return {"items": [*map(bytes, body.messages)], "max_tokens": limit}

    def encode(self, request: ChatRequest, answers: list[Answer], model: str) -> bytes:
        prefix, kind, _ = self.names
        choices = [
            {"index": index, **self._whole(answer), **self._end(request, answer)}
            for index, answer in enumerate(answers)
        ]
        start = head(kind, f"{prefix}-{answers[0].id}", request, model)
        return dumps({**start, "choices": choices, "usage": _usage(answers)})

    async def events(
        self, request: ChatRequest, deltas: AsyncIterator[Delta], model: str, *, id: str
    ) -> AsyncIterator[bytes]:
        prefix, _, kind = self.names
        start = head(kind, f"{prefix}-{id}", request, model)
        answers, calls = list[Answer](), Counter[int]()
        async for delta in deltas:
            unfinished = {"index": delta.index, "logprobs": None, "finish_reason": None}
            for piece in self._pieces(request, delta, calls):
                yield sse({**start, "choices": [{**unfinished, **piece}]})
            answers += [delta.answer] if delta.answer else []
        if (request.options.stream_options or {}).get("include_usage"):
            yield sse({**start, "choices": [], "usage": _usage(answers)})
        yield b"data: [DONE]\n\n"

    def _whole(self, answer: Answer) -> dict[str, Any]:
        """Return the fields of a choice that only this API has."""
        text = answer.text or (None if answer.calls else "")
        message = exchange.assistant(answer.text, answer.thought, [*map(_call, answer.calls)])
        return {"message": {**message, "content": text, "refusal": None}}

    def _pieces(
        self, request: ChatRequest, delta: Delta, calls: Counter[int]
    ) -> Iterator[dict[str, Any]]:
        """Yield the fields of a choice for each event of a delta; `calls` counts its calls."""
        index = delta.index
        if index not in calls:
            calls[index] = 0
            yield {"delta": {"role": "assistant", "content": ""}}
        if delta.call:
            yield {"delta": {"tool_calls": [{"index": calls[index], **_call(delta.call)}]}}
            calls[index] += 1
        elif delta.text:
            name = "content" if delta.kind == "text" else "reasoning_content"
            yield {"delta": {name: delta.text}}
        elif delta.answer:
            yield {"delta": {}, **self._end(request, delta.answer)}

    def _end(self, request: ChatRequest, answer: Answer) -> dict[str, Any]:
        """Return the fields of a choice that are known at its end."""
        end = {"finish_reason": FINISH[answer.stop_reason], "logprobs": None}
        if request.logprobs and answer.response:
            ids, values = answer.response.output_ids, answer.response.logprobs
            texts = answer.tokens or [f"token_id:{token}" for token in ids]
            end["logprobs"] = self._logprobs([*texts], values)
        return end

    def _logprobs(self, texts: list[str], values: list[float]) -> dict[str, Any]:
        fields = {"bytes": None, "top_logprobs": []}
        pairs = zip(texts, values, strict=True)
        return {"content": [{"token": text, "logprob": value, **fields} for text, value in pairs]}


def _call(call: Call) -> dict[str, Any]:
    return exchange.function_call(call.id, call.name, call.arguments)


def _usage(answers: list[Answer]) -> dict[str, Any]:
    prompt, completion = answers[0].prompt_tokens, sampled(*answers)
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    cached = {"cached_tokens": answers[0].cached_tokens}
    return {**counts, "total_tokens": prompt + completion, "prompt_tokens_details": cached}
