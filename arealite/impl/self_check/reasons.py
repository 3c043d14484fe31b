"""Compares the log-probabilities of two programs, and finds the likely reason of a difference."""

from dataclasses import dataclass, field
from itertools import permutations
from math import isfinite
from typing import Any

import numpy as np

from arealite.api.engine import Sequence
from arealite.impl.weights.sums import Sums

BOUNDS = {"float32": (1e-3, 1e-2), "float16": (0.02, 0.25), "bfloat16": (0.15, 2.0)}
"""Largest allowed differences by the coarsest dtype, in nats: the mean of a row, and one token.
Random models with large weights differ less (bfloat16: 0.03 and 0.57; float32: 1e-6 and 6e-6)."""
ROUNDING = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
"""Relative difference of checksums that rounding to a dtype can cause, times a margin of 8."""
QUANTISED = 0.3
"""Largest relative difference of checksums between a tensor and its quantised copy."""
EVEN = 0.1
"""Smallest ratio of median differences before and behind a position, if it changes nothing."""
FEW = 4
"""Swapped values and zeros are searched if at most this many tensors differ."""
ROTARY = 4
"""With wrong rotary embeddings, the first token that differs is before this position."""


@dataclass(frozen=True)
class Comparison:
    """Logprobs of the same tokens from the trainer and from another program."""

    other: str
    """The other program: `plain transformers`, or the address of a server."""
    rows: list[Sequence]
    ours: list[np.ndarray]
    """The trainer's logprobs of each row, float32 [T]."""
    theirs: list[np.ndarray]
    """The other program's logprobs of the last tokens of each row."""
    dtype: str
    """The coarsest dtype of both programs, which gives the bound."""
    info: dict[str, Any] = field(default_factory=dict[str, Any])
    """The facts that the server reports; {} for plain transformers."""

    @property
    def errors(self) -> list[np.ndarray]:
        """The absolute difference of each token that both programs scored."""
        pairs = zip(self.ours, self.theirs, strict=True)
        return [np.abs(ours[len(ours) - len(theirs) :] - theirs) for ours, theirs in pairs]

    @property
    def worst(self) -> np.ndarray:
        """The largest mean difference of a row, and that of a token; NaN if any is NaN [2]."""
        return np.max([(e.mean(), e.max()) for e in self.errors], axis=0)

    def fits(self, dtype: str) -> bool:
        """Return whether the differences are within the bounds of a dtype; False for NaN."""
        return all(found <= bound for found, bound in zip(self.worst, BOUNDS[dtype], strict=True))

    @property
    def is_equal(self) -> bool:
        """Whether the differences are within the bounds."""
        return self.fits(self.dtype)

    @property
    def text(self) -> str:
        """The largest differences in words."""
        return "mean of a row {:.2g}, largest {:.2g} nats".format(*self.worst)

    @property
    def places(self) -> np.ndarray:
        """The position of each error's token; position 0 is a row's second token."""
        pairs = zip(self.rows, self.errors, strict=True)
        return np.concatenate([np.arange(-len(e), 0) + len(row.tokens) - 1 for row, e in pairs])

    @property
    def begin(self) -> int:
        """The position of the first token beyond its bound."""
        is_wrong = np.concatenate(self.errors) > BOUNDS[self.dtype][1]
        return int(min(self.places[is_wrong], default=0))

    @property
    def is_even(self) -> bool:
        """Whether tokens before `begin` differ like the others, as rounding makes them differ."""
        errors, is_before = np.concatenate(self.errors), self.places < self.begin
        others = np.median(errors[~is_before])
        return not is_before.any() or bool(np.median(errors[is_before]) > EVEN * others)


