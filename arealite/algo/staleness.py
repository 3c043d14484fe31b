"""Decides when a group may be leased and a batch released, so that no token is older than η.

η is the option `max_staleness`. These are pure functions of counts and versions; the text below
proves that they keep the bound. Version v is the policy after v steps; batch k is trained by
version k; a token of version s that is trained in batch k has age k - s. B = groups in a batch.

*Admission.* At confirmed version v a new group is leased only while batched + complete + leased <
(v + η + 1)·B. Every group of start version ≤ v then has a place in the batches up to v + η.

*Wait.* Call s + η the deadline of a group of start version s: the last batch that may hold it. A
set of groups *fits* after step k if drawing all of them oldest first, B at a time, from batch k + 1
on would meet every deadline. Batch k is released only when the groups left out of it fit; in
particular (the first of them) all have s ≥ k + 1 - η.

*Safe.* What fits when batch k goes out contains no group whose deadline is k or earlier, so all of
batch k + 1's candidates are young enough: no token older than η, and nothing is discarded.

*Live.* Let n(D) be the groups outstanding with deadline ≤ D when batch k is due. Claim: n(D) ≤
(D - k + 1)·B for all D ≥ k. A release keeps it (this is what *fits* says); a lease at version v
adds a group of deadline v + η, and admission bounds all that is outstanding by (v + η + 1 - k)·B.
When every outstanding group is complete, the B oldest are either all of those with deadline ≤ D, or
all have deadline ≤ D and n(D) falls by B: the rest fits, so batch k goes out. Without *fits* and
with the first condition alone, B = 1, η = 2 deadlocks: a, b, c of start 0, d of start 1; batches
{a}, {d}; now b and c are both due in batch 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    """A group that is leased or complete."""

    start: int
    """Version of its oldest token, or of its oldest active lease if that is lower."""
    seq: int
    """Its place in the order of the dataset; breaks ties."""
    is_complete: bool


def may_lease(outstanding: int, version: int | None, *, eta: int, num_groups: int) -> bool:
    """Return whether one more group may be leased.

    Args:
        outstanding: groups batched since step 0, complete and leased, without filtered groups.
        version: the version that every server has confirmed; None before the first.
    """
    return version is not None and outstanding < (version + eta + 1) * num_groups


def fits(starts: Iterable[int], step: int, *, eta: int, num_groups: int) -> bool:
    """Return whether groups of these start versions fit into the batches from `step` on within η.

    Groups are drawn oldest first.

    Earliest deadline first is optimal (Jackson 1955).
    """
    return all(
        step + place // num_groups - start <= eta for place, start in enumerate(sorted(starts))
    )


def choose(
    candidates: Sequence[Candidate], step: int, *, policy: str, eta: int, num_groups: int
) -> list[Candidate] | None:
    """Return the groups of batch `step`, oldest first, or None while it may not be released.

    Args:
        policy: wait, mask or drop; only `wait` considers groups that are not in the batch.
    """
    complete = sorted((c for c in candidates if c.is_complete), key=lambda c: (c.start, c.seq))
    if len(complete) < num_groups:
        return None
    chosen = complete[:num_groups]
    if policy == "wait":
        rest = [c.start for c in candidates if not c.is_complete]
        rest += [c.start for c in complete[num_groups:]]
        if not fits(rest, step + 1, eta=eta, num_groups=num_groups):
            return None
    return chosen


def blocks(
    candidates: Sequence[Candidate], step: int, *, eta: int, num_groups: int
) -> list[Candidate]:
    """Return the unfinished groups that delay batch `step` under `wait`, oldest first.

    One of them must complete and enter the batch. [] if nothing delays the batch.
    """
    ordered = sorted(candidates, key=lambda c: (not c.is_complete, c.start, c.seq))
    complete = sum(c.is_complete for c in ordered)
    rest = sorted(ordered[min(num_groups, complete) :], key=lambda c: (c.start, c.seq))
    for place, late in enumerate(rest):
        if step + 1 + place // num_groups - late.start > eta:
            return [c for c in rest if not c.is_complete and c.start <= late.start]
    return []
