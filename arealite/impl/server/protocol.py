"""SGLang's request bodies, parsed, checked and turned into generations, and answers made of these.

The texts of refusals are SGLang's, so that a client cannot tell the servers apart; what would crash
SGLang (a token outside the vocabulary) is refused here.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from arealite.impl.server.generation import Generation, SamplingParams


class Refusal(Exception):
    """The request is wrong: status 400 with this text."""


class GenerateBody(msgspec.Struct, frozen=True):
    """POST /generate. Unknown fields are ignored, as SGLang does."""

    input_ids: list[int | list[int]] | None = None
    text: str | list[str] | None = None
    sampling_params: SamplingParams | list[SamplingParams] | None = None
    rid: str | list[str] | None = None
    return_logprob: bool = False
    logprob_start_len: int | None = None
    top_logprobs_num: int = 0
    stream: bool = False


class AbortBody(msgspec.Struct, frozen=True):
    """POST /abort_request."""

    rid: str | None = None
    abort_all: bool = False


class PauseBody(msgspec.Struct, frozen=True):
    """POST /pause_generation."""

    mode: str = "abort"


class UpdateBody(msgspec.Struct, frozen=True):
    """POST /update_weights_from_disk."""

    model_path: str
    load_format: str | None = None
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


class EmptyBody(msgspec.Struct, frozen=True):
    """A body nothing is read from."""


Body = TypeVar("Body", bound=msgspec.Struct)


def parse(raw: bytes, kind: type[Body]) -> Body:
    """Decode a request body.

    Raises:
        Refusal: no JSON, a wrong type, or an unknown sampling parameter.
    """
    try:
        return msgspec.json.decode(raw or b"{}", type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        text = str(error)
        if "unknown field" in text:
            name = text.split("`")[1]
            known = ", ".join(f"`{field}`" for field in SamplingParams.__struct_fields__)
            text = f"unknown field `{name}`, expected one of {known}"
        raise Refusal(text) from error


def wants_stream(raw: bytes) -> bool:
    """Tell whether a body that was refused asked for a stream: errors then come as events."""
    return b'"stream":true' in raw.replace(b" ", b"")


@dataclass(frozen=True)
class Limits:
    """What requests are checked against."""

    vocab_size: int
    context_length: int
    eos_token_ids: frozenset[int]
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int], bool], str]
    """(token ids, skip special tokens)"""


def generations_of(body: GenerateBody, limits: Limits) -> tuple[list[Generation], bool]:
    """Return a body's generations, and whether the answer is a list.

    Raises:
        Refusal: the request is wrong.
    """
    prompts, batched = _prompts(body, limits)
    rids = body.rid if isinstance(body.rid, list) else [body.rid] * len(prompts)
    params = body.sampling_params or SamplingParams()
    each = params if isinstance(params, list) else [params] * len(prompts)
    if len(rids) != len(prompts) or len(each) != len(prompts):
        raise Refusal("rid and sampling_params must have one item for each prompt.")
    if body.top_logprobs_num:
        raise Refusal("top_logprobs_num is not supported by the embedded server.")
    if isinstance(params, list) and not batched:
        raise Refusal("sampling_params must be one object for a single prompt.")
    generations: list[Generation] = []
    for prompt, sampling, rid in zip(prompts, each, rids, strict=True):
        _check_sampling(sampling)
        for copy in range(sampling.n):
            own = rid if rid is None or copy == 0 else f"{rid}-{copy}"
            generations.append(_generation(body, prompt, sampling=sampling, rid=own, limits=limits))
    if body.stream and len(generations) != 1:
        raise Refusal("stream takes one prompt and n=1 on the embedded server.")
    return generations, batched or len(generations) > 1


def _prompts(body: GenerateBody, limits: Limits) -> tuple[list[list[int]], bool]:
    ids = body.input_ids
    if ids is None and body.text is not None:
        if isinstance(body.text, str):
            return [limits.encode(body.text)], False
        return [limits.encode(text) for text in body.text], True
    if not ids:
        raise Refusal("Either text, input_ids or input_embeds should be provided.")
    if all(isinstance(item, int) for item in ids):
        return [ids], False  # type: ignore[list-item]
    if all(isinstance(item, list) for item in ids):
        return ids, True  # type: ignore[return-value]
    raise Refusal("input_ids must be a list of integers or a list of such lists.")


def _check_sampling(sampling: SamplingParams) -> None:
    """Refuse values outside their range, and what this server does not do."""
    new, least = sampling.max_new_tokens, sampling.min_new_tokens
    wrong = [
        (
            not math.isfinite(sampling.temperature) or sampling.temperature < 0,
            f"temperature must be a non-negative finite number, got {sampling.temperature}.",
        ),
        (not 0 < sampling.top_p <= 1, f"top_p must be in (0, 1], got {sampling.top_p}."),
        (
            sampling.top_k < 1 and sampling.top_k != -1,
            f"top_k must be -1 (disable) or at least 1, got {sampling.top_k}.",
        ),
        (new is not None and new < 0, f"max_new_tokens must be at least 0, got {new}."),
        (
            least < 0 or (new is not None and least > new),
            f"min_new_tokens must be in [0, max_new_tokens({new})], got {least}.",
        ),
        (not 1 <= sampling.n <= 1024, f"n must be in [1, 1024], got {sampling.n}."),
    ]
    for is_wrong, text in wrong:
        if is_wrong:
            raise Refusal(text)
    for name in _NEUTRAL:
        if getattr(sampling, name) != _NEUTRAL[name]:
            raise Refusal(f"{name} is not supported by the embedded server.")


_NEUTRAL = {
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    **dict.fromkeys(("stop_regex", "json_schema", "regex", "ebnf", "structural_tag", "logit_bias")),
}


def _generation(
    body: GenerateBody,
    prompt: list[int],
    *,
    sampling: SamplingParams,
    rid: str | None,
    limits: Limits,
) -> Generation:
    length, context = len(prompt), limits.context_length
    if not prompt:
        raise Refusal("The prompt is empty.")
    if length >= context:
        raise Refusal(
            f"The input ({length} tokens) is longer than the model's context length "
            f"({context} tokens)."
        )
    limit = context - length if sampling.max_new_tokens is None else sampling.max_new_tokens
    if length + limit > context:
        raise Refusal(
            f"Requested token count exceeds the model's maximum context length of {context} "
            f"tokens. You requested a total of {length + limit} tokens: {length} tokens from the "
            f"input messages and {limit} tokens for the completion."
        )
    stop_ids = sampling.stop_token_ids or []
    for name, ids in (("input_ids", prompt), ("stop_token_ids", stop_ids)):
        if ids and not 0 <= min(ids) <= max(ids) < limits.vocab_size:
            raise Refusal(f"{name} must lie in [0, {limits.vocab_size}), the model's vocabulary.")
    eos = frozenset() if sampling.ignore_eos else limits.eos_token_ids
    stop = [sampling.stop] if isinstance(sampling.stop, str) else sampling.stop or []
    start = -1 if body.logprob_start_len is None else body.logprob_start_len
    if not -1 <= start < length:
        raise Refusal(f"logprob_start_len must be in [-1, {length}), got {start}.")
    return Generation(
        rid=rid or uuid.uuid4().hex,
        prompt=prompt,
        sampling=sampling,
        limit=limit,
        stops=eos | frozenset(stop_ids),
        stop_strings=tuple(filter(None, stop)),
        decode=lambda ids: limits.decode(ids, sampling.skip_special_tokens),
        logprob_start=start if body.return_logprob else -1,
        stream=body.stream,
    )


def answer(
    generation: Generation, *, version: str, logprobs: bool, limits: Limits
) -> dict[str, Any]:
    """Make SGLang's answer of what a generation has so far."""
    finish = generation.finish  # read first: what follows is then at least as new
    length = min(len(generation.output), len(generation.logprobs))
    output = generation.output[:length]
    spans = generation.versions(version, length)
    meta: dict[str, Any] = {
        "id": generation.rid,
        "finish_reason": finish,
        "prompt_tokens": len(generation.prompt),
        "weight_version": spans[-1]["version"] if spans else version,
        "num_retractions": generation.retractions,
        "reasoning_tokens": 0,
        "completion_tokens": length,
        "cached_tokens": generation.cached_tokens,
        "weight_versions": spans,
        "cached_tokens_details": None,
        "dp_rank": None,
    }
    if logprobs:
        pairs = zip(generation.logprobs[:length], output, strict=True)
        start = max(0, generation.logprob_start)
        prompt = generation.prompt[start : start + len(generation.input_logprobs)]
        meta["input_token_logprobs"] = [
            [logprob, token, None]
            for logprob, token in zip(generation.input_logprobs, prompt, strict=True)
        ]
        meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs]
        meta["output_token_logprobs_length"] = length
    if finish is not None:
        now = time.time()
        meta["e2e_latency"] = now - generation.created
        meta["response_sent_to_client_ts"] = now
    return {
        "text": _text(generation.sampling, output, finish, limits),
        "output_ids": output,
        "meta_info": meta,
    }


def _text(
    sampling: SamplingParams, output: list[int], finish: dict[str, Any] | None, limits: Limits
) -> str:
    """Decode the output; what ended it is cut off, unless `no_stop_trim`."""
    matched = (finish or {}).get("matched")
    if isinstance(matched, int) and not sampling.no_stop_trim:
        output = output[:-1]
    text = limits.decode(output, sampling.skip_special_tokens)
    if isinstance(matched, str) and not sampling.no_stop_trim:
        text = text[: text.find(matched)] if matched in text else text
    return text
