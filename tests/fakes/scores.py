"""Log-probabilities of a tiny network, whose weights are a function of the version."""

from __future__ import annotations

import zlib
from functools import cache

import numpy as np

NUM_TOP = 8
VOCAB = 320
HIDDEN = 16
CHANGE = 0.02
"""Size of the change of a version, relative to the weights."""
Weights = dict[str, np.ndarray]


@cache
def weights_of(version: str) -> Weights:
    """Return the weights of a version; neighbouring versions are similar."""
    if version.isdigit() and int(version) > 0:
        before = weights_of(str(int(version) - 1))
        change = _drawn(f"change {version}")
        return {name: before[name] + CHANGE * change[name] for name in before}
    return _drawn(f"first {0 if version.isdigit() else version}")


def _drawn(seed: str) -> Weights:
    rng = np.random.default_rng(zlib.crc32(seed.encode()))
    layers = {f"layers.{index}": rng.normal(0, 0.3, (HIDDEN, HIDDEN)) for index in range(2)}
    return {"embedding": rng.normal(0, 0.5, (VOCAB, HIDDEN)), **layers}


def _logprobs(weights: Weights, ids: list[int]) -> np.ndarray:
    """Return the log-probabilities [T, V] of the tokens after each prefix."""
    embedding = weights["embedding"]
    state = np.zeros(HIDDEN)
    rows = list[np.ndarray]()
    for token in ids:
        state = 0.5 * state + embedding[token]
        rows.append(state)
    hidden = np.array(rows)
    for index in range(2):
        hidden = hidden + np.tanh(hidden @ weights[f"layers.{index}"])
    logits = hidden @ embedding.T
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def prompt_scores(weights: Weights, ids: list[int]) -> list[float]:
    """Return the log-probability of each token but the first one."""
    logprobs = _logprobs(weights, ids[:-1])
    return logprobs[np.arange(len(ids) - 1), ids[1:]].tolist()


def next_scores(weights: Weights, ids: list[int]) -> list[float]:
    """Return the log-probabilities of the most probable next tokens, from the highest on."""
    return sorted(_logprobs(weights, ids)[-1].tolist(), reverse=True)[:NUM_TOP]
