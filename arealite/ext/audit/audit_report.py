"""The result of an audit, and its table for the console."""

from collections.abc import Mapping
from dataclasses import dataclass, field

IN_STATE = {
    "trained": ("trained", "durable"),
    "filtered": ("filtered",),
    "buffered": ("complete", "batched"),
    "in_flight": ("offered", "leased"),
}
"""By line of the balance: the states of its groups."""


@dataclass(frozen=True, kw_only=True)
class LedgerBalance:
    """offered = trained + filtered + buffered + in_flight, in groups or in tokens received."""

    offered: int
    trained: int
    filtered: int
    buffered: int
    in_flight: int

    @classmethod
    def of(cls, counts: Mapping[str, int]) -> "LedgerBalance":
        """Build a balance from counts by state of the group."""

        def count_in(line: str) -> int:
            return sum(counts.get(state, 0) for state in IN_STATE[line])

        return cls(
            offered=sum(counts.values()),
            trained=count_in("trained"),
            filtered=count_in("filtered"),
            buffered=count_in("buffered"),
            in_flight=count_in("in_flight"),
        )

    @property
    def is_even(self) -> bool:
        """Whether both sides are equal."""
        return self.offered == self.trained + self.filtered + self.buffered + self.in_flight


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """The counts and the problems that an audit found in a ledger."""

    groups: LedgerBalance
    tokens: LedgerBalance
    filtered_by_reason: dict[str, int]
    failures_by_class: dict[str, int]
    steps: int
    checkpoints: int
    trained_trajectories: int
    mixed_version_trajectories: int
    """Trained trajectories with tokens of more than one policy version."""
    interrupted: int
    """Generations of trained trajectories that a weight update interrupted."""
    weight_versions: int
    """Number of policy versions, from 0 to the newest that sampled a token."""
    max_staleness: int
    """Largest age of a trained token: its step minus its version."""
    lost: list[str] = field(default_factory=list[str])
    """Records that are missing although other records refer to them."""
    repeated: list[str] = field(default_factory=list[str])
    """Records that were used twice."""
    broken: list[str] = field(default_factory=list[str])
    """Other problems: trained tokens too old, rows that differ from their checksums, damage."""
    turns: str = ""
    """Summary of the receipts: each trained token was sampled under that prefix, by that version;
    "" without receipts."""
    notes: list[str] = field(default_factory=list[str])
    """Records that this audit did not check, with the reason; not a problem."""
    mark: str = field(default="", repr=False)
    """The new mark, as JSON; the datapipe stores it in the ledger if the audit passes."""

    @property
    def problems(self) -> list[str]:
        """All problems."""
        return [*self.lost, *self.repeated, *self.broken]

    @property
    def ok(self) -> bool:
        """Whether both balances are even and there are no problems."""
        return self.groups.is_even and self.tokens.is_even and not self.problems

    def summary(self) -> str:
        """Return the table; one line if no episode was offered."""
        is_empty = self.ok and not self.groups.offered
        return "no episode was offered" if is_empty else self.table()

    def table(self) -> str:
        """Return the report as a table for the console."""
        lines = [f"{'':<28}{'groups':>12}{'tokens':>16}"]
        for name, groups in vars(self.groups).items():
            tokens = getattr(self.tokens, name)
            lines.append(f"{name.replace('_', ' '):<28}{groups:>12}{tokens:>16}")
        lines += [f"{name:<28}{count:>12}" for name, count in self._named_counts().items()]
        for name in ("lost", "repeated", "broken"):
            problems: list[str] = getattr(self, name)
            lines.append(f"{name:<28}{len(problems):>12}")
            lines += [f"  {problem}" for problem in problems]
        if self.turns:
            lines.append(self.turns)
        lines += [note for note in self.notes if note]
        lines.append("balanced: nothing lost, nothing repeated" if self.ok else "OUT OF BALANCE")
        return "\n".join(lines)

    def _named_counts(self) -> dict[str, int]:
        """Return the lines of the table with one number, in their order."""
        counts = dict[str, int]()
        for reason, count in sorted(self.filtered_by_reason.items()):
            counts[f"filtered: {reason}"] = count
        for failure_class, count in sorted(self.failures_by_class.items()):
            counts[f"failed episodes: {failure_class}"] = count
        for field_name, number in vars(self).items():
            if isinstance(number, int):
                counts[field_name.replace("_", " ")] = number
        return counts
