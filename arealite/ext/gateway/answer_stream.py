"""Reads an answer while a server samples it."""

from typing import Any

import msgspec

from arealite.api.llm import LLMRequest
from arealite.impl.client.sglang_messages import (
    GenerateAnswer,
    Meta,
    Span,
    decode_answer,
    mismatch,
    parse_version,
)


class TokenStream:
    """Reads the server-sent events of one answer, which are cumulative or disjoint.

    It is a hook `answer_stream`.

    Each event has all tokens so far, or only new ones. `completion_tokens` shows how many are new.
    """

    failure: tuple[int, bytes] | None = None
    """Status and body of an event that is an error or malformed; later events are ignored."""
    answer: GenerateAnswer | None = None
    """The tokens so far, without a finish reason before the end; None without events."""

    def __init__(self, request: LLMRequest) -> None:
        self._request = request
        self._unparsed = b""
        self._ids: list[int] = []
        self._logprobs: list[tuple[float | None, int, Any]] = []
        """As in `Meta.output_token_logprobs`."""
        self._spans: list[Span] = []
        self._output_text = ""
        self._withholds = False
        """Whether the weights were too old for a token: the answer will be dropped, as
        `on_tokens` may not get tokens that are not in the response."""

    def feed(self, data: bytes) -> None:
        """Read complete events; pass their tokens to the request's `on_tokens`.

        Raises:
            InvariantError: ids and logprobs belong to different tokens.
        """
        *events, self._unparsed = (self._unparsed + data).split(b"\n\n")
        for event in events:
            raw = event.removeprefix(b"data: ")
            if self.failure is not None or raw == b"[DONE]":
                continue
            try:
                answer = decode_answer(raw)
            except msgspec.DecodeError:
                self.failure = _status(raw), raw
            else:
                self._add(answer)

    def _add(self, answer: GenerateAnswer) -> None:
        meta = answer.meta_info
        event_logprobs = meta.output_token_logprobs
        num_before = len(self._ids)
        total = meta.completion_tokens
        if total is None:
            total = len(event_logprobs)
        num_new = max(0, total - num_before)
        new_logprobs = event_logprobs[-num_new:] if num_new else []
        new_ids = [token_id for _, token_id, _ in new_logprobs]
        last_output_ids = answer.output_ids[-num_new:] if num_new else []
        if num_before + len(new_ids) != total or last_output_ids != new_ids:
            raise mismatch(total, num_before + len(event_logprobs))
        self._ids += new_ids
        self._logprobs += new_logprobs
        if self._request.sampling.stop:
            is_cumulative = len(event_logprobs) == total
            self._add_text(answer, is_cumulative)
        self._add_versions(meta, num_before, total)
        answer.output_ids = self._ids
        meta.output_token_logprobs = self._logprobs
        meta.weight_versions = self._spans or None
        self.answer = answer
        if new_ids and not self._withholds and self._request.on_tokens is not None:
            self._request.on_tokens(new_ids)

    def _add_text(self, answer: GenerateAnswer, is_cumulative: bool) -> None:
        """Set the text of an event to the text of all tokens so far."""
        event_text = msgspec.json.decode(answer.text, type=str)
        if is_cumulative:
            self._output_text = event_text
        else:
            self._output_text += event_text
        answer.text = msgspec.Raw(msgspec.json.encode(self._output_text))

    def _add_versions(self, meta: Meta, num_before: int, total: int) -> None:
        """Update the spans. An event without spans gives its version to its new tokens.

        This is exact: a server samples nothing between the pause and the end of an update, and
        tokens sampled before the pause arrive before the new version is set.
        """
        if meta.weight_versions:
            self._spans = meta.weight_versions
        elif meta.weight_version is not None and num_before < total:
            if not self._spans or self._spans[-1].version != meta.weight_version:
                span = Span(version=meta.weight_version, start=num_before, end=total)
                self._spans.append(span)
            self._spans[-1].end = total
        for span in self._spans:
            if parse_version(span.version) < self._request.min_version:
                self._withholds = True


def _status(event: bytes) -> int:
    """Return the HTTP status of an event that is no answer."""
    try:
        return msgspec.json.decode(event)["error"]["code"]
    except (msgspec.DecodeError, LookupError, TypeError):
        return 502
