"""The protocol of SGLang's /generate: requests, answers, and the logprob and version of each token.

It is separate from the client, so that tests of the protocol need no server.
"""

from base64 import b64decode
from collections.abc import Collection
from functools import lru_cache
from typing import Any, Protocol

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
        raise mismatch(len(answer.output_ids), len(ids))
    return logprobs  # type: ignore[return-value]


def mismatch(num_tokens: int, num_logprobs: int) -> InvariantError:
    """Return the error for ids and logprobs of different tokens."""
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


class AnswerStream(Protocol):
    """Reads the events of one streamed answer (hook `answer_stream`)."""

    @property
    def failure(self) -> tuple[int, bytes] | None:
        """Status and body of an event that is an error or malformed."""
        ...

    @property
    def answer(self) -> GenerateAnswer | None:
        """The tokens so far, without a finish reason before the end; None without events."""
        ...

    def feed(self, data: bytes) -> None:
        """Read bytes of the answer; pass their tokens to the request's `on_tokens`.

        Raises:
            InvariantError: ids and logprobs belong to different tokens.
        """
        ...
