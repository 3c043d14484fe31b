"""The result of an audit, and its table for the console."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

IN_STATE = {
    "trained": ("trained", "durable"),
    "filtered": ("filtered",),
    "buffered": ("complete", "batched"),
    "in_flight": ("offered", "leased"),
}
"""The states of groups, as the balance counts them."""


@dataclass(frozen=True)
class Balance:
    """offered = trained + filtered + buffered + in_flight, in groups or in tokens received."""

    offered: int
    trained: int
    filtered: int
    buffered: int
    in_flight: int

    @classmethod
    def of(cls, held: Mapping[str, int]) -> Balance:
        """Return the balance of numbers by state of the group."""
        sums = {k: sum(held.get(state, 0) for state in states) for k, states in IN_STATE.items()}
        return cls(sum(held.values()), **sums)

    @property
    def is_even(self) -> bool:
        """Whether both sides are equal."""
        return self.offered == self.trained + self.filtered + self.buffered + self.in_flight


@dataclass(frozen=True)
class AuditReport:
    """What the ledger holds, and what is wrong with it."""

    groups: Balance
    tokens: Balance
    filtered_by_reason: dict[str, int]
    failures_by_class: dict[str, int]
    steps: int
    checkpoints: int
    trained_trajectories: int
    mixed_version_trajectories: int
    """Trained ones whose tokens are of more than one policy version."""
    interrupted: int
    """Generations of trained trajectories that a weight update cut."""
    weight_versions: int
    """Number of policy versions, from 0 to the newest that sampled a token."""
    max_staleness: int
    """Of a trained token: its step less its version."""
    lost: list[str] = field(default_factory=list[str])
    """What is missing although the ledger says it is there."""
    repeated: list[str] = field(default_factory=list[str])
    """What was used twice."""
    broken: list[str] = field(default_factory=list[str])
    """Other promises: trained tokens too old, rows unlike their checksums or each other, damage."""
    notes: list[str] = field(default_factory=list[str])
    """Records that this audit did not check, and why; they are no problem."""
    mark: str = field(default="", repr=False)
    """How far this audit went, as JSON; the datapipe stores it in the ledger if all is right."""

    @property
    def problems(self) -> list[str]:
        """All that is wrong."""
        return [*self.lost, *self.repeated, *self.broken]

    @property
    def ok(self) -> bool:
        """Whether both balances are even and no promise is broken."""
        return self.groups.is_even and self.tokens.is_even and not self.problems

    def table(self) -> str:
        """Write the report for a reader."""
        lines = [f"{'':<28}{'groups':>12}{'tokens':>16}"]
        for name, groups in vars(self.groups).items():
            tokens = getattr(self.tokens, name)
            lines.append(f"{name.replace('_', ' '):<28}{groups:>12}{tokens:>16}")
        counts = {f"filtered: {k}": n for k, n in sorted(self.filtered_by_reason.items())}
        counts |= {f"failed episodes: {k}": n for k, n in sorted(self.failures_by_class.items())}
        counts |= {k.replace("_", " "): v for k, v in vars(self).items() if isinstance(v, int)}
        lines += [f"{name:<28}{number:>12}" for name, number in counts.items()]
        for name in ("lost", "repeated", "broken"):
            problems: list[str] = getattr(self, name)
            lines.append(f"{name:<28}{len(problems):>12}")
            lines += [f"  {problem}" for problem in problems]
        lines += self.notes
        verdict = "balanced: nothing lost, nothing repeated" if self.ok else "OUT OF BALANCE"
        return "\n".join([*lines, verdict])
