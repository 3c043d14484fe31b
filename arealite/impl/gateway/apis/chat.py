"""OpenAI Chat Completions; and Completions, of a text or tokens instead of messages."""

import time
from collections import Counter
from itertools import accumulate
from typing import Annotated, Any, ClassVar

from msgspec import Meta, Raw

from arealite.impl.gateway import exchange
from arealite.impl.gateway.apis import shared
from arealite.impl.gateway.apis.shared import Api, Body, Count, Deltas, Events, dumps, sse
from arealite.impl.gateway.exchange import Answer, ApiError, Call, ChatRequest, Delta

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
    first: ClassVar[dict[str, Any]] = {"delta": {"role": "assistant", "content": ""}}
    """Fields of a choice in the first event of an answer."""

    def read(self, body: Any) -> dict[str, Any]:
        limit = body.max_completion_tokens or body.max_tokens
        return {"items": [*map(bytes, body.messages)], "max_tokens": limit}

    def encode(self, request: ChatRequest, answers: list[Answer], model: str) -> bytes:
        made = [{**self._whole(answer), **self._end(request, answer)} for answer in answers]
        choices = [{"index": index, **choice} for index, choice in enumerate(made)]
        id = f"{self.names[0]}-{answers[0].id}"
        kind = self.names[1]
        head = {"id": id, "object": kind, "created": int(time.time()), "model": model}
        return dumps({**head, "choices": choices, "usage": _usage(answers)})

    async def events(self, request: ChatRequest, deltas: Deltas, model: str, id: str) -> Events:
        id = f"{self.names[0]}-{id}"
        kind = self.names[2]
        head = {"id": id, "object": kind, "created": int(time.time()), "model": model}
        answers = list[Answer]()
        calls = Counter[int]()

        def event(index: int, fields: dict[str, Any]) -> bytes:
            choice = {"index": index, "logprobs": None, "finish_reason": None, **fields}
            return sse({**head, "choices": [choice]})

        for index in range(request.n):
            yield event(index, self.first)
        async for delta in deltas:
            piece = self._piece(delta, calls[delta.index])
            calls[delta.index] += delta.kind == "call"
            if delta.answer:
                answers.append(delta.answer)
                piece |= self._end(request, delta.answer)
            yield event(delta.index, piece)
        if (request.options.stream_options or {}).get("include_usage"):
            yield sse({**head, "choices": [], "usage": _usage(answers)})
        yield b"data: [DONE]\n\n"

    def _whole(self, answer: Answer) -> dict[str, Any]:
        """Return the fields of a choice that only this API has."""
        text = answer.text or (None if answer.calls else "")
        message = exchange.assistant(answer.text, answer.thought, [*map(_call, answer.calls)])
        return {"message": {**message, "content": text, "refusal": None}}

    def _piece(self, delta: Delta, calls: int) -> dict[str, Any]:
        """Return the fields of a choice for a delta after some calls."""
        if delta.call:
            return {"delta": {"tool_calls": [{"index": calls, **_call(delta.call)}]}}
        name = "reasoning_content" if delta.kind == "thought" else "content"
        return {"delta": {name: delta.text} if delta.text else {}}

    def _end(self, request: ChatRequest, answer: Answer) -> dict[str, Any]:
        """Return the fields of a choice that are known at its end."""
        response = answer.response if request.logprobs else None
        logprobs = self._logprobs(answer.tokens, response.logprobs) if response else None
        return {"finish_reason": FINISH[answer.stop_reason], "logprobs": logprobs}

    def _logprobs(self, texts: tuple[str, ...], values: list[float]) -> dict[str, Any]:
        fields = {"bytes": None, "top_logprobs": []}
        pairs = zip(texts, values, strict=True)
        return {"content": [{"token": text, "logprob": value, **fields} for text, value in pairs]}


class CompletionBody(Body, kw_only=True, frozen=True):
    """Body of POST /v1/completions."""

    prompt: str | list[Any]
    logprobs: Annotated[int, Meta(ge=0, le=1)] | None = None
    """0 or 1: return the log-probabilities of the sampled tokens."""


class Completions(ChatCompletions):
    """POST /v1/completions."""

    request_type = CompletionBody
    names = "cmpl", "text_completion", "text_completion"
    first: ClassVar[dict[str, Any]] = {"text": ""}

    def read(self, body: CompletionBody) -> dict[str, Any]:
        prompt = body.prompt
        has_logprobs = body.logprobs is not None
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        is_tokens = isinstance(prompt, list) and all(type(each) is int for each in prompt)
        if not prompt or not (isinstance(prompt, str) or is_tokens):
            raise ApiError(400, "prompt must be a text or a list of token ids: one in a request")
        return {"items": [], "prompt": prompt, "logprobs": has_logprobs}

    def _whole(self, answer: Answer) -> dict[str, Any]:
        return {"text": answer.text}

    def _piece(self, delta: Delta, calls: int) -> dict[str, Any]:
        return {"text": delta.text}

    def _logprobs(self, texts: tuple[str, ...], values: list[float]) -> dict[str, Any]:
        offsets = [0, *accumulate(map(len, texts))][: len(texts)]
        fields = {"token_logprobs": values, "top_logprobs": None, "text_offset": offsets}
        return {"tokens": texts, **fields}


def _call(call: Call) -> dict[str, Any]:
    return exchange.function_call(call.id, call.name, call.arguments)


def _usage(answers: list[Answer]) -> dict[str, Any]:
    prompt = answers[0].prompt_tokens
    made = shared.sampled(*answers)
    usage = {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
    return {**usage, "prompt_tokens_details": {"cached_tokens": answers[0].cached_tokens}}
