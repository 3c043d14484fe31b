"""vLLM's own HTTP routes for token ids, versions and load.

Tried against vLLM 0.32 on a CPU. Older versions do not report the version of each token.
"""

import io
import re
from base64 import b64decode
from collections.abc import Mapping

import msgspec
import numpy as np

from arealite.api.server_protocol import (
    GenerateRequest,
    Json,
    Load,
    ServerAnswer,
    ServerDescription,
    ServerProtocol,
    TopRow,
    VersionSpan,
    mismatch,
)
from arealite.base.errors import UserError

OLDEST_VERSION = (0, 32)
STREAM_INTERVAL = 8
"""Tokens per event of a stream after the first one."""
NEEDS_RESTART = "-2"
"""Version of a server that only a restart can repair."""
NO_LOGPROB = -9999.0
"""vLLM sends this number for a token without a log-probability, and in the place of NaN."""
ID_PREFIX = "generate-tokens-"
"""vLLM puts it before the ids of requests."""
INFO_PATH = "/server_info?config_format=json"
START_FLAGS = (
    "Start it with VLLM_SERVER_DEV_MODE=1, --enable-scale-out and "
    "--logprobs-mode processed_logprobs."
)
GAUGE = re.compile(rb"^vllm:num_requests_(running|waiting)\{[^}]*\} ([0-9.e+]+)$", re.MULTILINE)
"""Lines of /metrics with the load of one engine."""


class VLLMRequestBody(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A request to /inference/v1/generate."""

    request_id: str
    token_ids: list[int] | msgspec.Raw
    sampling_params: dict[str, object]
    stream: bool = False
    model: str = ""
    """Name of the adapter; "": the base model."""


class TokenLogprob(msgspec.Struct, kw_only=True):
    """A sampled token, or one of its most probable alternatives."""

    token_id: int
    logprob: float
    top_logprobs: list["TokenLogprob"] = []


class LogprobList(msgspec.Struct, kw_only=True):
    """The sampled tokens of an answer."""

    content: list[TokenLogprob] | None = None


class OutputChoice(msgspec.Struct, kw_only=True):
    """The output of a request, or its new tokens in an event of a stream."""

    token_ids: list[int] | None = None
    logprobs: LogprobList | None = None
    finish_reason: str | None = None
    weight_versions: list[VersionSpan] | None = None
    """The versions of all tokens; at the end of a stream."""
    routed_experts: str | None = None
    """base64 of an .npy file: integers [tokens - 1, layers, experts per token]."""


class PromptLogprob(msgspec.Struct, kw_only=True):
    """A token at a place of the prompt: the token itself, or one of the most probable ones."""

    logprob: float


PromptPlace = dict[int, PromptLogprob]
"""Scores by token id: first the token of the prompt itself, then the most probable tokens."""


class VLLMAnswerBody(msgspec.Struct, kw_only=True):
    """A response of /inference/v1/generate."""

    choices: list[OutputChoice]
    prompt_logprobs: list[PromptPlace | None] | None = None
    """For each token of the prompt; null for the first one."""
    prompt_token_id_logprobs: str | None = None
    """The scores of prompt_logprob_token_ids: a .npy file in base64."""


encode_body = msgspec.json.Encoder().encode
decode_body = msgspec.json.Decoder(VLLMAnswerBody).decode


class VLLMProtocol(ServerProtocol):
    """Requests and answers of vLLM servers."""

    generate_path = "/inference/v1/generate"
    version_path = "/weight_info"
    load_path = "/metrics"
    describe_paths = ("/version", "/v1/models", "/weight_info", INFO_PATH)
    streams_versions = False
    status_s = 30.0
    health_path = "/health"

    def encode_request(self, request: GenerateRequest) -> bytes:
        """Return the body. vLLM takes a parameter that is missing from the model's folder."""
        sampling = request.sampling
        sampling_params: dict[str, object] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": max(0, sampling.top_k),
            "min_p": sampling.min_p,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "max_tokens": sampling.max_new_tokens - request.num_sampled,
            "min_tokens": max(0, sampling.min_new_tokens - request.num_sampled),
            "stop": sampling.stop,
            "stop_token_ids": sampling.stop_token_ids,
            "ignore_eos": request.ignore_eos,
            "logprobs": request.num_top,
            "detokenize": bool(sampling.stop),
        }
        if request.is_stream:
            sampling_params["stream_interval"] = STREAM_INTERVAL
        if request.scores_prompt:
            sampling_params["prompt_logprobs"] = request.num_top
        if request.target_ids:
            sampling_params["prompt_logprob_token_ids"] = request.target_ids
        if request.with_routing:
            sampling_params["routed_experts_prompt_start"] = request.routing_start
        body = VLLMRequestBody(
            request_id=request.rid,
            token_ids=request.input_ids,
            sampling_params=sampling_params,
            stream=request.is_stream,
            model=request.adapter,
        )
        return encode_body(body)

    def decode_answer(self, raw: bytes, num_before: int | None = None) -> ServerAnswer:
        body = decode_body(raw)
        choices = body.choices
        if not choices:
            return ServerAnswer(output_ids=[], logprobs=[], num_tokens=num_before or 0)
        choice = choices[0]
        output_ids = choice.token_ids or []
        places = [place for place in body.prompt_logprobs or [] if place]
        spans = choice.weight_versions or []
        expert_ids = _array(choice.routed_experts)
        return ServerAnswer(
            output_ids=output_ids,
            logprobs=_logprobs(choice, output_ids),
            top_tokens=_top_tokens(choice),
            is_renormalized=True,
            spans=spans,
            newest_version=spans[-1].version if spans else None,
            finish=choice.finish_reason,
            num_retractions=max(0, len(spans) - 1),  # vLLM does not count them
            num_tokens=(num_before or 0) + len(output_ids),
            expert_ids=None if expert_ids is None else expert_ids.astype("<i4").ravel(),
            prompt_logprobs=[next(iter(place.values())).logprob for place in places],
            prompt_top_tokens=[
                [(token.logprob, token_id, None) for token_id, token in place.items()]
                for place in places
            ],
            target_logprobs=_array(body.prompt_token_id_logprobs),
        )

    def lacks_adapter(self, status: int, raw: bytes) -> bool:
        return status == 404

    def abort_request(self, rid: str) -> tuple[str, Json]:
        return "/inference/v1/abort_requests", {"request_ids": [ID_PREFIX + rid]}

    def relabel_request(self, version: str, *, abort: bool) -> tuple[str, Json]:
        """Return the request for another label; it aborts nothing."""
        return "/update_weight_version", {"new_version": version}

    def describe(self, answers: Mapping[str, Json]) -> ServerDescription | None:
        program_version = str(answers["/version"].get("version", ""))
        model = _first_model(answers["/v1/models"])
        if not program_version or model.get("owned_by") != "vllm":
            return None
        if version_numbers(program_version) < OLDEST_VERSION:
            raise UserError(
                f"it is vLLM {program_version}, which does not report the version of each token. "
                "Install vLLM 0.32 or newer."
            )
        config: Json = answers[INFO_PATH].get("vllm_config") or {}
        if "weight_version" not in answers["/weight_info"] or not config:
            raise UserError(f"it is vLLM without the routes for weights. {START_FLAGS}")
        model_config: Json = config.get("model_config") or {}
        version = answers["/weight_info"]["weight_version"]
        if version == NEEDS_RESTART:
            raise UserError("it is vLLM whose model a failed update has destroyed. Restart it.")
        logprobs_mode = model_config.get("logprobs_mode")
        if logprobs_mode != "processed_logprobs":
            raise UserError(
                f"it is vLLM with {logprobs_mode}, which are not the log-probabilities of its "
                f"sampler. {START_FLAGS}"
            )
        return ServerDescription(
            model_path=str(model.get("root") or ""),
            version=version,
            context_length=model.get("max_model_len"),
            start_id=config.get("instance_id"),
            dtype=str(model_config.get("dtype") or "").removeprefix("torch."),
            quantization=model_config.get("quantization"),
            serves_adapters=_serves_adapters(answers[INFO_PATH]),
        )

    def read_version(self, raw: bytes) -> str | int | None:
        return msgspec.json.decode(raw, type=Json).get("weight_version")

    def read_load(self, raw: bytes) -> Load | None:
        gauges = GAUGE.findall(raw)
        if not gauges:
            return None
        load = {"running": 0, "waiting": 0, "capacity": 0}
        for name, number in gauges:
            load[name.decode()] += int(float(number))
        return load


