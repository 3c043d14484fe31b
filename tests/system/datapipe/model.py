"""A model of groups, batches and the trainer's tickets: the rules of the datapipe in plain Python.

The model stores nothing and decides nothing that an observer could not predict from the messages.
`test_histories` compares the real parts with it after every event.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MEMBERS = range(3)
"""Members (episodes) of each group."""
NUM_GROUPS = 2
"""Groups in a batch."""
MAX_ATTEMPTS = 2
LOST = "worker_lost"
TRAINER_ALIVE_S, TRAINER_GONE_S = 7.0, 15.0


@dataclass
class ModelLease:
    """A lease that its worker has."""

    members: list[int]
    version: int


@dataclass
class Sample:
    """The first finished episode of a member."""

    oldest_version: int
    reward: float
    payloads: dict[str, bytes]
    """By trajectory id, in the order of the seats."""


@dataclass
class ModelGroup:
    """The events of one group so far."""

    state: str = "leased"
    """leased, complete or filtered."""
    reason: str = ""
    """The reason of filtering."""
    is_batched: bool = False
    samples: dict[int, Sample] = field(default_factory=dict)
    failures: dict[tuple[int, str], str] = field(default_factory=dict)
    """By (member, lease id): failure class."""
    leases: dict[str, ModelLease] = field(default_factory=dict)
    workers: dict[str, str] = field(default_factory=dict)
    """By lease id: the worker, as far as the current process of the datapipe knows it."""
    turns: dict[tuple[int, str, int], tuple[int, bytes]] = field(default_factory=dict)
    """By (member, seat, index): oldest version and payload of a stored turn."""
    retry_at: dict[int, float] = field(default_factory=dict)

    @property
    def is_listed(self) -> bool:
        """Whether the group can still change, or can join a batch."""
        return self.state != "filtered" and not self.is_batched

    @property
    def start(self) -> int | None:
        """The oldest version of its tokens, stored turns and leases; None without any."""
        versions = [lease.version for lease in self.leases.values()]
        versions += [sample.oldest_version for sample in self.samples.values()]
        versions += [oldest for oldest, _ in self.turns.values()]
        return min(versions, default=None)

    def attempts(self, member: int) -> int:
        return sum(failed == member for failed, _ in self.failures)

    def running(self, lease_id: str) -> list[int]:
        """Return the members that the worker of a lease has not answered."""
        members = self.leases[lease_id].members
        return [m for m in members if m not in self.samples and (m, lease_id) not in self.failures]

    def due(self, now: float) -> list[int]:
        """Return the members that can be leased."""
        running = {member for lease_id in self.leases for member in self.running(lease_id)}
        return [
            member
            for member in MEMBERS
            if member not in self.samples
            and member not in running
            and self.attempts(member) < MAX_ATTEMPTS
            and self.retry_at.get(member, 0.0) <= now
        ]

    def forget_turns(self, member: int) -> None:
        self.turns = {key: turn for key, turn in self.turns.items() if key[0] != member}


@dataclass
class Model:
    """All groups of a trial, and its trainer."""

    partial_group: str
    filter_zero_variance: bool
    max_staleness: int
    now: float = 1000.0
    groups: dict[str, ModelGroup] = field(default_factory=dict)
    batches: list[list[str]] = field(default_factory=list)
    """Group ids of each composed batch."""
    planned: dict[int, list[str]] = field(default_factory=dict)
    """By step: rolled-back batches, which are composed again as they were."""
    num_trained: int = 0
    saved: int = 0
    """Step of the newest checkpoint."""
    version: int | None = None
    newest_version: int = 0
    """The newest version that can have sampled a token."""
    rejections: int = 0
    late_results: int = 0
    outcomes: list[bool] = field(default_factory=list)
    """For each episode that ended: whether it failed. Lost workers are no failing episodes."""
    ticket: int = 0
    last_request: float | None = None
    """Time of the trainer's last request to the current process of the datapipe."""
    start: tuple[int, int, float] | None = None
    """A start that waits: step, ticket and time."""
    requests: dict[int, int] = field(default_factory=dict)
    """By rank: step of an unanswered batch request."""

    # ------------------------------------------------------------ groups

    def count(self, state: str) -> int:
        return sum(group.state == state and group.is_listed for group in self.groups.values())

    @property
    def may_create_group(self) -> bool:
        """Whether the staleness bound has room for one more group."""
        if self.version is None:
            return False
        outstanding = len(self.batches) * NUM_GROUPS + self.count("leased") + self.count("complete")
        return outstanding < (self.version + self.max_staleness + 1) * NUM_GROUPS

    def due_groups(self) -> list[str]:
        """Return the groups whose next lease cannot make them older."""
        version = -1 if self.version is None else self.version
        return [
            group_id
            for group_id, group in self.groups.items()
            if group.state == "leased" and group.due(self.now)
            if group.start is not None and group.start <= version
        ]

    def is_leased(self, worker: str, lease_id: str, group_id: str, member: int) -> bool:
        """Return whether a result may be from a lease of its worker, or comes after the end."""
        group = self.groups.get(group_id)
        if group is None or not lease_id.startswith(f"{group_id}."):
            return False
        if not group.is_listed or member in group.samples:
            return True
        if lease_id not in group.workers:
            return (member, lease_id) in group.failures
        lease = group.leases.get(lease_id)
        return group.workers[lease_id] == worker and (lease is None or member in lease.members)

    def finish(self, group_id: str, member: int, sample: Sample) -> None:
        """The first finished episode of a member counts, whichever lease it is from."""
        group = self.groups[group_id]
        if group.state == "leased" and member not in group.samples:
            self.outcomes.append(False)
            group.samples[member] = sample
            group.forget_turns(member)
            self._close_if_over(group)

    def fail(self, group_id: str, member: int, lease_id: str, failure: str) -> None:
        """A lease and member fail at most once, and then rest."""
        group = self.groups[group_id]
        if group.state != "leased" or member in group.samples:
            return
        if (member, lease_id) not in group.failures:
            self.outcomes.append(True)
            group.failures[member, lease_id] = failure
            group.forget_turns(member)
            failures = [m for (m, _), name in group.failures.items() if name != LOST]
            group.retry_at[member] = self.now + min(5.0, 0.2 * 2 ** (failures.count(member) - 1))
        self._close_if_over(group)

    def end_lease(self, group_id: str, lease_id: str, *, is_lost: bool) -> None:
        """A lost lease is a failed attempt of its unanswered members; another lease is none."""
        group = self.groups[group_id]
        if lease_id not in group.leases or not group.is_listed:
            return
        if is_lost:
            for member in group.running(lease_id):
                group.failures[member, lease_id] = LOST
        del group.leases[lease_id]
        if is_lost:
            self._close_if_over(group)

    def _close_if_over(self, group: ModelGroup) -> None:
        if group.state != "leased":
            return
        group.leases = {key: lease for key, lease in group.leases.items() if group.running(key)}
        gone = {m for m in MEMBERS if m not in group.samples and group.attempts(m) >= MAX_ATTEMPTS}
        if self.partial_group == "drop":
            gone |= {member for (member, _), name in group.failures.items() if name != LOST}
        needed = 2 if self.partial_group == "min_size" else len(MEMBERS)
        rewards = {sample.reward for sample in group.samples.values()}
        if len(MEMBERS) - len(gone) < needed:
            self._close(group, "filtered", "failed")
        elif len(group.samples) + len(gone) == len(MEMBERS):
            if self.filter_zero_variance and len(rewards) < 2:
                self._close(group, "filtered", "zero_variance")
            else:
                self._close(group, "complete", "")

    def _close(self, group: ModelGroup, state: str, reason: str) -> None:
        group.state, group.reason = state, reason
        group.turns.clear()
        if state == "filtered":
            group.leases.clear()

    # ------------------------------------------------------------ batches

    def waiting_groups(self) -> list[str]:
        """Return the complete groups that a new batch may contain, oldest first."""
        kept = {group_id for batch in self.planned.values() for group_id in batch}
        waiting = [
            (group.start, int(group_id[1:]), group_id)
            for group_id, group in self.groups.items()
            if group.state == "complete" and group.is_listed and group_id not in kept
        ]
        return [group_id for *_, group_id in sorted(waiting)]

    @property
    def has_gap(self) -> bool:
        """Whether a group was set aside from the next batch while later batches are planned."""
        return bool(self.planned) and len(self.batches) not in self.planned

    @property
    def must_compose(self) -> bool:
        """Whether a requested batch has nothing to wait for."""
        step = len(self.batches)
        is_full = len(self.waiting_groups()) >= NUM_GROUPS and not self.count("leased")
        return step in self.requests.values() and (is_full or step in self.planned)

    def compose(self) -> list[str]:
        """Compose the next batch: as before a roll-back, or of the oldest complete groups."""
        batch = self.planned.pop(len(self.batches), None) or self.waiting_groups()[:NUM_GROUPS]
        for group_id in batch:
            self.groups[group_id].is_batched = True
        self.batches.append(batch)
        return batch

    def payloads(self, step: int) -> dict[str, bytes]:
        """Return the trajectories of a batch, by group, member and seat."""
        payloads: dict[str, bytes] = {}
        for group_id in self.batches[step]:
            for _, sample in sorted(self.groups[group_id].samples.items()):
                payloads |= sample.payloads
        return payloads

    def age(self, step: int) -> int:
        """Return the age of the oldest token of a batch, in versions."""
        samples = [s for key in self.batches[step] for s in self.groups[key].samples.values()]
        return step - min(sample.oldest_version for sample in samples)

    def roll_back(self, step: int) -> None:
        """Undo the batches from `step` on; their groups are complete again."""
        self.newest_version = max(self.newest_version, self.num_trained)
        for undone in range(step, len(self.batches)):
            self.planned[undone] = self.batches[undone]
            for group_id in self.batches[undone]:
                self.groups[group_id].is_batched = False
        del self.batches[step:]
        self.num_trained = min(self.num_trained, step)
        if self.version is not None and self.version > step:
            self.version = None
        self.forget_memory()

    def set_aside(self, group_id: str) -> None:
        """Filter a group of the next batch to be trained; the others are free again."""
        step = self.num_trained
        self.roll_back(step)
        for other in self.planned.pop(step):
            if other == group_id:
                self._close(self.groups[other], "filtered", "unusable")

    def forget_memory(self) -> None:
        """Forget the facts that the ledger does not store."""
        for group in self.groups.values():
            group.workers = {key: group.workers[key] for key in group.leases}
            group.retry_at.clear()

    # ------------------------------------------------------------ trainers

    def accept_start(self) -> str:
        """Accept, refuse or drop a start that waits; return the answer, or "" without one."""
        if self.start is None:
            return ""
        step, ticket, received = self.start
        if self.now - received > TRAINER_GONE_S:
            self.start = None
            return ""
        if self.last_request is not None and self.now - self.last_request < TRAINER_ALIVE_S:
            return ""
        self.start = None
        if not self.saved <= step <= self.num_trained:
            return "Refused"
        self.roll_back(step)
        self.requests.clear()
        self.ticket = ticket
        self.last_request = self.now
        return "TrainerReady"

    def restart_datapipe(self) -> None:
        """Forget the requests and the clock of the trainer, too."""
        self.forget_memory()
        self.start = None
        self.last_request = None
        self.requests.clear()
        self.rejections = 0
        self.late_results = 0
        self.outcomes.clear()
