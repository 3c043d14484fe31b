"""Names the likely reason of a difference between the trainer and another program."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from arealite.impl.self_check.comparison import Comparison
from arealite.impl.weights.sums import Sums

TOLERANCES = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
"""Relative differences of checksums that rounding to a dtype explains, with a margin of 8."""
ROUNDED = 0.3
"""Largest relative difference of checksums between a tensor and its quantised copy."""
FEW = 4
"""Up to this many tensors that differ are looked at one by one."""
STACKED = 3
"""Dimensions of a tensor that stacks experts."""
ROTARY = 4
"""Positions of other rotary embeddings differ from one of the first positions on."""


@dataclass
class Evidence:
    """Facts about a difference, from further passes over the same rows."""

    trainer_alone: Comparison
    """The trainer, row by row, against the trainer in the layout of training."""
    by_temperature: dict[float, Comparison]
    """The comparison again, with the trainer at other temperatures."""
    right: Sums
    """Checksums of the tensors that should be there."""
    folder: Sums
    """Checksums of the tensors in the model folder."""
    dtype: str
    """The dtype that the program should have."""
    window: int | None
    """The model's sliding window."""
    wrong: Sums = field(default_factory=Sums)
    """Checksums of the program that the reason is looked for in: the server, or the trainer where
    it differs from plain transformers; {}: unknown."""
    buffers: frozenset[str] = frozenset()
    """Names of the model's buffers."""


def likely_reason(comparison: Comparison, evidence: Evidence) -> str:
    """Return a sentence with the likely reason and the fix."""
    found = _reported(comparison, evidence) or tensor_reason(evidence)
    return found or _observed(comparison, evidence) or UNKNOWN


UNKNOWN = "no known one: compare the versions of transformers and of the server"


def _reported(comparison: Comparison, evidence: Evidence) -> str:
    """Return the reason that the server's description of itself gives; "" for none."""
    if quantization := comparison.info.get("quantization"):
        return f"quantised server: it reports quantization={quantization}; serve the model without"
    dtype = comparison.info.get("dtype") or evidence.dtype
    if dtype != evidence.dtype:
        return f"dtype: the server computes in {dtype}, model.dtype is {evidence.dtype}"
    return ""


def _observed(comparison: Comparison, evidence: Evidence) -> str:
    """Return the reason that the differences of tokens and rows give; "" for none."""
    for temperature, each in evidence.by_temperature.items():
        if each.is_equal:
            run = comparison.rows[0].temperature
            return f"temperature: {comparison.other} has it at {temperature:g}, the run at {run:g}"
    if not evidence.trainer_alone.is_equal:
        what = "padding side: the trainer scores rows together differently than alone"
        return f"{what}; try another engine.fsdp.layout"
    begin, window = comparison.begin, evidence.window
    where = f"tokens differ from position {begin} on, and agree before"
    if begin is not None and begin >= ROTARY:
        limit = f"sliding_window={window}" if window else "no sliding window"
        return f"sliding window: {where}; config.json has {limit}"
    if begin:
        return f"rope theta: {where}, as with other rotary embeddings"
    for dtype in ("float16", "bfloat16"):
        if comparison.fits(dtype) and comparison.dtype == "float32":
            return f"dtype: the differences are those of {dtype}, not of float32"
    return ""


def tensor_reason(evidence: Evidence) -> str:
    """Return the reason that tensors give; "" if the checksums are equal or unknown."""
    right, wrong = evidence.right, evidence.wrong
    if len(wrong.keys() & right.keys()) * 2 < len(right):
        return ""

    def distance(one: str, other: str) -> float:
        """Return the relative difference of a right and a wrong tensor's checksums."""
        parts = np.array(right[one].parts), np.array(wrong[other].parts)
        if parts[0].shape != parts[1].shape:
            return np.inf
        return float(np.max(np.abs(parts[0] - parts[1]) / np.maximum(parts[0][:, :1], 1e-12)))

    limit = TOLERANCES[evidence.dtype]
    for name in sorted(right.keys() - wrong.keys()):
        kind = "missing buffer" if name in evidence.buffers else "missing tensor"
        return f"{kind}: '{name}' was not loaded"
    differ = [name for name in right if distance(name, name) > limit]
    heads = [name for name in {*wrong} - {*right} if name.endswith("lm_head.weight")]
    embeddings = [name for name in right if name.endswith("embed_tokens.weight")]
    if not differ and heads and embeddings and distance(embeddings[0], heads[0]) > limit:
        return f"tied head: '{heads[0]}' is not equal to '{embeddings[0]}', to which it is tied"
    if not differ:
        return ""
    return _differing(differ, evidence, distance, limit)


def _differing(
    differ: list[str], evidence: Evidence, distance: Callable[[str, str], float], limit: float
) -> str:
    """Return the reason why these tensors differ by more than `limit`."""
    right, wrong, first = evidence.right, evidence.wrong, differ[0]
    listed = ", ".join(f"'{name}'" for name in differ[:3]) + " …" * (len(differ) > 3)
    for name in differ if len(differ) <= FEW else ():
        if twins := [each for each in differ if each != name and distance(name, each) <= limit]:
            return f"swapped tensors: '{name}' has the values of '{twins[0]}'"
    if all("inv_freq" in name for name in differ):
        return f"rope theta: {listed} differ, the frequencies of the rotary embeddings"
    if all(name in evidence.buffers for name in differ):
        return f"missing buffer: {listed} was not loaded"
    if all(name.endswith("lm_head.weight") for name in differ):
        return f"tied head: {listed} differs; check tie_word_embeddings in config.json"
    pairs = zip(right[first].parts, wrong[first].parts, strict=False)
    zeros = [number for number, (one, other) in enumerate(pairs) if one[0] > 0 == other[0]]
    if zeros and len(differ) <= FEW:
        which = f"expert {zeros[0]} of " * (right[first].dims == STACKED)
        kind = "one expert" if "expert" in first else "missing tensor"
        return f"{kind}: {which}{listed} is zero"
    share = f"{len(differ)} of {len(right)} tensors differ ({listed})"
    is_rounded = all(right[n].dims > 1 and distance(n, n) <= ROUNDED for n in differ)
    is_first = all(wrong.get(name) == each for name, each in evidence.folder.items())
    if is_rounded and not is_first:
        return f"quantised server: {share}, each by rounding"
    if len(differ) <= FEW:
        return f"weights: {share}"
    return f"stale weights: {share}; the last update did not reach them"
