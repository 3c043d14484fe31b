"""Faults of scripted servers: the weights that a server has after an update to a version."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.fakes.scores import Weights, weights_of

WeightFault = Callable[[Weights, str], Weights]
"""(weights before the update, version) to the weights after it."""


def loads(before: Weights, version: str) -> Weights:
    """Return the weights of the version: no fault."""
    return weights_of(version)


def ignores_loads(before: Weights, version: str) -> Weights:
    return before


def loads_version_before(before: Weights, version: str) -> Weights:
    return weights_of(str(int(version) - 1))


def loads_half(before: Weights, version: str) -> Weights:
    return weights_of(version) | {"layers.0": before["layers.0"], "layers.1": before["layers.1"]}


def swaps_layers(before: Weights, version: str) -> Weights:
    weights = weights_of(version)
    return weights | {"layers.0": weights["layers.1"], "layers.1": weights["layers.0"]}


def scales_adapter_twice(before: Weights, version: str) -> Weights:
    """Add the change since version 0 twice, as a merged adapter with the scale (alpha / r)²."""
    weights = weights_of(version)
    first = weights_of("0")
    return {name: 2 * weights[name] - first[name] for name in weights}


def rounds_to_16_bits(before: Weights, version: str) -> Weights:
    """Keep 8 bits of each number, as bfloat16 does."""
    rounded = Weights()
    for name, tensor in weights_of(version).items():
        mantissa, exponent = np.frexp(tensor)
        rounded[name] = np.ldexp(np.round(mantissa * 256) / 256, exponent)
    return rounded


FAULTS: dict[str, tuple[WeightFault, str]] = {
    "confirms without loading": (ignores_loads, "old weights: the scores equal version 1's"),
    "loads the version before": (loads_version_before, "old weights: the scores equal version 1's"),
    "half of the tensors": (loads_half, "a part of the weights is old"),
    "swapped layers": (swaps_layers, "other weights"),
    "scale of an adapter": (scales_adapter_twice, "wrong scale of an adapter"),
    "bfloat16 for float32": (rounds_to_16_bits, "other dtype"),
}
"""The fault, and a pattern of the reason that is named if it begins at version 2."""
