"""The protocol of SGLang's /generate: requests, answers, and the logprob and version of each token.

It is separate from the client, so that tests of the protocol need no server.
"""

from base64 import b64decode
from collections.abc import Collection
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from arealite.api.llm import LLMRequest, SamplingConfig
from arealite.base.errors import ContextOverflow, GenerationRefused, InvariantError
from arealite.base.model_folder import Experts


class Body(msgspec.Struct):
    """A request. Filled by the client."""

    rid: str
    input_ids: list[int] | msgspec.Raw
    sampling_params: dict[str, object]
    return_logprob: bool = True
    stream: bool = False
    return_routed_experts: bool | msgspec.UnsetType = msgspec.UNSET
    routed_experts_start_len: int | msgspec.UnsetType = msgspec.UNSET


class FinishReason(msgspec.Struct):
    """Why a generation ended. Filled by the server."""

    type: str
    """"stop", "length" or "abort"."""
    status_code: int | None = None
    """Only with "abort", where the server gives a cause."""
    message: str | None = None


class Span(msgspec.Struct):
    """Tokens [start, end) of the output were sampled under `version`. Filled by the server."""

    version: str | int | None
    start: int
    end: int


class Meta(msgspec.Struct):
    """Metadata of the output. Filled by the server."""

    finish_reason: FinishReason | None
    """None before the end of a stream."""
    output_token_logprobs: list[tuple[float | None, int, Any]] = []
    """[logprob, token id, text or null] of each token."""
    weight_versions: list[Span] | None = None
    """None from servers older than SGLang 0.5.19."""
    weight_version: str | int | None = None
    """At the end of the request."""
    num_retractions: int | None = None
    total_retractions: int | None = None
    """The same count, under the name of SGLang before 0.5.19."""
    completion_tokens: int | None = None
    """Number of output tokens, also of those that earlier events of a stream had."""
    routed_experts: str | None = None
    """base64 of int32 [tokens, layers, experts per token]; only at the end of the request."""


class Answer(msgspec.Struct):
    """A response to /generate."""

    output_ids: list[int]
    meta_info: Meta
    text: msgspec.Raw = msgspec.Raw(b'""')
    """Left encoded: it is decoded only if the request has stop strings."""


STREAM_INTERVAL = 8
"""Tokens per event of a stream after the first one. SGLang repeats all tokens in each event, unless
it runs with --incremental-streaming-output."""

encode_body = msgspec.json.Encoder().encode
decode_answer = msgspec.json.Decoder(Answer).decode


def check_request(request: LLMRequest, vocab: int | None, context: int | None) -> None:
    """Refuse a request that could crash a server or get a wrong answer.

    Args:
        vocab: token ids that the server's model has; None: not checked.
        context: tokens of prompt and answer that the server allows; None: not checked.

    Raises:
        GenerationRefused: the prompt is empty, or a token id lies outside the vocabulary.
        ContextOverflow: prompt + budget exceed the server's context.
    """
    ids = request.input_ids
    if not ids:
        raise GenerationRefused(f"{request.request_id}: the prompt is empty")
    new = ids[request.known :]
    if vocab and new and (max(new) >= vocab or min(new) < 0):
        what = f"token ids span {min(new)} … {max(new)}, the model has {vocab}"
        why = "the tokenizer does not belong to the model"
        raise GenerationRefused(f"{request.request_id}: {what}; {why}.")
    if context and len(ids) + request.sampling.max_new_tokens > context:
        what = f"{len(ids)} prompt tokens + {request.sampling.max_new_tokens} new ones exceed"
        fix = f"the context of {context}; lower sampling.max_new_tokens."
        raise ContextOverflow(f"{request.request_id}: {what} {fix}", context - len(ids))


def sampling_params(config: SamplingConfig, used: int) -> dict[str, object]:
    """Return the parameters of a generation that has sampled `used` tokens already.

    Every parameter that changes the distribution is sent, because servers differ in defaults.
    """
    return vars(config) | {
        "ignore_eos": False,
        "max_new_tokens": config.max_new_tokens - used,
        "min_new_tokens": max(0, config.min_new_tokens - used),
    }


@lru_cache(maxsize=4096)
def parse_version(text: str | int | None) -> int:
    """Return a policy version; text that is no integer ("default": never updated) is version 0."""
    try:
        return int(text or 0)
    except ValueError:
        return 0


def token_logprobs(answer: Answer) -> list[float]:
    """Return the logprob of each output token.

    Raises:
        InvariantError: ids and logprobs belong to different tokens.
    """
    pairs = answer.meta_info.output_token_logprobs
    logprobs = [pair[0] for pair in pairs]
    if [pair[1] for pair in pairs] != answer.output_ids or None in logprobs:
        raise _mismatch(len(answer.output_ids), len(pairs))
    return logprobs  # type: ignore[return-value]


def _mismatch(tokens: int, logprobs: int) -> InvariantError:
    what = f"a server returned {tokens} tokens and {logprobs} logprobs that do not belong to them"
    return InvariantError(f"{what}; start it with logprobs enabled, or report it to its authors.")


def token_versions(answer: Answer, acknowledged: int) -> list[int]:
    """Return the policy version of each output token; `acknowledged` where there are no spans.

    Raises:
        InvariantError: the spans do not cover the output.
    """
    length = len(answer.output_ids)
    spans = answer.meta_info.weight_versions
    if not spans:
        return [acknowledged] * length
    versions: list[int] = []
    for span in spans:
        if span.start == len(versions):
            versions += [parse_version(span.version)] * (span.end - span.start)
    if len(versions) != length:
        raise InvariantError(f"weight_versions {spans} do not cover an output of {length} tokens")
    return versions


