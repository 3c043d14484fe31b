"""Compares the log-probabilities of two programs, and finds the likely reason of a difference."""

from dataclasses import dataclass, field
from itertools import chain, permutations
from math import inf, isfinite
from typing import Any

import numpy as np

from arealite.api.engine import Sequence
from arealite.ext.weights.checksums import Sums

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
HEAD = "lm_head.weight"
Checksum = tuple[int, float, float]
"""(dimensions, norm, projection) of a tensor, as in `Sums`."""


@dataclass(frozen=True, kw_only=True)
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
    dtype: str,
    noise: list[np.ndarray] | None,
    *,
    temperature: float,
    is_mixture: bool,
) -> Bound:
    """Return the bound of a dtype: a constant in float32, in 16 bits a multiple of the noise.

    Args:
        dtype: The coarser dtype of both programs.
        noise: How far logprobs of the compared tokens in plain transformers in this dtype are from
            those in float32, for each row [T]; None: not measured.
        temperature: The temperature of the compared tokens.
        is_mixture: Whether the model has experts.
    """
    strict_mean, strict_token = STRICT
    if dtype == "float32":
        return Bound(dtype=dtype, mean=strict_mean, token=strict_token)
    median = inf
    if noise is None:
        noise_mean, noise_token = MEASURED[dtype]
        factor = 1.0 / min(temperature, 1.0)
        origin = "noise of SmolLM2-135M, because this model's own is not measured"
    else:
        noise_mean, noise_token = largest(noise)
        factor = 1.0
        noise_median = float(np.median(np.concatenate(noise)))
        median = max(MEDIAN_MARGIN * noise_median, strict_mean)
        origin = "noise of plain transformers in this dtype"
    mean_margin, token_margin = MIXTURE_MARGINS if is_mixture else MARGINS
    mean_margin *= factor
    token_margin *= factor
    return Bound(
        dtype=dtype,
        mean=float(max(noise_mean * mean_margin, strict_mean)),
        token=float(max(noise_token * token_margin, strict_token)),
        median=median,
        reason=f"{mean_margin:g} and {token_margin:g} times the {origin}",
    )


def largest(errors: list[np.ndarray]) -> np.ndarray:
    """Return the largest mean of a row, and the largest error of a token; NaN if any is NaN [2]."""
    mean_and_largest = [(row.mean(), row.max()) for row in errors]
    return np.max(mean_and_largest, axis=0)


