"""Compares the log-probabilities of two programs, and finds the likely reason of a difference."""

from dataclasses import dataclass, field
from itertools import permutations
from math import inf, isfinite
from typing import Any

import numpy as np

from arealite.api.engine import Sequence
from arealite.impl.weights.sums import Sums

STRICT = (1e-3, 1e-2)
"""Bounds in float32, in nats: the mean of a row, and one token. In 16 bits, bounds are not lower.
Random models with large weights differ less (1e-6 and 6e-6)."""
MARGINS = (3.0, 4.0)
"""Bounds in 16 bits, in multiples of the noise: the mean of a row, and one token. Right programs
differed by at most 1.4 and 1.9 times the noise on 46 random models without experts."""
MIXTURE_MARGINS = (6.0, 30.0)
"""The same for mixtures of experts. Near ties, rounding decides which experts compute a token, and
one such token can be most of the noise: right programs differed by up to 3.8 and 20 times it."""
MEDIAN_MARGIN = 4.0
"""The same for the median of all tokens. Few tokens do not change it, so it also shows small faults
of mixtures."""
MEASURED = {"float16": (0.012, 0.11), "bfloat16": (0.094, 0.8)}
"""Noise of SmolLM2-135M-Instruct on rows of the self-check at temperature 1: for a model that is
too large for a second copy. No larger model was measured."""
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
class Bound:
    """The largest differences that two right programs can have, in nats."""

    dtype: str
    """The coarser dtype of both programs."""
    mean: float
    """The mean of a row."""
    token: float
    median: float = inf
    """The median of all tokens; infinite if only the other two are bounded."""
    reason: str = ""
    """Where the numbers come from; "" for constants."""

    @property
    def text(self) -> str:
        """The bound in words."""
        median = f" and a median of {self.median:.2g}" if isfinite(self.median) else ""
        source = f", {self.reason}" if self.reason else ""
        return f"{self.mean:.2g} and {self.token:.2g}{median} are allowed in {self.dtype}{source}"


def bound_of(
    dtype: str, noise: list[np.ndarray] | None, *, temperature: float, is_mixture: bool
) -> Bound:
    """Return the bound of a dtype: a constant in float32, in 16 bits a multiple of the noise.

    Args:
        dtype: The coarser dtype of both programs.
        noise: How far logprobs of the compared tokens in plain transformers in this dtype are from
            those in float32, for each row [T]; None: not measured.
        temperature: The temperature of the compared tokens.
        is_mixture: Whether the model has experts.
    """
    if dtype == "float32":
        return Bound(dtype, *STRICT)
    median = inf
    if noise is None:
        sizes = MEASURED[dtype]
        factor = 1.0 / min(temperature, 1.0)
        origin = "noise of SmolLM2-135M, because this model's own is not measured"
    else:
        sizes = largest(noise)
        factor = 1.0
        median = max(MEDIAN_MARGIN * float(np.median(np.concatenate(noise))), STRICT[0])
        origin = "noise of plain transformers in this dtype"
    margins = [factor * margin for margin in (MIXTURE_MARGINS if is_mixture else MARGINS)]
    pairs = zip(sizes, margins, STRICT, strict=True)
    mean, token = (max(size * margin, strict) for size, margin, strict in pairs)
    times = " and ".join(f"{margin:g}" for margin in margins)
    reason = f"{times} times the {origin}"
    return Bound(dtype, mean=float(mean), token=float(token), median=median, reason=reason)


def largest(errors: list[np.ndarray]) -> np.ndarray:
    """Return the largest mean of a row, and the largest error of a token; NaN if any is NaN [2]."""
    return np.max([(row.mean(), row.max()) for row in errors], axis=0)


