"""Parses SGLang's request bodies into generations, and builds answers from generations.

Refusals have SGLang's texts where SGLang refuses the same. A token outside the vocabulary, which
crashes SGLang, is refused here.

With `top_logprobs_num`, all returned log-probabilities are those of the distribution that was
sampled from: under top_p, top_k or min_p only of kept tokens, renormalised, where SGLang returns
those of the whole vocabulary. `meta_info.is_renormalized` says so. A row has no token that cannot
be sampled. `input_token_logprobs` are at temperature 1, as SGLang's.
"""

import asyncio
import math
import uuid
from base64 import b64encode
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import msgspec
import numpy as np

from arealite.ext.embedded.generation import (
    Generation,
    Int32,
    NonNegative,
    SamplingParams,
    TopTokens,
)

MAX_SCORES = 2**26
"""Log-probabilities of a scored prompt: its tokens, times the vocabulary."""


class RequestRefused(Exception):
    """The request is wrong. It is answered with status 400 and this text."""


class GenerateBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /generate. Unknown fields are ignored, as SGLang does."""

    input_ids: list[Int32] | None = None
    sampling_params: SamplingParams | None = None
    rid: str | None = None
    lora_path: str | None = None
    """Name of the adapter to sample with; None: the server's default."""
    return_logprob: bool = False
    logprob_start_len: Int32 | None = None
    top_logprobs_num: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 0
    token_ids_logprob: list[Int32] = []
    stream: bool = False
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    return_routed_experts: bool = False
    routed_experts_start_len: NonNegative = 0


class AbortBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /abort_request."""

    rid: str | None = None
    abort_all: bool = False


# The bodies below are named as in SGLang's /openapi.json, from which a publisher reads the
# capabilities of a server.


class PauseGenerationReqInput(msgspec.Struct, frozen=True, kw_only=True):
    """POST /pause_generation."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class WeightUpdateBody(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of every body with new weights."""

    weight_version: str | None = None
    flush_cache: bool = True


class UpdateWeightFromDiskReqInput(WeightUpdateBody, frozen=True, kw_only=True):
    """POST /update_weights_from_disk."""

    model_path: str
    load_format: Literal["auto", "safetensors"] | None = None


class UpdateWeightsFromDistributedReqInput(WeightUpdateBody, frozen=True, kw_only=True):
    """POST /update_weights_from_distributed."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[Int32]]
    group_name: str = "weight_update_group"
    load_format: str | None = None
    """"flattened_bucket": one broadcast of all bytes."""


class LoadLoRAAdapterReqInput(msgspec.Struct, frozen=True, kw_only=True):
    """POST /load_lora_adapter. A loaded adapter of this name is replaced."""

    lora_name: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    lora_path: str
    weight_version: str = "default"
    """Version of the tokens that are sampled with this adapter."""


class UnloadLoRAAdapterReqInput(msgspec.Struct, frozen=True, kw_only=True):
    """POST /unload_lora_adapter."""

    lora_name: str


class InitWeightsUpdateGroupReqInput(msgspec.Struct, frozen=True, kw_only=True):
    """POST /init_weights_update_group."""

    master_address: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.:-]{1,253}\Z")]
    master_port: Annotated[int, msgspec.Meta(ge=1, lt=2**16)]
    rank_offset: Annotated[int, msgspec.Meta(ge=1, lt=2**16)]
    world_size: Annotated[int, msgspec.Meta(ge=2, lt=2**16)]
    group_name: str = "weight_update_group"
    backend: str = "nccl"


class DestroyWeightsUpdateGroupReqInput(msgspec.Struct, frozen=True, kw_only=True):
    """POST /destroy_weights_update_group."""

    group_name: str = "weight_update_group"


class UpdateWeightVersionReqInput(msgspec.Struct, frozen=True, kw_only=True):
    """POST /update_weight_version."""

    new_version: str
    abort_all_requests: bool = True


class Empty(msgspec.Struct, frozen=True, kw_only=True):
    """A POST without options."""


Handler = Callable[[Any], Awaitable[object]]
"""Takes a parsed body, whose type its parameter `body` is annotated with; returns a response, or a
value that is encoded as JSON."""


def body_of(handler: Handler) -> type[msgspec.Struct]:
    """Return the type of a handler's body."""
    return get_type_hints(handler)["body"]


def openapi(gets: Iterable[str], posts: Mapping[str, Handler]) -> dict[str, object]:
    """Describe the routes and the fields of the bodies."""
    body_types = map(body_of, posts.values())
    _, schemas = msgspec.json.schema_components(body_types)
    get_paths = {path: {"get": {}} for path in gets}
    post_paths = {path: {"post": {}} for path in posts}
    return {
        "openapi": "3.1.0",
        "paths": get_paths | post_paths,
        "components": {"schemas": schemas},
    }


Body = TypeVar("Body", bound=msgspec.Struct)


