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


class GenerateRequest(msgspec.Struct, kw_only=True):
    """A request. Filled by the client."""

    rid: str
    input_ids: list[int] | msgspec.Raw
    sampling_params: dict[str, object]
    return_logprob: bool = True
    stream: bool = False
    return_routed_experts: bool | msgspec.UnsetType = msgspec.UNSET
    routed_experts_start_len: int | msgspec.UnsetType = msgspec.UNSET


class FinishReason(msgspec.Struct, kw_only=True):
    """Why a generation ended. Filled by the server."""

    type: str
    """"stop", "length" or "abort"."""
    status_code: int | None = None
    """Only with "abort", where the server gives a cause."""
    message: str | None = None


class Span(msgspec.Struct, kw_only=True):
    """Tokens [start, end) of the output were sampled under `version`. Filled by the server."""

    version: str | int | None
    start: int
    end: int


class Meta(msgspec.Struct, kw_only=True):
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


class GenerateAnswer(msgspec.Struct, kw_only=True):
    """A response to /generate."""

    output_ids: list[int]
    meta_info: Meta
    text: msgspec.Raw = msgspec.Raw(b'""')
    """Left encoded: it is decoded only if the request has stop strings."""


STREAM_INTERVAL = 8
"""Tokens per event of a stream after the first one. SGLang repeats all tokens in each event, unless
it runs with --incremental-streaming-output."""

encode_body = msgspec.json.Encoder().encode
decode_answer = msgspec.json.Decoder(GenerateAnswer).decode


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
    unchecked_ids = ids[request.num_known_tokens :]
    if vocab and unchecked_ids:
        lowest = min(unchecked_ids)
        highest = max(unchecked_ids)
        if lowest < 0 or highest >= vocab:
            raise GenerationRefused(
                f"{request.request_id}: token ids span {lowest} … {highest}, "
                f"the model has {vocab}; the tokenizer does not belong to the model."
            )
    max_new_tokens = request.sampling.max_new_tokens
    if context and len(ids) + max_new_tokens > context:
        raise ContextOverflow(
            f"{request.request_id}: {len(ids)} prompt tokens + {max_new_tokens} new ones exceed "
            f"the context of {context}; lower sampling.max_new_tokens.",
            context - len(ids),
        )


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
def parse_version(label: str | int | None) -> int:
    """Return a policy version; a label that is no integer ("default": never updated) is version 0.

    None is version 0, too.
    """
    try:
        return int(label or 0)
    except ValueError:
        return 0


def token_logprobs(answer: GenerateAnswer) -> list[float]:
    """Return the logprob of each output token.

    Raises:
        InvariantError: ids and logprobs belong to different tokens.
    """
    entries = answer.meta_info.output_token_logprobs
    ids = [token_id for _, token_id, _ in entries]
    logprobs = [logprob for logprob, _, _ in entries]
    if ids != answer.output_ids or None in logprobs:
        raise _mismatch(len(answer.output_ids), len(ids))
    return logprobs  # type: ignore[return-value]


def _mismatch(num_tokens: int, num_logprobs: int) -> InvariantError:
    return InvariantError(
        f"a server returned {num_tokens} tokens and {num_logprobs} logprobs "
        "that do not belong to them; "
        "start it with logprobs enabled, or report it to its authors."
    )


def token_versions(answer: GenerateAnswer, acknowledged: int) -> list[int]:
    """Return the policy version of each output token; `acknowledged` where there are no spans.

    Raises:
        InvariantError: the spans do not cover the output.
    """
    num_tokens = len(answer.output_ids)
    spans = answer.meta_info.weight_versions
    if not spans:
        return [acknowledged] * num_tokens
    versions: list[int] = []
    for span in spans:
        if span.start == len(versions):
            version = parse_version(span.version)
            versions += [version] * (span.end - span.start)
    if len(versions) != num_tokens:
        raise InvariantError(
            f"weight_versions {spans} do not cover an output of {num_tokens} tokens"
        )
    return versions


def routing(answer: GenerateAnswer, experts: Experts | None, tokens: int) -> bytes:
    """Return the recorded experts of an answer, as in `LLMResponse.routing`; b"" without a record.

    Args:
        experts: numbers of the model; None: no record was requested.
        tokens: inputs that the record must cover.

    Raises:
        InvariantError: the record has another length, or numbers of experts that do not exist.
    """
    if experts is None or not answer.meta_info.routed_experts:
        return b""
    expert_ids = np.frombuffer(b64decode(answer.meta_info.routed_experts), "<i4")
    highest_id = int(expert_ids.max(initial=0))
    expected_length = tokens * experts.layers * experts.per_token
    has_length = len(expert_ids) == expected_length
    finish = answer.meta_info.finish_reason
    is_unfinished = finish is None or finish.type == "abort"
    if is_unfinished and not has_length:
        return b""  # the next answer has the record of all tokens
    if not has_length or highest_id >= experts.number:
        raise InvariantError(
            f"a server returned {len(expert_ids)} numbers of experts up to {highest_id}; "
            f"{expected_length} numbers below {experts.number} were expected."
        )
    return expert_ids.astype(f"<u{experts.width}").tobytes()


def end_of_aborted(
    answer: GenerateAnswer,
    sampling: SamplingConfig,
    length: int,
    eos: Collection[int],
) -> str | None:
    """Return the stop reason of an aborted output that was already complete; None otherwise.

    Args:
        length: number of tokens sampled so far, earlier answers included.
        eos: the model's end tokens.
    """
    if answer.output_ids and length > sampling.min_new_tokens:
        if answer.output_ids[-1] in {*eos, *sampling.stop_token_ids}:
            return "stop"
        if sampling.stop:
            output_text = msgspec.json.decode(answer.text, type=str)
            if any(stop_string in output_text for stop_string in sampling.stop):
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
            raise _mismatch(total, num_before + len(event_logprobs))
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
