"""Makes the record of the most probable tokens from the rows of a server's answer.

The record has the probabilities of the distribution that was sampled from. A server that reports
those of the whole vocabulary shows which tokens top_p, top_k and min_p have kept if its row reaches
beyond them. A row that does not, or whose end is a tie, gets no tokens: its set is unknown.

Shape letters: N = sampled tokens, W = tokens of a server's row, K = recorded tokens.
"""

from typing import NamedTuple

import numpy as np

from arealite.api.llm import LLMResponse, SamplingConfig
from arealite.api.server_protocol import ServerAnswer, TopRow
from arealite.base.errors import InvariantError

ROUNDING = 1e-5
"""Difference between probabilities, relative or absolute, in which a server's order is unknown."""
TOLERANCE = 1e-3
"""Largest difference between two reports of one log-probability."""
LOWEST = -9000.0
"""Servers report a lower log-probability, or none, for a token that cannot be sampled."""


class TopRecord(NamedTuple):
    """The record of an answer, as in `LLMResponse`."""

    ids: bytes
    logprobs: bytes
    sampled_logprobs: list[float]


def num_requested(sampling: SamplingConfig, vocab_size: int | None) -> int:
    """Return how many tokens a server is asked for: one more than is recorded.

    It shows where the kept tokens end, and vLLM counts the sampled token as one of them.
    """
    if not sampling.top_logprobs:
        return 0
    num_tokens = sampling.top_logprobs + 1
    return min(num_tokens, vocab_size or num_tokens)


def resumed_record(response: LLMResponse, num_top: int) -> tuple[bytes, bytes]:
    """Return `top_ids` and `top_logprobs` of earlier tokens; rows without tokens if they have
    none, or others than now."""
    num_numbers = num_top * len(response.output_ids)
    if len(response.top_ids) == len(response.top_logprobs) == 4 * num_numbers:
        return response.top_ids, response.top_logprobs
    ids = np.full(num_numbers, -1, "<i4")
    logprobs = np.full(num_numbers, -np.inf, "<f4")
    return ids.tobytes(), logprobs.tobytes()


def top_record(answer: ServerAnswer, sampling: SamplingConfig, vocab_size: int | None) -> TopRecord:
    """Return the record of an answer.

    Raises:
        InvariantError: The server reports no such tokens, or they contradict the sampled ones.
    """
    num_tokens = len(answer.output_ids)
    rows = answer.top_tokens or []
    if len(rows) != num_tokens:
        raise InvariantError(
            f"a server returned {num_tokens} tokens and the most probable tokens of {len(rows)}. "
            "Use a server that reports them, or set collector.sampling.top_logprobs=0."
        )
    num_top = sampling.top_logprobs
    ids_NW, logprobs_NW = _table(rows, min_width=num_top)
    sampled_N1 = np.array(answer.logprobs)[:, None]
    is_sampled_NW = ids_NW == np.array(answer.output_ids, int)[:, None]
    _check(ids_NW, logprobs_NW - sampled_N1, is_sampled_NW, vocab_size)
    if sampling.truncates and not answer.is_renormalized:
        is_kept_NW = _kept(logprobs_NW, sampling)
        is_kept_NW &= (is_kept_NW & is_sampled_NW).any(1, keepdims=True)
        kept_mass_N1 = np.exp(logprobs_NW).sum(1, keepdims=True, where=is_kept_NW)
        kept_mass_N1[kept_mass_N1 == 0] = 1.0
        ids_NW = np.where(is_kept_NW, ids_NW, -1)
        logprobs_NW = np.where(is_kept_NW, logprobs_NW - np.log(kept_mass_N1), -np.inf)
        sampled_N1 = sampled_N1 - np.log(kept_mass_N1)
    return TopRecord(
        ids=ids_NW[:, :num_top].astype("<i4").tobytes(),
        logprobs=logprobs_NW[:, :num_top].astype("<f4").tobytes(),
        sampled_logprobs=sampled_N1[:, 0].tolist(),
    )