def likely_reason(
    comparison: Comparison,
    *,
    alone: Comparison,
    by_temperature: dict[float, Comparison],
    tensors: str,
    dtype: str,
    window: int | None,
) -> str:
    """Return the likely reason of a difference, with the fix where there is one.

    Args:
        comparison: The difference.
        alone: The comparison of the trainer with itself: all rows together, and row by row.
        by_temperature: The same comparison with the trainer at other temperatures.
        tensors: The result of `tensor_reason`.
        dtype: The dtype that the other program should have.
        window: The model's sliding window.
    """
    info, run, begin = comparison.info, comparison.rows[0].temperature, comparison.begin
    quantization, own = info.get("quantization"), info.get("dtype")
    degree = next((each for each, found in by_temperature.items() if found.is_equal), run)
    is_low = comparison.dtype == "float32" and comparison.fits("bfloat16") and comparison.is_even
    where = f"tokens differ from position {begin} on, and agree before"
    together = "a row's log-probabilities depend on the other rows of its micro-batch"
    reasons = {  # the surest evidence comes first
        f"quantised server: it reports quantization={quantization}": quantization,
        f"dtype: the server computes in {own}, model.dtype is {dtype}": own in {*BOUNDS} - {dtype},
        tensors: tensors,
        f"temperature: {comparison.other} has it at {degree:g}, the run at {run:g}": degree != run,
        f"padding: {together}; try another engine.fsdp.layout": not alone.is_equal,
        f"sliding window: {window} in config.json is below 1": window is not None and window < 1,
        "dtype: the differences are those of 16 bits, not of float32": is_low,
        f"rope theta: {where}, as with other rotary embeddings": 0 < begin < ROTARY,
        f"sliding window: {where}; sliding_window={window} in config.json": begin >= ROTARY,
        "unknown; compare the versions of transformers and of the server": True,
    }
    return next(text for text, is_so in reasons.items() if is_so)


def tensor_reason(right: Sums, wrong: Sums, dtype: str, buffers: set[str]) -> str:
    """Return the reason that checksums of tensors show; "" if they are equal or unknown."""

    def distance(one: str, other: str) -> float:
        (_, *ones), (_, *others) = right[one], wrong[other]
        return max(abs(a - b) for a, b in zip(ones, others, strict=True)) / max(ones[0], 1e-12)

    if broken := [n for n, (_, norm, _) in [*right.items(), *wrong.items()] if not isfinite(norm)]:
        return f"weights: '{broken[0]}' has NaN or infinity; download it again"
    if len(wrong.keys() & right.keys()) * 2 < len(right):
        return ""
    if missing := sorted(right.keys() - wrong.keys()):
        kind = "buffer" if missing[0] in buffers else "tensor"
        return f"missing {kind}: '{missing[0]}' was not loaded"
    limit, head = ROUNDING[dtype], "lm_head.weight"
    if head in wrong and head not in right:  # a copy of the embedding
        right[head] = next((s for n, s in right.items() if "embed_tokens" in n), wrong[head])
    differ = [name for name in right if distance(name, name) > limit]
    listed = ", ".join(f"'{name}'" for name in differ[:3]) + " …" * (len(differ) > 3)
    is_few, share = len(differ) <= FEW, f"{len(differ)} of {len(right)} tensors differ ({listed})"
    pairs = permutations(differ, 2) if is_few else ()
    zeros = [name for name in differ if is_few and not wrong[name][1]]
    reasons = {
        "": not differ,
        f"swapped tensors: values of {listed}": any(distance(*pair) <= limit for pair in pairs),
        f"rope theta: {listed} differ": all("inv_freq" in name for name in differ),
        f"missing buffer: {listed} was not loaded": all(name in buffers for name in differ),
        f"tied head: {listed} differs; see tie_word_embeddings": differ == [head],
        f"one expert: {listed} is zero": bool(zeros) and "expert" in listed,
        f"weights: {share}": is_few,
        f"quantised server: {share}, each by rounding": all(
            right[name][0] > 1 and distance(name, name) <= QUANTISED for name in differ
        ),
    }
    found = (text for text, is_so in reasons.items() if is_so)
    return next(found, f"stale weights: {share}; the last update did not reach them")