def tail(values: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the last values, as many as the other program has."""
    return values[len(values) - len(other) :]


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
    bound: Bound
    """The largest differences that are allowed."""
    info: dict[str, Any] = field(default_factory=dict[str, Any])
    """The facts that the server reports; {} for plain transformers."""

    @property
    def errors(self) -> list[np.ndarray]:
        """The absolute difference of each token that both programs scored."""
        pairs = zip(self.ours, self.theirs, strict=True)
        return [np.abs(tail(ours, theirs) - theirs) for ours, theirs in pairs]

    @property
    def is_equal(self) -> bool:
        """Whether the differences are within the bounds; False for NaN."""
        mean, token = largest(self.errors)
        is_usual = self.median <= self.bound.median
        return bool(mean <= self.bound.mean and token <= self.bound.token and is_usual)

    @property
    def median(self) -> float:
        """The median difference of all tokens."""
        return float(np.median(np.concatenate(self.errors)))

    @property
    def text(self) -> str:
        """The largest differences in words; with the bound if it is no constant."""
        text = "mean of a row {:.2g}, largest {:.2g} nats".format(*largest(self.errors))
        if self.is_equal and self.bound.dtype == "float32":
            return text
        return f"{text}, median {self.median:.2g}; {self.bound.text}"

    @property
    def places(self) -> np.ndarray:
        """The position of each error's token; position 0 is a row's second token."""
        pairs = zip(self.rows, self.errors, strict=True)
        return np.concatenate([np.arange(-len(e), 0) + len(row.tokens) - 1 for row, e in pairs])

    @property
    def begin(self) -> int:
        """The position of the first token beyond its bound."""
        is_wrong = np.concatenate(self.errors) > self.bound.token
        return int(min(self.places[is_wrong], default=0))

    @property
    def is_even(self) -> bool:
        """Whether tokens before `begin` differ like the others, as rounding makes them differ."""
        errors = np.concatenate(self.errors)
        is_before = self.places < self.begin
        others = np.median(errors[~is_before])
        return not is_before.any() or bool(np.median(errors[is_before]) > EVEN * others)


def likely_reason(
    comparison: Comparison,
    *,
    alone: Comparison,
    by_temperature: dict[float, Comparison],
    low: Comparison,
    tensors: str,
    dtype: str,
    window: int | None,
) -> str:
    """Return the likely reason of a difference, with the fix where there is one.

    Args:
        comparison: The difference.
        alone: The comparison of the trainer with itself: all rows together, and row by row.
        by_temperature: The same comparison with the trainer at other temperatures.
        low: The same comparison with the bounds of bfloat16.
        tensors: The result of `tensor_reason`.
        dtype: The dtype that the other program should have.
        window: The model's sliding window.
    """
    info = comparison.info
    run = comparison.rows[0].temperature
    begin = comparison.begin
    quantization = info.get("quantization")
    own = info.get("dtype")
    degree = next((each for each, found in by_temperature.items() if found.is_equal), run)
    is_low = comparison.bound.dtype == "float32" and low.is_equal and comparison.is_even
    where = f"tokens differ from position {begin} on, and agree before"
    together = "a row's log-probabilities depend on the other rows of its micro-batch"
    has_nan = not isfinite(comparison.bound.mean)
    is_other_dtype = own in {*ROUNDING} - {dtype}
    reasons = {  # the surest evidence comes first
        f"quantised server: it reports quantization={quantization}": quantization,
        f"dtype: the server computes in {own}, model.dtype is {dtype}": is_other_dtype,
        tensors: tensors,
        f"dtype: plain transformers itself has NaN in {comparison.bound.dtype}": has_nan,
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
    limit = ROUNDING[dtype]
    head = "lm_head.weight"
    if head in wrong and head not in right:  # a copy of the embedding
        right[head] = next((s for n, s in right.items() if "embed_tokens" in n), wrong[head])
    differ = [name for name in right if distance(name, name) > limit]
    listed = ", ".join(f"'{name}'" for name in differ[:3]) + " …" * (len(differ) > 3)
    is_few = len(differ) <= FEW
    share = f"{len(differ)} of {len(right)} tensors differ ({listed})"
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