def _table(rows: list[TopRow], *, min_width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and log-probabilities [N, W] by falling probability; -1 and -inf: no token."""
    lengths_N = np.array([len(row) for row in rows], int)
    width = max(min_width, lengths_N.max(initial=0))
    has_entry_NW = np.arange(width) < lengths_N[:, None]
    entries = [entry for row in rows for entry in row]
    ids_NW = np.full(has_entry_NW.shape, -1)
    logprobs_NW = np.full(has_entry_NW.shape, -np.inf)
    ids_NW[has_entry_NW] = [token for _, token, _ in entries]
    logprobs_NW[has_entry_NW] = np.array([logprob for logprob, _, _ in entries], float)
    can_sample_NW = logprobs_NW > LOWEST
    ids_NW[~can_sample_NW] = -1
    logprobs_NW[~can_sample_NW] = -np.inf
    order_NW = np.argsort(-logprobs_NW, axis=1, kind="stable")
    sorted_ids_NW = np.take_along_axis(ids_NW, order_NW, axis=1)
    sorted_logprobs_NW = np.take_along_axis(logprobs_NW, order_NW, axis=1)
    return sorted_ids_NW, sorted_logprobs_NW


def _check(
    ids_NW: np.ndarray,
    above_sampled_NW: np.ndarray,
    is_sampled_NW: np.ndarray,
    vocab_size: int | None,
) -> None:
    """Compare the rows with the vocabulary and with the sampled tokens.

    Args:
        ids_NW: The tokens.
        above_sampled_NW: Their log-probabilities, less that of the sampled token.
        is_sampled_NW: Whether they are the sampled token.
        vocab_size: Number of token ids; None: not checked.

    Raises:
        InvariantError: They contradict each other.
    """
    is_wrong_NW = is_sampled_NW & (np.abs(above_sampled_NW) > TOLERANCE)
    highest_id = int(ids_NW.max(initial=0))
    if is_wrong_NW.any() or (vocab_size and highest_id >= vocab_size):
        raise InvariantError(
            f"a server returned most probable tokens up to id {highest_id}, of which "
            f"{np.count_nonzero(is_wrong_NW)} have another logprob than as sampled tokens. "
            "Set collector.sampling.top_logprobs=0, or report it to the server's authors."
        )


def _kept(logprobs_NW: np.ndarray, sampling: SamplingConfig) -> np.ndarray:
    """Return which tokens the options keep, by SGLang's rules [N, W]; none where that is unknown.

    SGLang applies top_p to all probabilities; with min_p, FlashInfer's sampler applies it to those
    that top_k keeps.
    """
    probs_NW = np.exp(logprobs_NW)
    mass_before_NW = probs_NW.cumsum(1) - probs_NW
    rank_W = np.arange(probs_NW.shape[1])
    top_k = sampling.top_k if sampling.top_k > 0 else None
    top_p = sampling.top_p if sampling.top_p < 1 else np.inf

    def num_kept(top_p: np.ndarray | float, min_p: float) -> np.ndarray:
        """Return the number of kept tokens of each row [N, 1]."""
        is_kept_NW = (probs_NW > 0) & (mass_before_NW <= top_p)
        is_kept_NW &= probs_NW >= min_p * probs_NW[:, :1]
        return is_kept_NW[:, :top_k].sum(1, keepdims=True)

    num_kept_N1 = num_kept(top_p - ROUNDING, sampling.min_p * (1 + ROUNDING))
    others = [num_kept(top_p + ROUNDING, sampling.min_p * (1 - ROUNDING))]
    if top_k and sampling.min_p > 0:
        mass_of_top_k_N1 = probs_NW[:, :top_k].sum(1, keepdims=True)
        others.append(num_kept(top_p * mass_of_top_k_N1, sampling.min_p))
    # The next token must be known, too, and less probable, or all have been returned.
    padded_probs_NW = np.pad(probs_NW, ((0, 0), (0, 1)))
    last_N1 = np.take_along_axis(padded_probs_NW, num_kept_N1 - 1, axis=1)
    next_N1 = np.take_along_axis(padded_probs_NW, num_kept_N1, axis=1)
    is_whole_N1 = probs_NW.sum(1, keepdims=True) >= 1 - ROUNDING
    is_known_N1 = (next_N1 < last_N1 * (1 - ROUNDING)) & (is_whole_N1 | (next_N1 > 0))
    for other_N1 in others:
        is_known_N1 &= other_N1 == num_kept_N1
    return is_known_N1 & (rank_W < num_kept_N1)
