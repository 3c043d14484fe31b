"""Adds the sampler's most probable tokens to training rows.

Shape letters: T = tokens of a row, N = sampled tokens of a turn, K = recorded tokens.
"""

from typing import NamedTuple

import numpy as np

from arealite.api.engine import Sequence
from arealite.api.trajectory import Segment

KNOWN_MASS = 1 - 1e-4
"""Probability of the recorded tokens that shows that no other token could be sampled."""


class KeptSets(NamedTuple):
    """Loss tokens of a row that were sampled from a set of tokens."""

    num_truncated: int
    num_unknown: int
    """Those whose set is not known; they are not in the loss."""


def num_recorded(segment: Segment) -> int:
    """Return the largest number of most probable tokens that a turn of a segment records."""
    widths = [0]
    for turn in segment.turns:
        num_bytes = len(turn.node.extras.get("top_ids", b""))
        widths.append(num_bytes // max(4, 4 * turn.length))
    return max(widths)


def add_top_tokens(row: Sequence, segment: Segment, num_top: int) -> KeptSets:
    """Add the `num_top` most probable tokens to a row; mask tokens whose set is not known.

    All rows of a batch get as many, so that an engine can join them; with 0, none.
    """
    num_tokens = len(row.tokens)
    top_ids_TK = np.full((num_tokens, num_top), -1, np.int32)
    top_logprobs_TK = np.full((num_tokens, num_top), -np.inf, np.float32)
    is_truncated_T = np.zeros(num_tokens, bool)
    for turn in segment.turns:
        span = slice(turn.start, turn.start + turn.length)
        extras = turn.node.extras
        if "truncated" in extras:
            is_truncated_T[span] = np.frombuffer(extras["truncated"], np.uint8) > 0
        if turn.length and "top_ids" in extras:
            ids_NK = np.frombuffer(extras["top_ids"], "<i4").reshape(turn.length, -1)
            logprobs = np.frombuffer(extras["top_logprobs"], "<f4")
            width = ids_NK.shape[1]
            top_ids_TK[span, :width] = ids_NK
            top_logprobs_TK[span, :width] = logprobs.reshape(ids_NK.shape)
    if num_top:
        row.top_ids = top_ids_TK
        row.fields["behav_top_logprobs"] = top_logprobs_TK
    if not is_truncated_T.any():
        return KeptSets(0, 0)
    row.is_truncated = is_truncated_T
    mass_T = np.exp(top_logprobs_TK).sum(1)
    is_in_set_T = row.loss_mask & is_truncated_T
    is_unknown_T = is_in_set_T & (mass_T < KNOWN_MASS)
    row.loss_mask = row.loss_mask & ~is_unknown_T
    num_truncated = int(is_in_set_T.sum())
    return KeptSets(num_truncated, int(is_unknown_T.sum()))
