"""SGLang's native HTTP protocol, which the embedded server speaks, too.

Checked against SGLang 0.5.9 to 0.5.23.
"""

import math
from base64 import b64decode
from collections.abc import Mapping
from itertools import chain

import msgspec
import numpy as np

from arealite.api.server_protocol import (
    GenerateRequest,
    Json,
    Load,
    ServerAnswer,
    ServerDescription,
    ServerProtocol,
    TokenScore,
    TopRow,
    VersionSpan,
    mismatch,
)
from arealite.ext.sglang.sglang_api import context_length, total_load
from arealite.ext.sglang.sglang_capabilities import serves_adapters

STREAM_INTERVAL = 8
"""Tokens per event of a stream after the first one. SGLang repeats all tokens in each event, unless
it runs with --incremental-streaming-output."""


class SGLangRequestBody(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A request to /generate. Without a field, the server behaves as with its default here."""

    rid: str
    input_ids: list[int] | msgspec.Raw
    sampling_params: dict[str, object]
    return_logprob: bool = False
    top_logprobs_num: int = 0
    stream: bool = False
    logprob_start_len: int = -1
    token_ids_logprob: list[int] = []
    """Further tokens whose scores are returned at each place."""
    return_routed_experts: bool = False
    routed_experts_start_len: int = 0
    lora_path: str = ""
    """Name of the adapter."""


class FinishReason(msgspec.Struct, kw_only=True):
    """Why a generation ended."""

    type: str
    """"stop", "length" or "abort"."""
    status_code: int | None = None
    """Only with "abort", where the server gives a cause."""
    message: str | None = None


class Meta(msgspec.Struct, kw_only=True):
    """Metadata of the output."""

    finish_reason: FinishReason | None
    """None before the end of a stream."""
    output_token_logprobs: list[TokenScore] = []
    """The score of each sampled token."""
    output_top_logprobs: list[TopRow] | None = None
    is_renormalized: bool = False
    """Reported by the embedded server."""
    input_token_logprobs: list[TokenScore] = []
    """The score of each token of the prompt, with logprob_start_len=0."""
    input_top_logprobs: list[TopRow | None] = []
    """The scores of the most probable tokens at each place of the prompt."""
    input_token_ids_logprobs: list[TopRow | None] = []
    """The scores of the tokens of token_ids_logprob."""
    weight_versions: list[VersionSpan] | None = None
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


class SGLangAnswerBody(msgspec.Struct, kw_only=True):
    """A response of /generate."""

    output_ids: list[int]
    meta_info: Meta
    text: str | None = None


encode_body = msgspec.json.Encoder().encode
decode_body = msgspec.json.Decoder(SGLangAnswerBody).decode


class SGLangProtocol(ServerProtocol):
    """Requests and answers of SGLang servers and embedded servers."""

    generate_path = "/generate"
    version_path = "/model_info"
    load_path = "/v1/loads?include=core"
    describe_paths = ("/model_info", "/server_info", "/v1/models")
    streams_versions = True

    def encode_request(self, request: GenerateRequest) -> bytes:
        sampling = request.sampling
        sampling_params = vars(sampling) | {
            "ignore_eos": request.ignore_eos,
            "max_new_tokens": sampling.max_new_tokens - request.num_sampled,
            "min_new_tokens": max(0, sampling.min_new_tokens - request.num_sampled),
        }
        del sampling_params["top_logprobs"]
        if request.is_stream:
            sampling_params["stream_interval"] = STREAM_INTERVAL
        if request.seed is not None:
            sampling_params["sampling_seed"] = request.seed
        body = SGLangRequestBody(
            rid=request.rid,
            input_ids=request.input_ids,
            sampling_params=sampling_params,
            return_logprob=True,
            top_logprobs_num=request.num_top,
            stream=request.is_stream,
            logprob_start_len=0 if request.scores_prompt else -1,
            token_ids_logprob=sorted({*chain.from_iterable(request.target_ids)} - {-1}),
            return_routed_experts=request.with_routing,
            routed_experts_start_len=request.routing_start if request.with_routing else 0,
            lora_path=request.adapter,
        )
        return encode_body(body)

    def decode_answer(self, raw: bytes, num_before: int | None = None) -> ServerAnswer:
        body = decode_body(raw)
        meta = body.meta_info
        num_tokens = len(body.output_ids)
        is_whole_text = True
        if num_before is not None:
            num_event_tokens = len(meta.output_token_logprobs)
            num_tokens = num_event_tokens
            if meta.completion_tokens is not None:
                num_tokens = meta.completion_tokens
            is_whole_text = num_event_tokens == num_tokens
            _cut_earlier(body, num_before, num_tokens)
        finish = meta.finish_reason
        status = (finish and finish.status_code) or 0
        return ServerAnswer(
            output_ids=body.output_ids,
            logprobs=_logprobs(body),
            top_tokens=meta.output_top_logprobs,
            is_renormalized=meta.is_renormalized,
            spans=meta.weight_versions or [],
            newest_version=meta.weight_version,
            finish=finish and finish.type,
            finish_message=finish and finish.message,
            is_refusal=400 <= status < 500,
            num_retractions=meta.num_retractions or meta.total_retractions or 0,
            num_tokens=num_tokens,
            text=body.text or "",
            is_whole_text=is_whole_text,
            expert_ids=_expert_ids(meta.routed_experts),
            prompt_logprobs=_scores(meta.input_token_logprobs[1:]),
            prompt_top_tokens=[row or [] for row in meta.input_top_logprobs[1:]],
            target_rows=[row or [] for row in meta.input_token_ids_logprobs[1:]],
        )

    def lacks_adapter(self, status: int, raw: bytes) -> bool:
        return status == 400 and b"adapter" in raw

    def abort_request(self, rid: str) -> tuple[str, Json]:
        return "/abort_request", {"rid": rid}

    def relabel_request(self, version: str, *, abort: bool) -> tuple[str, Json]:
        body = {
            "new_version": version,
            "abort_all_requests": abort,
        }
        return "/update_weight_version", body

    def describe(self, answers: Mapping[str, Json]) -> ServerDescription | None:
        model_info = answers["/model_info"]
        server_info = answers["/server_info"]
        if "model_path" not in model_info or "weight_version" not in model_info:
            return None
        return ServerDescription(
            # An update changes model_path.
            model_path=model_info.get("tokenizer_path") or model_info["model_path"],
            version=model_info["weight_version"],
            context_length=context_length(server_info, answers["/v1/models"]),
            model_type=model_info.get("model_type"),
            architectures=model_info.get("architectures"),
            start_id=_start_id(server_info),
            dtype=server_info.get("dtype"),
            quantization=server_info.get("quantization"),
            serves_adapters=serves_adapters(server_info),
        )

    def read_version(self, raw: bytes) -> str | int | None:
        return msgspec.json.decode(raw, type=Json).get("weight_version")

    def read_load(self, raw: bytes) -> Load | None:
        return total_load(msgspec.json.decode(raw, type=Json))


def _logprobs(body: SGLangAnswerBody) -> list[float]:
    """Return the logprob of each output token.

    Raises:
        InvariantError: ids and logprobs belong to different tokens.
    """
    entries = body.meta_info.output_token_logprobs
    ids = [token_id for _, token_id, _ in entries]
    logprobs = [logprob for logprob, _, _ in entries]
    if ids != body.output_ids or None in logprobs:
        raise mismatch(len(body.output_ids), len(ids))
    return logprobs  # type: ignore[return-value]


def _scores(scores: TopRow) -> list[float]:
    """Return the logprobs; NaN where SGLang has none."""
    return [math.nan if logprob is None else logprob for logprob, _, _ in scores]


def _cut_earlier(body: SGLangAnswerBody, num_before: int, num_tokens: int) -> None:
    """Remove the tokens that earlier events of a stream had.

    Args:
        body: An event.
        num_before: Tokens of earlier events.
        num_tokens: Tokens so far, with those of this event.

    Raises:
        InvariantError: the event lacks some new tokens.
    """
    meta = body.meta_info
    num_logprobs = len(meta.output_token_logprobs)
    num_new = max(0, num_tokens - num_before)
    if num_new > num_logprobs:
        raise mismatch(num_tokens, num_before + num_logprobs)
    del body.output_ids[: max(0, len(body.output_ids) - num_new)]
    del meta.output_token_logprobs[: num_logprobs - num_new]
    if meta.output_top_logprobs is not None:
        del meta.output_top_logprobs[: num_logprobs - num_new]


def _expert_ids(routed_experts: str | None) -> np.ndarray | None:
    """Return the recorded experts; None without a record."""
    if not routed_experts:
        return None
    return np.frombuffer(b64decode(routed_experts), "<i4")


def _start_id(server_info: Json) -> str | None:
    """Return numbers that a server draws or measures at its start; None if it reports none."""
    startup_times = server_info.get("startup_time")
    if not isinstance(startup_times, dict):
        startup_times = {}
    numbers = [server_info.get("random_seed"), startup_times.get("tokenizer_e2e")]
    if not any(numbers):
        return None
    return "/".join(map(str, numbers))
