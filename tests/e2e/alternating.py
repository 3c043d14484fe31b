"""A reward that no policy learns, so each step changes the weights of the model."""

from __future__ import annotations

import itertools

calls = itertools.count()


def alternating(completion: str) -> float:
    """Return 0 and 1 in turn, whatever the completion is."""
    return float(next(calls) % 2)
