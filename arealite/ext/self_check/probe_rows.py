"""Random rows of tokens, with which programs that have the same model are compared."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from arealite.base.model_folder import exact_length, text_part, vocab_size

LONGEST = 8192
"""Tokens of the longest row. Longer sliding windows are not tested."""


def room_of(model: dict[str, Any], context: int | None) -> int:
    """Return the number of tokens that fit into a server's context and the model's own.

    Args:
        model: config.json of the model.
        context: The server's context in tokens; None: unknown.
    """
    model_context = exact_length(model) or text_part(model).get("max_position_embeddings")
    return min(context or LONGEST, model_context or LONGEST)


def random_rows(model: dict[str, Any], lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Return a row of token ids of each length, without the special tokens at the ends."""
    num_ids = vocab_size(model) or 1024
    low = num_ids // 8
    high = num_ids * 3 // 4
    rng = np.random.default_rng(seed)
    return [rng.integers(low, high, length).tolist() for length in lengths]
