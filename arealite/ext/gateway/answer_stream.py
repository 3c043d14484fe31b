"""Reads an answer while a server samples it."""

import msgspec

from arealite.api.llm import LLMRequest
from arealite.api.server_protocol import (
    ServerAnswer,
    ServerProtocol,
    TopRow,
    VersionSpan,
    mismatch,
)
from arealite.impl.client.answer_checks import parse_version


class TokenStream:
    """Reads the server-sent events of one answer. It is a hook `answer_stream`."""

    failure: tuple[int, bytes] | None = None
    """Status and body of an event that is an error or malformed; later events are ignored."""
    answer: ServerAnswer | None = None
    """The tokens so far, without a finish reason before the end; None without events."""

    def __init__(self, request: LLMRequest, protocol: ServerProtocol) -> None:
        self._request = request
        self._protocol = protocol
        self._unparsed = b""
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._top_tokens: list[TopRow] = []
        self._spans: list[VersionSpan] = []
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
        for event_bytes in events:
            raw = event_bytes.removeprefix(b"data: ")
            if self.failure is not None or raw == b"[DONE]":
                continue
            try:
                event = self._protocol.decode_answer(raw, len(self._ids))
            except msgspec.DecodeError:
                self.failure = _status(raw), raw
            else:
                self._add(event)

    def _add(self, event: ServerAnswer) -> None:
        """Add the new tokens of an event, and make it the answer so far."""
        num_before = len(self._ids)
        new_ids = event.output_ids
        self._ids += new_ids
        self._logprobs += event.logprobs
        self._top_tokens += event.top_tokens or []
        if len(self._ids) < event.num_tokens:
            raise mismatch(event.num_tokens, len(self._ids))
        if event.is_whole_text:
            self._output_text = event.text
        else:
            self._output_text += event.text
        self._add_versions(event, num_before)
        event.output_ids = self._ids
        event.logprobs = self._logprobs
        event.top_tokens = self._top_tokens
        event.spans = self._spans
        event.text = self._output_text
        self.answer = event
        if new_ids and not self._withholds and self._request.on_tokens is not None:
            self._request.on_tokens(new_ids)

    def _add_versions(self, event: ServerAnswer, num_before: int) -> None:
        """Update the spans. An event without spans gives its version to its new tokens.

        This is exact: a server samples nothing between the pause and the end of an update, and
        tokens sampled before the pause arrive before the new version is set.
        """
        num_tokens = len(self._ids)
        version = event.newest_version
        if event.spans:
            self._spans = event.spans
        elif version is not None and num_before < num_tokens:
            if not self._spans or self._spans[-1].version != version:
                span = VersionSpan(version=version, start=num_before, end=num_tokens)
                self._spans.append(span)
            self._spans[-1].end = num_tokens
        for span in self._spans:
            if parse_version(span.version) < self._request.min_version:
                self._withholds = True


def _status(event: bytes) -> int:
    """Return the HTTP status of an event that is no answer."""
    try:
        return msgspec.json.decode(event)["error"]["code"]
    except (msgspec.DecodeError, LookupError, TypeError):
        return 502