def routing(answer: Answer, experts: Experts | None, tokens: int) -> bytes:
    """Return the recorded experts of an answer, as in `LLMResponse.routing`; b"" without a record.

    Args:
        experts: numbers of the model; None: no record was requested.
        tokens: inputs that the record must cover.

    Raises:
        InvariantError: the record has another length, or numbers of experts that do not exist.
    """
    if experts is None or not answer.meta_info.routed_experts:
        return b""
    found = np.frombuffer(b64decode(answer.meta_info.routed_experts), "<i4")
    size = tokens * experts.layers * experts.per_token
    top = int(found.max(initial=0))
    finish = answer.meta_info.finish_reason
    if len(found) != size and (finish is None or finish.type == "abort"):
        return b""  # the next answer has the record of all tokens
    if len(found) != size or top >= experts.number:
        what = f"a server returned {len(found)} numbers of experts up to {top}"
        raise InvariantError(f"{what}; {size} numbers below {experts.number} were expected.")
    return found.astype(f"<u{experts.width}").tobytes()


def end_of_aborted(
    answer: Answer, sampling: SamplingConfig, length: int, eos: Collection[int]
) -> str | None:
    """Return the stop reason of an aborted output that was already complete; None otherwise.

    Args:
        length: number of tokens sampled so far, earlier answers included.
        eos: the model's end tokens.
    """
    if answer.output_ids and length > sampling.min_new_tokens:
        last = answer.output_ids[-1]
        text = msgspec.json.decode(answer.text, type=str) if sampling.stop else ""
        if last in {*eos, *sampling.stop_token_ids} or any(stop in text for stop in sampling.stop):
            return "stop"
    return "length" if length >= sampling.max_new_tokens else None


def error_message(status: int, raw: bytes) -> str:
    """Return the message of an error answer, in any of the formats that SGLang uses."""
    try:
        error = msgspec.json.decode(raw)
        for key in ("error", "message"):
            if isinstance(error, dict) and key in error:
                error = error[key]
    except msgspec.DecodeError:
        error = raw.decode(errors="replace")
    return f"HTTP {status}: {str(error)[:500]}"


class Stream:
    """Reads the server-sent events of one answer, which are cumulative or disjoint.

    Each event has all tokens so far, or only new ones. `completion_tokens` shows how many are new.
    """

    failure: tuple[int, bytes] | None = None
    """Status and body of an event that is an error or malformed; later events are ignored."""
    answer: Answer | None = None
    """The tokens so far, without a finish reason before the end; None without events."""

    def __init__(self, request: LLMRequest) -> None:
        self._request = request
        self._rest = b""
        self._ids: list[int] = []
        self._pairs: list[tuple[float | None, int, Any]] = []
        self._spans: list[Span] = []
        self._text = ""
        self._withholds = False
        """Whether the weights were too old for a token: the answer will be dropped, as
        `on_tokens` may not get tokens that are not in the response."""

    def feed(self, data: bytes) -> None:
        """Read complete events; pass their tokens to the request's `on_tokens`.

        Raises:
            InvariantError: ids and logprobs belong to different tokens.
        """
        *events, self._rest = (self._rest + data).split(b"\n\n")
        for event in events:
            text = event.removeprefix(b"data: ")
            if self.failure is None and text != b"[DONE]":
                try:
                    answer = decode_answer(text)
                except msgspec.DecodeError:
                    self.failure = _status(text), text
                else:
                    self._add(answer)

    def _add(self, answer: Answer) -> None:
        meta = answer.meta_info
        before = len(self._ids)
        pairs = meta.output_token_logprobs
        total = len(pairs) if meta.completion_tokens is None else meta.completion_tokens
        new = pairs[before - total :] if before < total else []
        ids = [pair[1] for pair in new]
        if before + len(ids) != total or answer.output_ids[-len(ids) :][: len(ids)] != ids:
            raise _mismatch(total, before + len(pairs))
        self._ids += ids
        self._pairs += new
        if self._request.sampling.stop:
            text = msgspec.json.decode(answer.text, type=str)
            self._text = text if len(pairs) == total else self._text + text
            answer.text = msgspec.Raw(msgspec.json.encode(self._text))
        self._add_versions(meta, before, total)
        answer.output_ids = self._ids
        meta.output_token_logprobs = self._pairs
        meta.weight_versions = self._spans or None
        self.answer = answer
        if ids and not self._withholds and self._request.on_tokens is not None:
            self._request.on_tokens(ids)

    def _add_versions(self, meta: Meta, before: int, total: int) -> None:
        """Update the spans. An event without spans gives its version to its new tokens.

        This is exact: a server samples nothing between the pause and the end of an update, and
        tokens sampled before the pause arrive before the new version is set.
        """
        if meta.weight_versions:
            self._spans = meta.weight_versions
        elif meta.weight_version is not None and before < total:
            if not self._spans or self._spans[-1].version != meta.weight_version:
                self._spans.append(Span(meta.weight_version, before, total))
            self._spans[-1].end = total
        oldest = self._request.min_version
        self._withholds |= any(parse_version(span.version) < oldest for span in self._spans)


def _status(event: bytes) -> int:
    """Return the HTTP status of an event that is no answer."""
    try:
        return msgspec.json.decode(event)["error"]["code"]
    except (msgspec.DecodeError, LookupError, TypeError):
        return 502