def _first_model(models: Json) -> Json:
    """Return the first model in an answer of /v1/models; {} without one."""
    data = models.get("data")
    model = data[0] if isinstance(data, list) and data else {}
    return model if isinstance(model, dict) else {}


def _serves_adapters(info: Json) -> bool:
    """Return whether vLLM loads LoRA adapters while it runs."""
    has_route: object = (info.get("vllm_env") or {}).get("VLLM_ALLOW_RUNTIME_LORA_UPDATING")
    return bool(has_route) and info["vllm_config"].get("lora_config") is not None


def _logprobs(choice: OutputChoice, output_ids: list[int]) -> list[float]:
    """Return the logprob of each token of a choice.

    Raises:
        InvariantError: ids and logprobs belong to different tokens, or a token has none.
    """
    content = (choice.logprobs and choice.logprobs.content) or []
    ids = [token.token_id for token in content]
    logprobs = [token.logprob for token in content]
    if ids != output_ids or NO_LOGPROB in logprobs:
        raise mismatch(len(output_ids), len(ids))
    return logprobs


def _top_tokens(choice: OutputChoice) -> list[TopRow]:
    """Return the most probable tokens that could be sampled, by position."""
    content = (choice.logprobs and choice.logprobs.content) or []
    return [
        [
            (top.logprob, top.token_id, None)
            for top in token.top_logprobs
            if top.logprob != NO_LOGPROB
        ]
        for token in content
    ]


def _array(encoded: str | None) -> np.ndarray | None:
    """Return an array that vLLM encoded; None without one."""
    if not encoded:
        return None
    file = io.BytesIO(b64decode(encoded))
    return np.load(file, allow_pickle=False)


def version_numbers(program_version: str) -> tuple[int, ...]:
    """Return the first two numbers of a program's version; a version without numbers is new."""
    numbers = re.findall(r"\d+", program_version)[:2]
    return tuple(map(int, numbers)) or OLDEST_VERSION
