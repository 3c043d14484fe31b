"""Decide when a group is leased and when a batch is released, so that no token is older than η.

The functions are pure; this docstring is the proof of the bound. Version v is the policy after v
steps. The weights of version k train batch k. A token that version s sampled and batch k trains has
the age k - s. B is the number of groups in a batch.

*Admission.* At confirmed version v, a new group is leased only while batched + complete + leased <
(v + η + 1)·B. Every group of start version ≤ v then has a place in the batches up to v + η.

*Wait.* A group of start version s has the deadline s + η: the last batch that may contain it. A set
of groups *fits* after step k if drawing all of them from batch k + 1 on, oldest first and B at a
time, meets every deadline. Batch k is released only if the groups that it leaves out fit. All of
these then have s ≥ k + 1 - η.

*Safety.* A set that fits when batch k is released contains no group with deadline k or earlier.
So every candidate of batch k + 1 is young enough: no token is older than η, and no group is
dropped.

*Liveness.* Let n(D) be the number of outstanding groups with deadline ≤ D before batch k is
released. Claim: n(D) ≤ (D - k + 1)·B for all D ≥ k. A release preserves the claim, by the
definition of *fits*. A lease at version v adds a group with deadline v + η, and admission bounds
the number of all outstanding groups by (v + η + 1 - k)·B. Once every outstanding group is complete,
either the B oldest include all groups with deadline ≤ D, or all B have deadline ≤ D and n(D) falls
by B. In both cases the rest fits, and batch k is released.

*Fits* is necessary: with s ≥ k + 1 - η alone, B = 1 and η = 2 can deadlock. Let a, b, c have start
0, d start 1, and the batches be {a}, {d}; now both b and c must be in batch 2.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A group that is leased or complete."""

    start: int
    """The smaller of its oldest token's version and its oldest live lease's version."""
    seq: int
    """Number of the group in the order of the data set; breaks ties."""
    is_complete: bool


def may_lease(
    outstanding: int,
    version: int | None,
    *,
    eta: int,
    num_groups: int,
) -> bool:
    """Return whether one more group may be leased.

    Args:
        outstanding: Groups batched since step 0, plus complete and leased groups; filtered groups
            do not count.
        version: The confirmed version; None before the first.
        eta: The staleness bound η, in versions.
        num_groups: Groups in a batch.
    """
    if version is None:
        return False
    return outstanding < (version + eta + 1) * num_groups


def fits(
    starts: Iterable[int],
    step: int,
    *,
    eta: int,
    num_groups: int,
) -> bool:
    """Return whether groups drawn oldest first from batch `step` on meet all deadlines.

    Earliest deadline first is optimal (Jackson 1955).

    Args:
        starts: Start version of each group.
        step: The first batch to fill.
        eta: The staleness bound η, in versions.
        num_groups: Groups in a batch.
    """
    for index, start in enumerate(sorted(starts)):
        batch = step + index // num_groups
        if batch - start > eta:
            return False
    return True


def select_batch(
    candidates: Sequence[Candidate],
    step: int,
    *,
    policy: str,
    eta: int,
    num_groups: int,
) -> list[Candidate] | None:
    """Return the groups of batch `step`, oldest first; None while it may not be released.

    Args:
        candidates: All leased and complete groups.
        step: The batch.
        policy: wait, mask or drop. Only `wait` considers the groups that are left out.
        eta: The staleness bound η, in versions.
        num_groups: Groups in a batch.
    """
    complete = [candidate for candidate in candidates if candidate.is_complete]
    complete.sort(key=_age_order)
    if len(complete) < num_groups:
        return None
    chosen = complete[:num_groups]
    if policy == "wait":
        leased = [candidate for candidate in candidates if not candidate.is_complete]
        starts = [candidate.start for candidate in leased + complete[num_groups:]]
        if not fits(
            starts,
            step + 1,
            eta=eta,
            num_groups=num_groups,
        ):
            return None
    return chosen


def blocking_groups(
    candidates: Sequence[Candidate],
    step: int,
    *,
    eta: int,
    num_groups: int,
) -> list[Candidate]:
    """Return the unfinished groups that hold back batch `step`, oldest first.

    One of them must finish and be in the batch. [] if the policy `wait` does not delay the batch.
    """
    complete = [candidate for candidate in candidates if candidate.is_complete]
    complete.sort(key=_age_order)
    leased = [candidate for candidate in candidates if not candidate.is_complete]
    left_out = sorted(complete[num_groups:] + leased, key=_age_order)
    for index, late in enumerate(left_out):
        batch = step + 1 + index // num_groups
        if batch - late.start > eta:
            older = [candidate for candidate in left_out if candidate.start <= late.start]
            return [candidate for candidate in older if not candidate.is_complete]
    return []


def _age_order(candidate: Candidate) -> tuple[int, int]:
    """Return the key that sorts groups oldest first."""
    return candidate.start, candidate.seq