def tail(values: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the last values, as many as the other program has."""
    return values[len(values) - len(other) :]


@dataclass(frozen=True, kw_only=True)
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
        bound = self.bound
        is_within = mean <= bound.mean and token <= bound.token
        return bool(is_within and self.median <= bound.median)

    @property
    def median(self) -> float:
        """The median difference of all tokens."""
        return float(np.median(np.concatenate(self.errors)))

    @property
    def text(self) -> str:
        """The largest differences in words; with the bound if it is no constant."""
        mean, token = largest(self.errors)
        differences = f"mean of a row {mean:.2g}, largest {token:.2g} nats"
        if self.is_equal and self.bound.dtype == "float32":
            return differences
        return f"{differences}, median {self.median:.2g}; {self.bound.text}"

    @property
    def places(self) -> np.ndarray:
        """The position of each error's token; position 0 is a row's second token."""
        places = list[np.ndarray]()
        for row, errors in zip(self.rows, self.errors, strict=True):
            end = len(row.tokens) - 1
            places.append(np.arange(end - len(errors), end))
        return np.concatenate(places)

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
        if not is_before.any():
            return True
        median_before = np.median(errors[is_before])
        median_behind = np.median(errors[~is_before])
        return bool(median_before > EVEN * median_behind)


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
    quantization = info.get("quantization")
    if quantization:
        return f"quantised server: it reports quantization={quantization}"
    reported_dtype = info.get("dtype")
    if reported_dtype in ROUNDING and reported_dtype != dtype:
        return f"dtype: the server computes in {reported_dtype}, model.dtype is {dtype}"
    if tensors:
        return tensors
    bound = comparison.bound
    if not isfinite(bound.mean):
        return f"dtype: plain transformers itself has NaN in {bound.dtype}"
    reason = _temperature_reason(comparison, by_temperature)
    if reason:
        return reason
    if not alone.is_equal:
        return (
            "padding: a row's log-probabilities depend on the other rows of its micro-batch; "
            "try another engine.fsdp.layout"
        )
    if window is not None and window < 1:
        return f"sliding window: {window} in config.json is below 1"
    if bound.dtype == "float32" and low.is_equal and comparison.is_even:
        return "dtype: the differences are those of 16 bits, not of float32"
    return _position_reason(comparison.begin, window)


def _temperature_reason(comparison: Comparison, by_temperature: dict[float, Comparison]) -> str:
    """Return the reason if the trainer is equal at another temperature; else ""."""
    run_temperature = comparison.rows[0].temperature
    equal = [temperature for temperature, other in by_temperature.items() if other.is_equal]
    if not equal or equal[0] == run_temperature:
        return ""
    return f"temperature: {comparison.other} has it at {equal[0]:g}, the run at {run_temperature:g}"


def _position_reason(begin: int, window: int | None) -> str:
    """Return the reason that the position of the first wrong token shows."""
    if begin <= 0:
        return "unknown; compare the versions of transformers and of the server"
    position = f"tokens differ from position {begin} on, and agree before"
    if begin < ROTARY:
        return f"rope theta: {position}, as with other rotary embeddings"
    return f"sliding window: {position}; sliding_window={window} in config.json"


def tensor_reason(right: Sums, wrong: Sums, dtype: str, buffers: set[str]) -> str:
    """Return the reason that checksums of tensors show; "" if they are equal or unknown."""
    for name, (_, norm, _) in chain(right.items(), wrong.items()):
        if not isfinite(norm):
            return f"weights: '{name}' has NaN or infinity; download it again"
    num_common = len(wrong.keys() & right.keys())
    if num_common * 2 < len(right):
        return ""
    missing = sorted(right.keys() - wrong.keys())
    if missing:
        kind = "buffer" if missing[0] in buffers else "tensor"
        return f"missing {kind}: '{missing[0]}' was not loaded"
    if HEAD in wrong and HEAD not in right:  # a copy of the embedding
        embeddings = (checksum for name, checksum in right.items() if "embed_tokens" in name)
        right[HEAD] = next(embeddings, wrong[HEAD])
    limit = ROUNDING[dtype]
    differing = [name for name in right if checksum_distance(right[name], wrong[name]) > limit]
    if not differing:
        return ""
    return _difference_reason(differing, right, wrong, limit=limit, buffers=buffers)


def _difference_reason(
    names: list[str],
    right: Sums,
    wrong: Sums,
    *,
    limit: float,
    buffers: set[str],
) -> str:
    """Return the reason why the tensors `names` differ by more than `limit`."""
    is_few = len(names) <= FEW
    listed = ", ".join(f"'{name}'" for name in names[:3])
    if len(names) > 3:
        listed += " …"
    share = f"{len(names)} of {len(right)} tensors differ ({listed})"
    if is_few and _has_swapped(names, right, wrong, limit):
        return f"swapped tensors: values of {listed}"
    if all("inv_freq" in name for name in names):
        return f"rope theta: {listed} differ"
    if buffers.issuperset(names):
        return f"missing buffer: {listed} was not loaded"
    if names == [HEAD]:
        return f"tied head: {listed} differs; see tie_word_embeddings"
    if is_few:
        is_zero = any(wrong[name][1] == 0.0 for name in names)
        if is_zero and "expert" in listed:
            return f"one expert: {listed} is zero"
        return f"weights: {share}"
    if all(_is_quantised(right[name], wrong[name]) for name in names):
        return f"quantised server: {share}, each by rounding"
    return f"stale weights: {share}; the last update did not reach them"


def checksum_distance(right: Checksum, wrong: Checksum) -> float:
    """Return how far norm and projection are from the right ones, relative to the right norm."""
    _, right_norm, right_projection = right
    _, wrong_norm, wrong_projection = wrong
    largest_difference = max(abs(right_norm - wrong_norm), abs(right_projection - wrong_projection))
    return largest_difference / max(right_norm, 1e-12)


def _has_swapped(names: list[str], right: Sums, wrong: Sums, limit: float) -> bool:
    """Return whether a tensor has the right checksum of another one."""
    pairs = permutations(names, 2)
    return any(checksum_distance(right[one], wrong[other]) <= limit for one, other in pairs)


def _is_quantised(right: Checksum, wrong: Checksum) -> bool:
    """Return whether a tensor is a matrix that differs no more than its quantised copy would."""
    num_dimensions, _, _ = right
    return num_dimensions > 1 and checksum_distance(right, wrong) <= QUANTISED
