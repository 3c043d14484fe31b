"""Knows every open group: what of it is leased, finished, failed, and in which batch it goes.

Plain state and rules without sockets or clocks, so that random histories can be tested against the
ledger that each change is written to.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence

from arealite.algo import staleness
from arealite.api.rollout_messages import Episode, Failure, Lease, Progress, TurnHeader
from arealite.api.task import Task
from arealite.api.trainer import PPOConfig
from arealite.system.data.dataset import permutation
from arealite.system.datapipe.curriculum import Curriculum
from arealite.system.ledger.group import LOST, Group, can_be_made
from arealite.system.ledger.ledger import Ledger, number

FAILURE_WINDOW = 256


class GroupStore:
    """All open groups of a trial, and the ledger that remembers them."""

    def __init__(
        self, ledger: Ledger, train: Sequence[Task], *, ppo: PPOConfig, seed: int, shuffle: bool,
        curriculum: Curriculum | None = None,
    ) -> None:  # fmt: skip
        self.ledger, self.train, self.ppo, self.curriculum = ledger, train, ppo, curriculum
        self.seed, self.shuffle = seed, shuffle
        self.failed_window: deque[bool] = deque(maxlen=FAILURE_WINDOW)
        self.first_failure: Failure | None = None
        self.too_late = 0
        """Results of lost leases that were too old to keep."""
        self.leases_given = 0
        self.dropped_lengths: Counter[int] = Counter()
        """Trajectories filtered as stale, by their length's next power of two."""
        self._load()

    # ------------------------------------------------------------ leases

    def task_of(self, seq: int) -> tuple[int, int]:
        """Return (epoch, row) of the group to be offered as number `seq`."""
        if self.curriculum is not None:
            return self.curriculum.draw(seq)
        epoch, place = divmod(seq, len(self.train))
        if not self.shuffle:
            return epoch, place
        return epoch, permutation(self.seed, epoch, len(self.train))[place]

    def next_offer(self) -> Group | None:
        """Return the oldest group with members to be run, else a new one if admission allows it.

        Not after the last step; and one batch more than all steps need, so that the last of them
        waits for no straggler.
        """
        last = self.ppo.total_steps
        if self.version is None or self.version >= last:
            return None
        attempts, now = self.ppo.max_attempts, time.monotonic()
        for seq in sorted(self._wanting):
            group = self._wanting[seq]
            if group.state not in ("offered", "leased") or not group.missing(attempts):
                del self._wanting[seq]
            elif group.missing(attempts, now) and not self._spoils(group, self.version):
                return group
        eta, size = self.ppo.max_staleness, self.ppo.num_groups
        outstanding = self.next_step * size
        outstanding += sum(self.counts[state] for state in ("offered", "leased", "complete"))
        is_due = staleness.may_lease(outstanding, self.version, eta=eta, num_groups=size)
        return self._offer() if is_due and outstanding < (last + 1) * size else None

    def lease(self, group: Group, *, worker_id: str, credit: int) -> Lease:
        """Lease up to `credit` missing members of a group."""
        assert self.version is not None
        self.leases_given += 1
        lease_id = f"{group.group_id}.{self.ledger.boot}.{self.leases_given}"
        members = group.missing(self.ppo.max_attempts, time.monotonic())[:credit]
        turns = self._kept(group, members)
        version = min([self.version, *(turn.oldest_version for turn in turns)])
        about = (group.group_id, "train", group.task)
        lease = Lease(lease_id, *about, members, version, turns)
        group.leases[lease.lease_id] = lease
        group.owners[lease.lease_id] = worker_id
        self._move(group, "leased")
        return lease

    def end(self, lease: Lease) -> None:
        """Expect nothing more of a lease; members that it did not bring are offered again."""
        group = self.groups.get(lease.group_id)
        if group is not None and group.leases.pop(lease.lease_id, None) is not None:
            self.ledger.put_group(group)
            self._wanting[group.seq] = group

    def _kept(self, group: Group, members: Sequence[int]) -> list[TurnHeader]:
        """Return the turns with which members go on; forget those that are too old by now.

        Under wait they hold batches back, so none is unless η or the batch got smaller, or the
        policy was another one, when the run was begun again.
        """
        turns = [turn for m in members for _, turn in sorted(group.turns.get(m, {}).items())]
        if turns and not self._fits(group, min(turn.oldest_version for turn in turns)):
            for member in members:
                self._forget(group, member)
            return []
        return turns

    def _forget(self, group: Group, member: int) -> None:
        """Let go of the turns of an episode that ended, or begins from nothing."""
        if group.turns.pop(member, None):
            self.ledger.forget_turns(group.group_id, member)

    def lose(self, lease: Lease) -> None:
        """End a lease whose worker died: a failed attempt at each member that it still ran."""
        group = self.groups.get(lease.group_id)
        if group is None or lease.lease_id not in group.leases:
            return
        failure = Failure(LOST, "its worker died, fell silent or forgot the lease")
        for member in group.due(group.leases[lease.lease_id]):
            self._fail(group, member, lease.lease_id, failure)
        self.end(lease)
        self._settle(group)

    def _spoils(self, group: Group, version: int) -> bool:
        """Say whether a lease of `version` would make a group too old that is not so already.

        Only after a roll-back, when it is older than what the group has.
        """
        start = group.start
        if start is not None and start <= version:
            return False
        return not self._fits(group, version) and (start is None or self._fits(group, start))

    def _fits(self, group: Group, version: int) -> bool:
        """Say whether a group with tokens of `version` can be trained in time, beside all others
        under wait."""
        policy, eta, size = self.ppo.staleness_policy, self.ppo.max_staleness, self.ppo.num_groups
        starts = [version if group.start is None else min(version, group.start)]
        first = max(self._planned, default=self.next_step - 1) + 1
        if policy == "wait":
            others = (c for c in self.candidates() if c.seq != group.seq)
            # What is complete and too old, since η was made less, will be dropped.
            starts += [c.start for c in others if not c.is_complete or c.start >= first - eta]
        return policy == "mask" or staleness.fits(starts, first, eta=eta, num_groups=size)

    # ------------------------------------------------------------ results

    def keep(self, progress: Progress, payloads: Sequence[bytes]) -> None:
        """Keep turns of episodes under way; what comes of a lease that is over is of no use.

        A turn replaces what is known of it and of all later ones: those were of another attempt.
        """
        group = self.groups.get(progress.group_id)
        lease = None if group is None else group.leases.get(progress.lease_id)
        if group is None or lease is None:
            return
        due = set(group.due(lease))
        for turn, payload in zip(progress.turns, payloads, strict=True):
            if turn.member not in due or turn.oldest_version < lease.version:
                continue
            known = group.turns.setdefault(turn.member, {})
            if later := [k for k in known if k[0] == turn.seat and k[1] > turn.index]:
                self.ledger.forget_turns(
                    group.group_id, turn.member, seat=turn.seat, after=turn.index
                )
            for key in later:
                del known[key]
            known[turn.seat, turn.index] = turn
            self.ledger.add_turn(group.group_id, turn, payload)

    def add(self, episode: Episode, payloads: Sequence[bytes]) -> None:
        """Take in an episode: the first one of a member counts, whatever lease it is of."""
        group, failure = self.groups.get(episode.group_id), episode.failure
        if group is None or group.state != "leased" or episode.member in group.finished:
            return
        if failure is None and self._is_too_late(group, episode):
            self.too_late += 1
            if episode.lease_id not in group.leases:
                return  # its lease was lost, and the member is offered again
            failure = Failure("too_old", "tokens older than the lease's version")
        if failure is None:
            self.failed_window.append(False)
            # In the order in which they are read back: a batch is the same after a restart.
            group.finished[episode.member] = sorted(episode.headers, key=lambda h: h.seat)
            self._forget(group, episode.member)
            for header, payload in zip(episode.headers, payloads, strict=True):
                self.ledger.add_trajectory(header, payload)
        elif self._fail(group, episode.member, episode.lease_id, failure):
            self.failed_window.append(True)
            self.first_failure = self.first_failure or failure
            self._forget(group, episode.member)
            group.rest(episode.member)
        for lease in [lease for lease in group.leases.values() if not group.due(lease)]:
            self.end(lease)
        self._settle(group)

    def _is_too_late(self, group: Group, episode: Episode) -> bool:
        """A late or wrongly versioned result may not break the staleness bound."""
        if self.ppo.staleness_policy != "wait":
            return False
        oldest = min((h.oldest_version for h in episode.headers), default=None)
        lease = group.leases.get(episode.lease_id)
        if oldest is None or (lease is not None and oldest >= lease.version):
            return False
        return not self._fits(group, oldest)

    def _fail(self, group: Group, member: int, lease_id: str, failure: Failure) -> bool:
        """Note a failed attempt; False if it is known (a result may come twice)."""
        if any((member, lease_id) == known[:2] for known in group.failures):
            return False
        group.failures.append((member, lease_id, failure.failure_class))
        self._wanting[group.seq] = group
        self.ledger.add_failure(group.group_id, member, lease_id, failure)
        return True

    def _settle(self, group: Group) -> None:
        """Complete or filter a group once nothing more can come of it."""
        if group.state != "leased":
            return
        if found := group.outcome(self.ppo):
            state, reason = found
            self._filter(group, reason) if state == "filtered" else self._move(group, state)

    # ------------------------------------------------------------ batches

    def candidates(self) -> Iterator[staleness.Candidate]:
        """Leased and complete groups that no rolled-back batch holds."""
        for group in self.groups.values():
            start = group.start
            if start is not None and group.step is None:
                yield staleness.Candidate(start, group.seq, group.state == "complete")

    def compose(self) -> list[Group] | None:
        """Fix the groups of the next batch, or return None while it may not be released."""
        step = self.next_step
        chosen = self._planned.pop(step, None) or self._choose(step)
        if chosen is None:
            return None
        for place, group in enumerate(chosen):
            group.step, group.place = step, place
            self._move(group, "batched")
            del self.groups[group.group_id]
        self.batches[step] = chosen
        self.next_step = step + 1
        return chosen

    def _choose(self, step: int) -> list[Group] | None:
        eta, size = self.ppo.max_staleness, self.ppo.num_groups
        policy = self.ppo.staleness_policy
        if self.counts["complete"] < size and policy != "drop":
            return None
        found = list(self.candidates())
        if policy != "mask":  # under wait, none is too old unless η is less than it was
            found = self._drop_stale(found, step)
        if all(c.is_complete for c in found):
            policy = "drop"  # nothing to wait for: all fit, unless the batch is smaller than it was
        chosen = staleness.select_batch(found, step, policy=policy, eta=eta, num_groups=size)
        return None if chosen is None else [self.groups[f"g{c.seq}"] for c in chosen]

    def _drop_stale(self, found: list[staleness.Candidate], step: int) -> list[staleness.Candidate]:
        oldest = step - self.ppo.max_staleness
        stale = [c for c in found if c.is_complete and c.start < oldest]
        for candidate in stale:
            group = self.groups[f"g{candidate.seq}"]
            for header in group.headers:
                self.dropped_lengths[1 << header.num_tokens.bit_length()] += 1
            self._filter(group, "stale")
        return [c for c in found if c not in stale] if stale else found

    def mark_trained(self, step: int) -> None:
        """Note that the optimizer has applied a batch."""
        groups = self.batches[step]
        for group in groups:
            group.state = "trained"
        self.counts["batched"] -= len(groups)
        self.counts["trained"] += len(groups)
        self.trained[step] = len(groups)
        for done in [s for s in self.batches if s < step]:
            del self.batches[done]

    def mark_durable(self, step: int) -> None:
        """Note that a checkpoint holds the steps before `step`."""
        for done in [s for s in self.trained if s < step]:
            groups = self.trained.pop(done)
            self.counts["trained"] -= groups
            self.counts["durable"] += groups

    def known_steps(self) -> int:
        """Return the number of steps that were trained."""
        batched = (s for s, groups in self.batches.items() if groups[0].state == "batched")
        return min(batched, default=self.next_step)

    @property
    def newest(self) -> int:
        """Newest version that can have sampled a token, also before a roll-back."""
        return max(self._newest, self.known_steps())

    def set_aside(self, step: int, reasons: Mapping[str, str]) -> None:
        """Filter groups of an untrained batch, by group id; roll back to it, to compose it anew."""
        batch = [g for g in self.batches.get(step, ()) if g.state == "batched"]
        if reasons.keys().isdisjoint(g.group_id for g in batch):
            return  # the request came again, after the batch was composed anew
        for group in batch:
            group.state, group.step, group.place = "complete", None, None
            if group.group_id in reasons:
                group.state, group.reason = "filtered", reasons[group.group_id]
            self.ledger.put_group(group)
        self.roll_back(step)

    def roll_back(self, step: int) -> int:
        """Make the groups of batches from `step` on complete again; return how many.

        Where later versions were published, nothing is leased until one is again: no server will
        have them.
        """
        self.ledger.set_meta("newest", str(self.newest))
        self.ledger.roll_back(step)
        self.ledger.commit()
        rolled = self.next_step > step
        self._load()
        return sum(len(groups) for groups in self._planned.values()) if rolled else 0

    # ------------------------------------------------------------ inside

    def _offer(self) -> Group:
        seq = self.offered
        group = self._make(seq, *self.task_of(seq))
        self.offered += 1
        self.groups[group.group_id] = self._wanting[seq] = group
        self.counts["offered"] += 1
        self.ledger.put_group(group)
        return group

    def _make(self, seq: int, epoch: int, row: int) -> Group:
        size = self.ppo.collector.group_size
        return Group(seq, f"g{seq}", self.train[row], size, epoch, row)

    def _filter(self, group: Group, reason: str) -> None:
        for lease in list(group.leases.values()):
            self.end(lease)
        group.reason = reason
        self._move(group, "filtered")
        self.counts[f"filtered:{reason}"] += 1
        del self.groups[group.group_id]

    def _move(self, group: Group, state: str) -> None:
        if state in ("complete", "filtered"):
            for member in list(group.turns):
                self._forget(group, member)
            if self.curriculum is not None:
                self.curriculum.note(group)
        self.counts[group.state] -= 1
        self.counts[state] += 1
        group.state = state
        self.ledger.put_group(group)

    def _load(self) -> None:
        """Read back what the ledger knows: after a start, and after a roll-back."""
        db = self.ledger.connection
        if self.curriculum is not None:
            self.curriculum.load(db)
        self.groups: dict[str, Group] = {}
        self.batches: dict[int, list[Group]] = {}
        """Composed batches that are not trained, and the last trained one."""
        self._planned: dict[int, list[Group]] = {}
        """Rolled-back batches, to be composed again as they were."""
        self._wanting: dict[int, Group] = {}
        """By seq: groups that may have members to be run."""
        self.counts = Counter(dict(db.execute("SELECT state, COUNT(*) FROM groups GROUP BY state")))
        """Groups by state; filtered ones also by `filtered:<reason>`."""
        self.offered = self.counts.total()
        """Groups ever offered: the dataset's cursor."""
        sql = "SELECT 'filtered:' || reason, COUNT(*) FROM groups WHERE reason NOTNULL GROUP BY 1"
        self.counts.update(dict(db.execute(sql)))
        top = "SELECT MAX(step) FROM groups WHERE state IN ('batched', 'trained', 'durable')"
        (last,) = db.execute(top).fetchone()
        self.next_step: int = 0 if last is None else last + 1
        """The batch to be composed next."""
        held = db.execute("SELECT value FROM meta WHERE key = 'version'").fetchone()
        self.version = int(held[0]) if held else None
        """The version that every server has confirmed."""
        self._newest = number(db, "newest")
        trained = "SELECT step, COUNT(*) FROM groups WHERE state = 'trained' GROUP BY step"
        self.trained: dict[int, int] = dict(db.execute(trained).fetchall())
        """Groups of each step that is trained and in no checkpoint yet."""
        for group in self.ledger.open_groups(self._make):
            if group.state != "batched":
                self.groups[group.group_id] = self._wanting[group.seq] = group
            if group.step is not None:
                among = self.batches if group.state == "batched" else self._planned
                among.setdefault(group.step, []).append(group)
        if not all(can_be_made(step, plan, self.ppo) for step, plan in self._planned.items()):
            self._planned = {}  # the batch size was changed, or η made less
            self.ledger.forget_plans()
            for group in self.groups.values():
                group.step = group.place = None
