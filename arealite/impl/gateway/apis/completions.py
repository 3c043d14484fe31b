"""OpenAI Completions: a text or tokens instead of messages."""

from __future__ import annotations

from itertools import accumulate
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from arealite.impl.gateway.apis.chat import ChatCompletions
from arealite.impl.gateway.apis.shared import Body
from arealite.impl.gateway.exchange import Answer, ApiError, Delta


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
        prompt, has_logprobs = body.prompt, body.logprobs is not None
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