def parse(raw: bytes, kind: type[Body]) -> Body:
    """Decode a request body.

    Raises:
        RequestRefused: The body is no JSON, or has a wrong type, value or sampling parameter.
    """
    try:
        return msgspec.json.decode(raw or b"{}", type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        message = str(error)
        if "unknown field" in message:
            unknown_name = message.split("`")[1]
            names = ", ".join(f"`{name}`" for name in SamplingParams.__struct_fields__)
            message = f"unknown field `{unknown_name}`, expected one of {names}"
        raise RequestRefused(message) from error


@dataclass(kw_only=True)
class ServedModel:
    """Description of the served model, for checks of requests and for /model_info."""

    folder: str
    model_type: str
    architectures: list[str]
    vocab_size: int
    context_length: int
    eos_token_ids: frozenset[int]
    decode: Callable[[list[int], bool], str]
    """(token ids, skip special tokens)"""
    quantization: str | None = None
    version: str = "default"
    """The version of the last complete update, which /model_info reports. An update that could not
    flush the cache changes only the engine's version."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the version has changed."""
    adapters: dict[str, str] = field(default_factory=dict[str, str])
    """The version of each adapter that requests may name."""

    def relabel(self, version: str) -> None:
        """Report another version from now on."""
        self.version = version
        self.changed.set()


def generation_of(body: GenerateBody, model: ServedModel) -> Generation:
    """Make a generation from a request body.

    Raises:
        RequestRefused: The request is wrong.
    """
    prompt = body.input_ids
    sampling = body.sampling_params or SamplingParams()
    if not prompt or body.image_data or body.video_data or body.audio_data:
        raise RequestRefused(
            "Either text, input_ids or input_embeds should be provided. "
            "The embedded server takes input_ids only: no images, videos or audio."
        )
    _check_sampling(sampling)
    limit = _token_limit(len(prompt), sampling.max_new_tokens, model.context_length)
    stop_ids = sampling.stop_token_ids or []
    _check_vocabulary("input_ids", prompt, model.vocab_size)
    _check_vocabulary("stop_token_ids", stop_ids, model.vocab_size)
    _check_vocabulary("token_ids_logprob", body.token_ids_logprob, model.vocab_size)
    num_top = 0
    if body.return_logprob:
        num_top = min(body.top_logprobs_num, model.vocab_size)
    stops = frozenset[int]()
    if not sampling.ignore_eos:  # else stop_token_ids are ignored, too, as SGLang does
        stops = model.eos_token_ids | frozenset(stop_ids)
    return Generation(
        rid=body.rid or uuid.uuid4().hex,
        prompt=prompt,
        sampling=sampling,
        limit=limit,
        stops=stops,
        stop_strings=_stop_strings(sampling),
        adapter=_adapter(body, model),
        decode=lambda ids: model.decode(ids, sampling.skip_special_tokens),
        interval=(sampling.stream_interval or 1) if body.stream else 0,
        num_top=num_top,
        scored_from=_scored_from(body, len(prompt), model.vocab_size),
        target_ids=body.token_ids_logprob,
        wants_routing=body.return_routed_experts,
        routing_start=body.routed_experts_start_len,
    )


def _scored_from(body: GenerateBody, prompt_length: int, vocab_size: int) -> int | None:
    """Return the first position of the prompt whose later tokens are scored; None: no token is.

    Raises:
        RequestRefused: It is outside the prompt, or the prompt is too long.
    """
    begin = body.logprob_start_len
    if begin in (None, -1) or not body.return_logprob:
        return None
    if not 0 <= begin < prompt_length:
        raise RequestRefused(f"logprob_start_len must be in [0, {prompt_length}), got {begin}.")
    if prompt_length * vocab_size > MAX_SCORES:
        raise RequestRefused(
            f"logprob_start_len: the prompt has {prompt_length} tokens, but the embedded server "
            f"scores at most {MAX_SCORES // vocab_size} tokens of this vocabulary."
        )
    return begin


def _check_sampling(sampling: SamplingParams) -> None:
    """Check the ranges that the types of the fields do not express.

    Raises:
        RequestRefused: A parameter is out of its range.
    """
    if sampling.temperature < 0:
        raise RequestRefused(
            f"temperature must be a non-negative number, got {sampling.temperature}."
        )
    if sampling.top_k == 0:
        raise RequestRefused("top_k must be -1 (disable) or at least 1, got 0.")
    min_tokens = sampling.min_new_tokens
    max_tokens = sampling.max_new_tokens
    if max_tokens is not None and min_tokens > max_tokens:
        raise RequestRefused(
            f"min_new_tokens must be in [0, max_new_tokens({max_tokens})], got {min_tokens}."
        )


def _token_limit(prompt_length: int, max_new_tokens: int | None, context_length: int) -> int:
    """Return the number of tokens that a request may generate.

    Args:
        prompt_length: Tokens of the prompt.
        max_new_tokens: The requested limit; None: up to the model's context length.
        context_length: Tokens of prompt and output that the model allows.

    Raises:
        RequestRefused: The prompt, or prompt and limit together, exceed the context length.
    """
    if prompt_length >= context_length:
        raise RequestRefused(
            f"The input ({prompt_length} tokens) is longer than the model's context length "
            f"({context_length} tokens)."
        )
    if max_new_tokens is None:
        return context_length - prompt_length
    total = prompt_length + max_new_tokens
    if total > context_length:
        raise RequestRefused(
            "Requested token count exceeds the model's maximum context length of "
            f"{context_length} tokens. "
            f"You requested a total of {total} tokens: "
            f"{prompt_length} tokens from the input messages "
            f"and {max_new_tokens} tokens for the completion."
        )
    return max_new_tokens


def _check_vocabulary(field_name: str, ids: list[int], vocab_size: int) -> None:
    """Check that token ids are in the model's vocabulary.

    Raises:
        RequestRefused: One is not.
    """
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise RequestRefused(f"{field_name} must lie in [0, {vocab_size}), the model's vocabulary.")


def _adapter(body: GenerateBody, model: ServedModel) -> str:
    """Return the name of the adapter that a request names; "" without one.

    Raises:
        RequestRefused: No such adapter is loaded.
    """
    name = body.lora_path or ""
    if name and name not in model.adapters:
        raise RequestRefused(f"lora_path: no adapter '{name[:100]}' is loaded.")
    return name


def _stop_strings(sampling: SamplingParams) -> tuple[str, ...]:
    """Return the stop strings of a request without empty strings."""
    if isinstance(sampling.stop, str):
        return (sampling.stop,) if sampling.stop else ()
    return tuple(filter(None, sampling.stop or ()))


def answer(
    generation: Generation,
    *,
    version: str,
    logprobs: bool,
    start: int = 0,
    is_last: bool = True,
) -> dict[str, Any]:
    """Build SGLang's answer from a generation that ended, or one event of a stream.

    Args:
        generation: The generation. The engine may append tokens and spans meanwhile.
        version: The engine's present version, for an answer without tokens.
        logprobs: Whether to add log-probabilities.
        start: Number of tokens in the events before this one.
        is_last: Whether the generation has ended; only then the event has the text, all of it.
    """
    spans = generation.spans[:]
    end = 0
    if spans:
        version, _, end = spans[-1]
    output = generation.output[start:end]
    weight_versions = [
        {"version": span_version, "start": span_start, "end": span_end}
        for span_version, span_start, span_end in spans
    ]
    meta: dict[str, object] = {
        "id": generation.rid,
        "finish_reason": generation.finish if is_last else None,
        "prompt_tokens": len(generation.prompt),
        "weight_version": version,
        "weight_versions": weight_versions,
        "num_retractions": generation.retractions,
        "completion_tokens": end,
        "cached_tokens": generation.cached_tokens,
    }
    if logprobs:
        pairs = zip(generation.logprobs[start:end], output, strict=True)
        meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs]
        if generation.num_top:
            meta["output_top_logprobs"] = _entries(generation.top_tokens[start:end])
            meta["is_renormalized"] = True
        if is_last and generation.scored_from is not None:
            meta |= _prompt_scores(generation)
    if is_last and generation.routing:
        routing = np.concatenate(generation.routing)[generation.routing_start :]
        meta["routed_experts"] = b64encode(routing.tobytes()).decode()
    return {
        "text": _text(generation) if is_last else "",
        "output_ids": output,
        "meta_info": meta,
    }


