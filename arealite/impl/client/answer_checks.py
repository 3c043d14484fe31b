"""Checks of requests and answers that hold for every kind of server.

They are separate from the client, so that tests need no server.
"""

import math
from collections.abc import Collection
from functools import lru_cache

import numpy as np

from arealite.api.llm import LLMRequest, SamplingConfig
from arealite.api.server_protocol import ServerAnswer, adapter_of, version_text
from arealite.base.errors import (
    ContextOverflow,
    GenerationRefused,
    InvariantError,
    ServerUnavailable,
)
from arealite.base.model_folder import Experts


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


@lru_cache(maxsize=4096)
def parse_version(label: str | int | None) -> int:
    """Return a policy version; a label without one ("default": never updated) is version 0.

    None is version 0, too.
    """
    try:
        return int(version_text(label or 0))
    except ValueError:
        return 0


def token_versions(answer: ServerAnswer, acknowledged: int, *, adapter: str = "") -> list[int]:
    """Return the policy version of each output token.

    Without spans, all tokens get the version acknowledged before sending, or the version of the
    answer if that is lower: then the server restarted in between.

    Args:
        answer: The answer.
        acknowledged: The version that the server had reported.
        adapter: The adapter that the request named, which is this version; "" for none.

    Raises:
        InvariantError: the spans do not cover the output.
    """
    num_tokens = len(answer.output_ids)
    if adapter:
        return [acknowledged] * num_tokens
    if not answer.spans:
        newest = answer.newest_version
        version = acknowledged if newest is None else min(acknowledged, parse_version(newest))
        return [version] * num_tokens
    versions: list[int] = []
    for span in answer.spans:
        if span.start == len(versions):
            version = parse_version(span.version)
            versions += [version] * (span.end - span.start)
    if len(versions) != num_tokens:
        raise InvariantError(
            f"weight_versions {answer.spans} do not cover an output of {num_tokens} tokens"
        )
    return versions


def has_other_weights(answer: ServerAnswer, adapter: str) -> bool:
    """Return whether a server sampled from other weights than its version label says.

    Its label changed while the request was sent. An adapter belongs to the base weights, and a
    label without an adapter to whole weights.

    Args:
        answer: The answer.
        adapter: The adapter that the request named; "" for none.
    """
    labels = [span.version for span in answer.spans]
    if answer.newest_version is not None:
        labels.append(answer.newest_version)
    return any(bool(adapter_of(label)) != bool(adapter) for label in labels)


def routing(answer: ServerAnswer, experts: Experts, tokens: int) -> bytes:
    """Return the recorded experts of an answer, as in `LLMResponse.routing`; b"" without a record.

    Args:
        experts: numbers of the model.
        tokens: inputs that the record must cover.

    Raises:
        InvariantError: the record has another length, or numbers of experts that do not exist.
    """
    expert_ids = answer.expert_ids
    if expert_ids is None:
        return b""
    highest_id = int(expert_ids.max(initial=0))
    expected_length = tokens * experts.layers * experts.per_token
    has_length = len(expert_ids) == expected_length
    if answer.finish in (None, "abort") and not has_length:
        return b""  # the next answer has the record of all tokens
    if not has_length or highest_id >= experts.number:
        raise InvariantError(
            f"a server returned {len(expert_ids)} numbers of experts up to {highest_id}; "
            f"{expected_length} numbers below {experts.number} were expected."
        )
    return expert_ids.astype(f"<u{experts.width}").tobytes()


def prompt_logprobs(answer: ServerAnswer, request: LLMRequest) -> list[float]:
    """Return the logprobs of the prompt's tokens but the first one.

    Raises:
        GenerationRefused: the server returned none, or not one for each token.
    """
    num_scored = len(request.input_ids) - 1
    logprobs = answer.prompt_logprobs[:num_scored]
    if len(logprobs) < num_scored or any(map(math.isnan, logprobs)):
        raise GenerationRefused(
            f"{request.request_id}: the server returned {len(logprobs)} log-probabilities "
            f"of a prompt of {num_scored + 1} tokens; use another kind of server to score tokens."
        )
    return logprobs


def target_logprobs(answer: ServerAnswer, request: LLMRequest) -> bytes:
    """Return `LLMResponse.target_logprobs`; b"" if the request names no tokens.

    Raises:
        GenerationRefused: The server did not score these tokens.
    """
    if not request.target_ids:
        return b""
    scores_TK = answer.target_logprobs
    if scores_TK is None:
        rows = [{token: logprob for logprob, token, _ in row} for row in answer.target_rows]
        pairs = zip(request.target_ids, rows, strict=False)
        scores_TK = np.array([[row.get(token) for token in ids] for ids, row in pairs], float)
    is_target_TK = np.array(request.target_ids) >= 0
    if scores_TK.shape != is_target_TK.shape or np.isnan(scores_TK[is_target_TK]).any():
        raise GenerationRefused(
            f"{request.request_id}: the server did not score the tokens that the request names at "
            "each place of its prompt; use another kind of server to score them."
        )
    return np.where(is_target_TK, scores_TK, -np.inf).astype("<f4").tobytes()


def check_stream(request: LLMRequest, answer: ServerAnswer, *, is_withheld: bool) -> None:
    """Check that tokens of a stream, which the caller has already, can be in the response.

    Args:
        is_withheld: Whether the caller did not get the tokens.

    Raises:
        ServerUnavailable: their versions are unknown or too old.
    """
    if request.on_tokens is None or is_withheld or not answer.output_ids:
        return
    raise ServerUnavailable(
        f"{request.request_id}: a server streamed {len(answer.output_ids)} tokens "
        "whose versions are unknown or too old"
    )


def end_of_aborted(
    answer: ServerAnswer,
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
        if any(stop_string in answer.text for stop_string in sampling.stop):
            return "stop"
    return "length" if length >= sampling.max_new_tokens else None
