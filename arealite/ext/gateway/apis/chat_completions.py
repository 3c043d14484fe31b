"""OpenAI Chat Completions; and Completions, of a text or tokens instead of messages."""

import time
from collections import Counter
from itertools import accumulate
from typing import Annotated, Any, ClassVar

from msgspec import Meta, Raw

from arealite.ext.gateway import request_data
from arealite.ext.gateway.apis import common
from arealite.ext.gateway.apis.common import (
    Api,
    Deltas,
    Events,
    PositiveCount,
    RequestBody,
    dumps,
    sse,
)
from arealite.ext.gateway.request_data import ApiError, ChatRequest, Delta, ParsedAnswer, ParsedCall

FINISH = {
    "stop": "stop",
    "stop_string": "stop",
    "calls": "tool_calls",
    "length": "length",
}
"""`finish_reason` by `ParsedAnswer.stop_reason`."""


class ChatBody(RequestBody, kw_only=True, frozen=True):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Raw], Meta(min_length=1)]
    max_completion_tokens: PositiveCount | None = None


class ChatCompletions(Api):
    """POST /v1/chat/completions."""

    request_type = ChatBody
    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    """`object` of an answer."""
    chunk_name = "chat.completion.chunk"
    """`object` of an event."""
    first: ClassVar[dict[str, Any]] = {"delta": {"role": "assistant", "content": ""}}
    """Fields of a choice in the first event of an answer."""

    def read(self, body: Any) -> dict[str, Any]:
        return {
            "items": [*map(bytes, body.messages)],
            "max_tokens": body.max_completion_tokens or body.max_tokens,
        }

    def encode(self, request: ChatRequest, answers: list[ParsedAnswer], model: str) -> bytes:
        choices = [
            {"index": index, **self._whole(answer), **self._end(request, answer)}
            for index, answer in enumerate(answers)
        ]
        return dumps(
            {
                **self._head(self.object_name, answers[0].id, model),
                "choices": choices,
                "usage": _usage(answers),
            }
        )

    async def events(
        self,
        request: ChatRequest,
        deltas: Deltas,
        model: str,
        id: str,
    ) -> Events:
        head = self._head(self.chunk_name, id, model)
        answers = list[ParsedAnswer]()
        num_calls = Counter[int]()  # by the number of the answer

        def event(index: int, fields: dict[str, Any]) -> bytes:
            choice = {
                "index": index,
                "logprobs": None,
                "finish_reason": None,
                **fields,
            }
            return sse({**head, "choices": [choice]})

        for index in range(request.n):
            yield event(index, self.first)
        async for delta in deltas:
            fields = self._piece(delta, num_calls[delta.index])
            if delta.kind == "call":
                num_calls[delta.index] += 1
            if delta.answer:
                answers.append(delta.answer)
                fields |= self._end(request, delta.answer)
            yield event(delta.index, fields)
        stream_options = request.options.stream_options or {}
        if stream_options.get("include_usage"):
            yield sse({**head, "choices": [], "usage": _usage(answers)})
        yield b"data: [DONE]\n\n"

    def _head(self, object_name: str, id: str, model: str) -> dict[str, Any]:
        """Return the first fields of an answer or an event."""
        return {
            "id": f"{self.id_prefix}-{id}",
            "object": object_name,
            "created": int(time.time()),
            "model": model,
        }

    def _whole(self, answer: ParsedAnswer) -> dict[str, Any]:
        """Return the fields of a choice that only this API has."""
        calls = [_call(call) for call in answer.calls]
        message = request_data.assistant(answer.text, answer.thought, calls)
        message["content"] = answer.text
        if not answer.text and answer.calls:
            message["content"] = None
        message["refusal"] = None
        return {"message": message}

    def _piece(self, delta: Delta, num_calls: int) -> dict[str, Any]:
        """Return the fields of a choice for a delta after some calls."""
        if delta.call:
            call = {"index": num_calls, **_call(delta.call)}
            return {"delta": {"tool_calls": [call]}}
        if not delta.text:
            return {"delta": {}}
        field_name = "reasoning_content" if delta.kind == "thought" else "content"
        return {"delta": {field_name: delta.text}}

    def _end(self, request: ChatRequest, answer: ParsedAnswer) -> dict[str, Any]:
        """Return the fields of a choice that are known at its end."""
        logprobs = None
        if request.logprobs and answer.response:
            logprobs = self._logprobs(answer.tokens, answer.response.logprobs)
        return {"finish_reason": FINISH[answer.stop_reason], "logprobs": logprobs}

    def _logprobs(self, tokens: tuple[str, ...], logprobs: list[float]) -> dict[str, Any]:
        """Return the texts of sampled tokens with their log-probabilities."""
        content = [
            {"token": token, "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in zip(tokens, logprobs, strict=True)
        ]
        return {"content": content}


class CompletionBody(RequestBody, kw_only=True, frozen=True):
    """Body of POST /v1/completions."""

    prompt: str | list[Any]
    logprobs: Annotated[int, Meta(ge=0, le=1)] | None = None
    """0 or 1: return the log-probabilities of the sampled tokens."""


class Completions(ChatCompletions):
    """POST /v1/completions."""

    request_type = CompletionBody
    id_prefix = "cmpl"
    object_name = "text_completion"
    chunk_name = "text_completion"
    first: ClassVar[dict[str, Any]] = {"text": ""}

    def read(self, body: CompletionBody) -> dict[str, Any]:
        prompt = body.prompt
        is_batch = isinstance(prompt, list) and len(prompt) == 1
        if is_batch and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        is_prompt = isinstance(prompt, str) or _is_ids(prompt)
        if not prompt or not is_prompt:
            raise ApiError(400, "prompt must be a text or a list of token ids: one in a request")
        return {
            "items": [],
            "prompt": prompt,
            "logprobs": body.logprobs is not None,
        }

    def _whole(self, answer: ParsedAnswer) -> dict[str, Any]:
        return {"text": answer.text}

    def _piece(self, delta: Delta, num_calls: int) -> dict[str, Any]:
        return {"text": delta.text}

    def _logprobs(self, tokens: tuple[str, ...], logprobs: list[float]) -> dict[str, Any]:
        ends = accumulate(map(len, tokens))
        offsets = [0, *ends][: len(tokens)]
        return {
            "tokens": tokens,
            "token_logprobs": logprobs,
            "top_logprobs": None,
            "text_offset": offsets,
        }


def _is_ids(prompt: object) -> bool:
    """Return whether a prompt is a list of token ids; JSON's true is none."""
    return isinstance(prompt, list) and all(type(token) is int for token in prompt)


def _call(call: ParsedCall) -> dict[str, Any]:
    return request_data.function_call(call.id, call.name, call.arguments)


def _usage(answers: list[ParsedAnswer]) -> dict[str, Any]:
    """Return the numbers of tokens of the answers to one prompt."""
    num_prompt = answers[0].prompt_tokens
    num_sampled = common.sampled(*answers)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
        "prompt_tokens_details": {"cached_tokens": answers[0].cached_tokens},
    }