def _prompt_scores(generation: Generation) -> dict[str, object]:
    """Return the scores of the prompt; the first position has none, as in SGLang."""
    scored_ids = generation.prompt[generation.scored_from :]
    logprobs = [None, *generation.prompt_logprobs]
    pairs = zip(logprobs, scored_ids, strict=True)
    scores: dict[str, object] = {
        "input_token_logprobs": [[logprob, token, None] for logprob, token in pairs]
    }
    if generation.num_top:
        rows = _entries(generation.prompt_top_tokens)
        scores["input_top_logprobs"] = [None, *rows]
    if generation.target_ids:
        target_rows: list[object] = [None]
        for logprobs_C in generation.target_logprobs:
            pairs = zip(logprobs_C, generation.target_ids, strict=True)
            target_rows.append([(logprob, token, None) for logprob, token in pairs])
        scores["input_token_ids_logprobs"] = target_rows
    return scores


def _entries(positions: list[TopTokens]) -> list[list[tuple[float, int, None]]]:
    """Return [logprob, id, null] of each token that can be sampled, by position."""
    entries = list[list[tuple[float, int, None]]]()
    for ids_K, logprobs_K in positions:
        pairs = zip(logprobs_K.tolist(), ids_K.tolist(), strict=True)
        entries.append(
            [
                (logprob, token, None)  # in SGLang, the third is the text
                for logprob, token in pairs
                if logprob > -math.inf
            ]
        )
    return entries


def _text(generation: Generation) -> str:
    """Decode the output without its stop token or stop string, unless `no_stop_trim`."""
    output_ids = generation.output
    finish = generation.finish or {}
    matched = finish.get("matched")
    if generation.sampling.no_stop_trim or matched is None:
        return generation.decode(output_ids)
    if isinstance(matched, int):  # a stop token
        return generation.decode(output_ids[:-1])
    before_stop, _, _ = generation.decode(output_ids).partition(matched)
    return before_stop
