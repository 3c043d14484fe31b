"""The comparison of two programs that scored the same tokens, and the reason of a difference."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from arealite.api.engine import Sequence
from arealite.impl.weights.sums import Sums

BOUNDS = {"float32": (1e-3, 1e-2), "float16": (0.02, 0.25), "bfloat16": (0.15, 2.0)}
"""Largest differences by the coarsest dtype: mean of a row, and of any token. They are several
times those of random models with large weights (bfloat16: 0.03 and 0.57; float32: 1e-6, 6e-6)."""
ROUNDING = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
"""Relative differences of checksums that rounding to a dtype explains, with a margin of 8."""
QUANTISED = 0.3
"""Largest relative difference of checksums between a tensor and its quantised copy."""
FEW = 4
"""Up to this many tensors that differ are looked at one by one."""
ROTARY = 4
"""Other rotary embeddings change tokens before this position."""


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
    """The server's description of itself; {} of plain transformers."""

    @property
    def errors(self) -> list[np.ndarray]:
        """The absolute difference of each token that both programs scored."""
        pairs = zip(self.ours, self.theirs, strict=True)
        return [np.abs(ours[len(ours) - len(theirs) :] - theirs) for ours, theirs in pairs]

    @property
    def worst(self) -> tuple[float, float]:
        """The largest mean difference of a row, and the largest difference of a token."""
        return max(e.mean() for e in self.errors), max(e.max() for e in self.errors)

    def fits(self, dtype: str) -> bool:
        """Return whether the differences are within the bounds of a dtype; False for NaN."""
        return all(found <= bound for found, bound in zip(self.worst, BOUNDS[dtype], strict=True))

    @property
    def is_equal(self) -> bool:
        """Whether the differences are within the bounds."""
        return self.fits(self.dtype)

    @property
    def begin(self) -> int | None:
        """The position of the first token that differs, from 0 for a row's second token."""
        found = [
            len(row.tokens) - len(errors) + int(index) - 1
            for row, errors in zip(self.rows, self.errors, strict=True)
            for index in np.flatnonzero(errors > BOUNDS[self.dtype][1])[:1]
        ]
        return min(found, default=None)


@dataclass
class Evidence:
    """Facts about a difference."""

    trainer_alone: Comparison
    """The trainer, row by row, against the trainer with all rows together."""
    by_temperature: dict[float, Comparison]
    """The comparison again, with the trainer at other temperatures."""
    right: Sums
    """Checksums of the tensors that should be there."""
    wrong: Sums
    """Those of the program in question: the server, or the trainer where it differs from plain
    transformers; {}: unknown."""
    dtype: str
    """The dtype that this program should have."""
    buffers: frozenset[str]
    """Names of the model's buffers."""
    window: int | None
    """The model's sliding window."""


def likely_reason(comparison: Comparison, evidence: Evidence) -> str:
    """Return the likely reason of a difference, with the fix where there is one."""
    return next(reason for is_so, reason in _reasons(comparison, evidence) if is_so)


def _reasons(comparison: Comparison, evidence: Evidence) -> Iterator[tuple[bool, str]]:
    """Yield whether a reason applies, and its text; the surest evidence comes first."""
    info, run, begin = comparison.info, comparison.rows[0].temperature, comparison.begin or 0
    quantization, dtype = info.get("quantization"), info.get("dtype") or evidence.dtype
    what = f"quantised server: it reports quantization={quantization}; serve the model without"
    yield bool(quantization), what
    what = f"dtype: the server computes in {dtype}, model.dtype is {evidence.dtype}"
    yield dtype != evidence.dtype, what
    what = tensor_reason(evidence.right, evidence.wrong, evidence.dtype, evidence.buffers)
    yield bool(what), what
    for degree, each in evidence.by_temperature.items():
        what = f"temperature: {comparison.other} has it at {degree:g}, the run at {run:g}"
        yield each.is_equal, what
    what = "padding side: the trainer scores rows together differently than alone"
    yield not evidence.trainer_alone.is_equal, f"{what}; try another engine.fsdp.layout"
    where = f"tokens differ from position {begin} on, and agree before"
    yield 0 < begin < ROTARY, f"rope theta: {where}, as with other rotary embeddings"
    what = f"sliding window: {where}; config.json has sliding_window={evidence.window}"
    yield begin >= ROTARY, what
    for dtype in ("float16", "bfloat16"):
        is_low = comparison.fits(dtype) and comparison.dtype == "float32"
        yield is_low, f"dtype: the differences are those of {dtype}, not of float32"
    yield True, "no known one; compare the versions of transformers and of the server"


def tensor_reason(right: Sums, wrong: Sums, dtype: str, buffers: frozenset[str]) -> str:
    """Return the reason that tensors give; "" if their checksums are equal or unknown."""

    def distance(one: str, other: str) -> float:
        (_, *ones), (_, *others) = right[one], wrong[other]
        return max(abs(a - b) for a, b in zip(ones, others, strict=True)) / max(ones[0], 1e-12)

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
    twins = [
        (a, b) for a in differ for b in differ if is_few and a != b and distance(a, b) <= limit
    ]
    zeros = [name for name in differ if is_few and not wrong[name][1]]
    reasons = {
        "": not differ,
        f"swapped tensors: values of {listed}": bool(twins),
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
