"""Judges, from what servers say of their weights, which of them hold the wrong ones.

Pure, so that every way of being wrong is a small test.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

TOLERANCE = defaultdict(lambda: 0.1, {"float32": 1e-3})
"""Between logprobs of the same weights, by dtype."""


@dataclass(frozen=True)
class Print:
    """What one server showed after a version."""

    kind: tuple[str, ...]
    """Only servers of one kind can be compared; the last part is the dtype."""
    staged: int
    """Hash of the bytes that it should hold."""
    value: str | tuple[float, ...]
    """A checksum, or logprobs."""


def wrong(now: Mapping[str, Print], before: Mapping[str, Print]) -> dict[str, str]:
    """Return the servers that hold other weights than they should, and why we think so.

    The majority of a kind is right; where there is none, all are in doubt. One alone is compared
    with what it showed `before`: its checksum must change exactly when the staged bytes did.
    """
    reasons: dict[str, str] = {}
    for kind in {each.kind for each in now.values()}:
        names = [name for name in now if now[name].kind == kind]
        camps = _camps(names, now)
        if len(camps) == 1:
            reasons |= _unmoved(names[0], now, before) if len(names) == 1 else {}
            continue
        has_majority = len(camps[0]) > len(camps[1])
        for camp in camps[1:] if has_majority else camps:
            other = camps[1] if camp is camps[0] else camps[0]
            for name in camp:
                reasons[name] = f"holds {now[name].value}, {other[0]} holds {now[other[0]].value}"
    return reasons


def _camps(names: Sequence[str], now: Mapping[str, Print]) -> list[list[str]]:
    """Return those that agree with each other, the largest camp first."""
    camps: list[list[str]] = []
    for name in names:
        for camp in camps:
            if _same(now[name], now[camp[0]]):
                camp.append(name)
                break
        else:
            camps.append([name])
    return sorted(camps, key=len, reverse=True)


def _unmoved(name: str, now: Mapping[str, Print], before: Mapping[str, Print]) -> dict[str, str]:
    new, old = now[name], before.get(name)
    if old is None or old.kind != new.kind:
        return {}
    same_staged, same_value = new.staged == old.staged, _same(new, old)
    if same_staged and not same_value:
        return {name: f"holds {new.value}, and held {old.value} of the same weights"}
    if same_value and not same_staged and isinstance(new.value, str):
        return {name: f"holds {new.value} as before, though other weights were sent"}
    return {}


def _same(one: Print, other: Print) -> bool:
    if isinstance(one.value, str) or isinstance(other.value, str):
        return one.value == other.value
    near = TOLERANCE[one.kind[-1]]
    pairs = zip(one.value, other.value, strict=False)
    return len(one.value) == len(other.value) and all(abs(a - b) <= near for a, b in pairs)
