"""Stores every open group: its leases, finished episodes, failures, and the batch that it joins.

A group is open until it is filtered or its batch is trained. Each change is queued for the ledger.
This module has no sockets and no event loop, so tests can run random histories on it.
"""

import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence

from arealite.algo import staleness
from arealite.api.datapipe import CurriculumConfig
from arealite.api.rollout_messages import Episode, Failure, Lease, Progress, TurnHeader
from arealite.api.task import Task
from arealite.api.trainer import PPOConfig
from arealite.system.datapipe.curriculum import Curriculum
from arealite.system.datapipe.filtered import STALE, FilterStreak
from arealite.system.ledger.group import LOST, Group, can_recompose
from arealite.system.ledger.ledger import Ledger, meta_number

FAILURE_WINDOW = 256
"""Number of recent episodes in the share of failures."""
OFF = CurriculumConfig()


class GroupStore:
    """All open groups of a trial. Each change is queued for the ledger."""

    def __init__(
        self, ledger: Ledger, train: Sequence[Task], *, ppo: PPOConfig, seed: int, shuffle: bool,
        curriculum: CurriculumConfig = OFF,
    ) -> None:  # fmt: skip
        self.ledger = ledger
        self.train = train
        self.ppo = ppo
        self.curriculum = Curriculum(curriculum, train, seed=seed, shuffle=shuffle)
        self.filtered = FilterStreak(ledger)
        self.failed_window: deque[bool] = deque(maxlen=FAILURE_WINDOW)
        self.first_failure: Failure | None = None
        self.late_results = 0
        """Number of results that arrived too late to be trained within the staleness bound."""
        self.num_leases = 0
        self.dropped_lengths: Counter[int] = Counter()
        """Number of stale trajectories, by the next power of two above their length in tokens."""
        self._load()

    # ------------------------------------------------------------ leases

    def next_group(self) -> Group | None:
        """Return the oldest group with unleased members, or a new group; None if no lease is due.

        A new group is created only if the admission rule of `algo.staleness` allows it, and at
        most one batch of groups beyond the last step: the last batch then needs no slow episode.
        """
        last = self.ppo.total_steps
        if self.version is None or self.version >= last:
            return None
        attempts = self.ppo.max_attempts
        now = time.monotonic()
        for seq in sorted(self._leasable):
            group = self._leasable[seq]
            if group.state not in ("offered", "leased") or not group.leasable(attempts):
                del self._leasable[seq]
            elif group.leasable(attempts, now) and not self._makes_stale(group, self.version):
                return group
        eta = self.ppo.max_staleness
        size = self.ppo.num_groups
        outstanding = self.next_step * size
        outstanding += sum(self.counts[state] for state in ("offered", "leased", "complete"))
        is_due = staleness.may_lease(outstanding, self.version, eta=eta, num_groups=size)
        return self._create_group() if is_due and outstanding < (last + 1) * size else None

    def lease(self, group: Group, *, worker_id: str, credit: int) -> Lease:
        """Lease up to `credit` missing members of a group to a worker."""
        assert self.version is not None
        self.num_leases += 1
        lease_id = f"{group.group_id}.{self.ledger.boot}.{self.num_leases}"
        members = group.leasable(self.ppo.max_attempts, time.monotonic())[:credit]
        turns = self._resumable_turns(group, members)
        version = min([self.version, *(turn.oldest_version for turn in turns)])
        lease = Lease(lease_id, group.group_id, "train", group.task, members, version, turns)
        group.leases[lease.lease_id] = lease
        group.owners[lease.lease_id] = worker_id
        self._set_state(group, "leased")
        return lease

    def end_lease(self, lease: Lease, *, is_lost: bool = False) -> None:
        """Remove a lease; its unfinished members can be leased again.

        Args:
            lease: A lease that its worker will not finish, or has finished.
            is_lost: Count a failed attempt for each unfinished member.
        """
        group = self.groups.get(lease.group_id)
        if group is None or lease.lease_id not in group.leases:
            return
        failure = Failure(LOST, "the worker exited, was silent, or does not list the lease")
        for member in group.unfinished(group.leases[lease.lease_id]) if is_lost else ():
            self._add_failure(group, member, lease.lease_id, failure)
        del group.leases[lease.lease_id]
        self.ledger.put_group(group)
        self._leasable[group.seq] = group
        if is_lost:
            self._close_if_finished(group)

    def _resumable_turns(self, group: Group, members: Sequence[int]) -> list[TurnHeader]:
        """Return the stored turns from which members resume; delete them if they are too old.

        Under `wait` they are too old only if the policy, η or the batch size was changed.
        """
        turns = [turn for m in members for _, turn in sorted(group.turns.get(m, {}).items())]
        if turns and not self._fits(group, min(turn.oldest_version for turn in turns)):
            for member in members:
                self._delete_turns(group, member)
            return []
        return turns

    def _delete_turns(self, group: Group, member: int) -> None:
        """Delete the stored turns of an episode that ended or starts from its beginning."""
        if group.turns.pop(member, None):
            self.ledger.delete_turns(group.group_id, member)

    def _makes_stale(self, group: Group, version: int) -> bool:
        """Return whether a lease of `version` (after a roll-back) would make a group too old."""
        start = group.start
        if start is not None and start <= version:
            return False
        return not self._fits(group, version) and (start is None or self._fits(group, start))

    def _fits(self, group: Group, version: int) -> bool:
        """Return whether a group with tokens of `version` can be trained before it is too old.

        Under `wait`, the other leased and complete groups need their places in batches too.
        """
        policy = self.ppo.staleness_policy
        eta = self.ppo.max_staleness
        size = self.ppo.num_groups
        starts = [version if group.start is None else min(version, group.start)]
        first = max(self._planned, default=self.next_step - 1) + 1
        if policy == "wait":
            others = (c for c in self.candidates() if c.seq != group.seq)
            # Complete groups that are too old, because η was reduced, will be dropped.
            starts += [c.start for c in others if not c.is_complete or c.start >= first - eta]
        return policy == "mask" or staleness.fits(starts, first, eta=eta, num_groups=size)

    # ------------------------------------------------------------ results

    def add_turns(self, progress: Progress, payloads: Sequence[bytes]) -> None:
        """Store turns of running episodes, one payload each; ignore turns of an ended lease.

        A turn replaces the stored turn of its index. Unused turns of an earlier attempt are kept
        until the episode ends.
        """
        group = self.groups.get(progress.group_id)
        lease = None if group is None else group.leases.get(progress.lease_id)
        if group is None or lease is None:
            return
        due = set(group.unfinished(lease))
        for turn, payload in zip(progress.turns, payloads, strict=True):
            if turn.member not in due or turn.oldest_version < lease.version:
                continue
            group.turns.setdefault(turn.member, {})[turn.seat, turn.index] = turn
            self.ledger.add_turn(group.group_id, turn, payload)

    def add_episode(self, episode: Episode, payloads: Sequence[bytes]) -> None:
        """Store a finished or failed episode with one payload for each of its headers.

        The first finished episode of a member is used, whichever lease it is from.
        """
        group = self.groups.get(episode.group_id)
        failure = episode.failure
        if group is None or group.state != "leased" or episode.member in group.finished:
            return
        if failure is None and self._is_too_late(group, episode):
            self.late_results += 1
            if episode.lease_id not in group.leases:
                return  # the lease was lost, and the member is leased again
            failure = Failure("too_old", "tokens older than the lease's version")
        if failure is None:
            self.failed_window.append(False)
            # The ledger is read in this order, so a batch is the same after a restart.
            group.finished[episode.member] = sorted(episode.headers, key=lambda h: h.seat)
            self._delete_turns(group, episode.member)
            for header, payload in zip(episode.headers, payloads, strict=True):
                self.ledger.add_trajectory(header, payload)
        elif self._add_failure(group, episode.member, episode.lease_id, failure):
            self.failed_window.append(True)
            self.first_failure = self.first_failure or failure
            self._delete_turns(group, episode.member)
            group.back_off(episode.member)
        for lease in [lease for lease in group.leases.values() if not group.unfinished(lease)]:
            self.end_lease(lease)
        self._close_if_finished(group)

    def _is_too_late(self, group: Group, episode: Episode) -> bool:
        """Return whether a late episode, or one older than its lease, breaks the bound."""
        if self.ppo.staleness_policy != "wait":
            return False
        oldest = min((h.oldest_version for h in episode.headers), default=None)
        lease = group.leases.get(episode.lease_id)
        if oldest is None or (lease is not None and oldest >= lease.version):
            return False
        return not self._fits(group, oldest)

    def _add_failure(self, group: Group, member: int, lease_id: str, failure: Failure) -> bool:
        """Record a failed attempt; return False if it is recorded already (a result was resent)."""
        if any((member, lease_id) == known[:2] for known in group.failures):
            return False
        group.failures.append((member, lease_id, failure.failure_class))
        self._leasable[group.seq] = group
        self.ledger.add_failure(group.group_id, member, lease_id, failure)
        return True

    def _close_if_finished(self, group: Group) -> None:
        """Complete or filter a group once each member has finished or has no attempt left."""
        if group.state != "leased":
            return
        if found := group.outcome(self.ppo):
            state, reason = found
            self._filter(group, reason) if state == "filtered" else self._set_state(group, state)

    # ------------------------------------------------------------ batches

    def candidates(self) -> Iterator[staleness.Candidate]:
        """Yield the leased and complete groups that belong to no rolled-back batch."""
        for group in self.groups.values():
            start = group.start
            if start is not None and group.step is None:
                yield staleness.Candidate(start, group.seq, group.state == "complete")

    def compose(self) -> list[Group] | None:
        """Compose the next batch and return its groups; None while no batch may be released."""
        step = self.next_step
        if (chosen := self._planned.pop(step, None) or self._choose(step)) is None:
            return None
        for place, group in enumerate(chosen):
            group.step = step
            group.place = place
            self._set_state(group, "batched")
            del self.groups[group.group_id]
        self.batches[step] = chosen
        self.next_step = step + 1
        return chosen

    def _choose(self, step: int) -> list[Group] | None:
        eta = self.ppo.max_staleness
        size = self.ppo.num_groups
        policy = self.ppo.staleness_policy
        if self.counts["complete"] < size and policy != "drop":
            return None
        found = list(self.candidates())
        if policy != "mask":  # under wait, groups are too old only if η was reduced
            found = self._drop_stale(found, step)
        if all(c.is_complete for c in found):
            policy = "drop"  # no group to wait for: all fit, unless the batch size was reduced
        chosen = staleness.select_batch(found, step, policy=policy, eta=eta, num_groups=size)
        return None if chosen is None else [self.groups[f"g{c.seq}"] for c in chosen]

    def _drop_stale(self, found: list[staleness.Candidate], step: int) -> list[staleness.Candidate]:
        stale = [c for c in found if c.is_complete and c.start < step - self.ppo.max_staleness]
        for candidate in stale:
            group = self.groups[f"g{candidate.seq}"]
            for header in group.headers:
                self.dropped_lengths[1 << header.num_tokens.bit_length()] += 1
            self._filter(group, STALE)
        return [c for c in found if c not in stale] if stale else found

    def mark_trained(self, step: int) -> None:
        """Mark the groups of a batch as trained: the optimizer has applied it."""
        groups = self.batches[step]
        for group in groups:
            group.state = "trained"
        self.counts["batched"] -= len(groups)
        self.counts["trained"] += len(groups)
        self.trained[step] = len(groups)
        for done in [s for s in self.batches if s < step]:
            del self.batches[done]

    def mark_durable(self, step: int) -> None:
        """Mark the steps before `step` as durable: a checkpoint contains them."""
        for done in [s for s in self.trained if s < step]:
            groups = self.trained.pop(done)
            self.counts["trained"] -= groups
            self.counts["durable"] += groups

    def num_trained_steps(self) -> int:
        """Return the number of trained steps."""
        batched = (s for s, groups in self.batches.items() if groups[0].state == "batched")
        return min(batched, default=self.next_step)

    @property
    def newest_version(self) -> int:
        """Newest version that can have sampled a token, including versions before a roll-back."""
        return max(self._newest, self.num_trained_steps())

    def filter_unusable(self, step: int, reasons: Mapping[str, str]) -> None:
        """Filter groups of an untrained batch (`reasons` by group id), and compose it again."""
        batch = [g for g in self.batches.get(step, ()) if g.state == "batched"]
        if reasons.keys().isdisjoint(g.group_id for g in batch):
            return  # the request was resent, and the batch is composed again already
        for group in batch:
            group.state = "complete"
            group.step = None
            group.place = None
            if group.group_id in reasons:
                group.state = "filtered"
                group.reason = reasons[group.group_id]
            self.ledger.put_group(group)
        self.roll_back(step)

    def roll_back(self, step: int) -> int:
        """Undo the batches from `step` on; return the number of groups that are complete again."""
        # If versions after `step` were published, no group is leased until the next publish.
        self.ledger.set_meta("newest", str(self.newest_version))
        self.ledger.roll_back(step)
        self.ledger.commit()
        rolled = self.next_step > step
        self._load()
        return sum(len(groups) for groups in self._planned.values()) if rolled else 0

    # ------------------------------------------------------------ internals

    def _create_group(self) -> Group:
        seq = self.offered
        group = self._new_group(seq, *self.curriculum.draw(seq))
        self.offered += 1
        self.groups[group.group_id] = self._leasable[seq] = group
        self.counts["offered"] += 1
        self.ledger.put_group(group)
        return group

    def _new_group(self, seq: int, epoch: int, row: int) -> Group:
        return Group(seq, f"g{seq}", self.train[row], self.ppo.collector.group_size, epoch, row)

    def _filter(self, group: Group, reason: str) -> None:
        for lease in list(group.leases.values()):
            self.end_lease(lease)
        group.reason = reason
        self._set_state(group, "filtered")
        self.counts[f"filtered:{reason}"] += 1
        del self.groups[group.group_id]

    def _set_state(self, group: Group, state: str) -> None:
        if state in ("complete", "filtered"):
            for member in list(group.turns):
                self._delete_turns(group, member)
            self.curriculum.record(group)
        self.counts[group.state] -= 1
        self.counts[state] += 1
        group.state = state
        if state in ("complete", "filtered"):
            self.filtered.record(group)
        self.ledger.put_group(group)

    def _load(self) -> None:
        """Load the state from the ledger, at the start and after a roll-back."""
        db = self.ledger.connection
        self.curriculum.load(db)
        self.filtered.load(db)
        self.groups: dict[str, Group] = {}
        self.batches: dict[int, list[Group]] = {}
        """By step: composed batches that are not trained, and the last trained batch."""
        self._planned: dict[int, list[Group]] = {}
        """By step: rolled-back batches, which are composed again from the same groups."""
        self._leasable: dict[int, Group] = {}
        """By seq: groups that may have unleased members."""
        self.counts = Counter(dict(db.execute("SELECT state, COUNT(*) FROM groups GROUP BY state")))
        """Number of groups by state, and of filtered groups by `filtered:<reason>`."""
        self.offered = self.counts.total()
        """Number of groups created so far: the position in the dataset."""
        sql = "SELECT 'filtered:' || reason, COUNT(*) FROM groups WHERE reason NOTNULL GROUP BY 1"
        self.counts.update(dict(db.execute(sql)))
        sql = "SELECT MAX(step) FROM groups WHERE state IN ('batched', 'trained', 'durable')"
        (last,) = db.execute(sql).fetchone()
        self.next_step: int = 0 if last is None else last + 1
        """Number of the batch that is composed next."""
        stored = db.execute("SELECT value FROM meta WHERE key = 'version'").fetchone()
        self.version = int(stored[0]) if stored else None
        """The newest version that every server has confirmed; None before the first."""
        self._newest = meta_number(db, "newest")
        trained = "SELECT step, COUNT(*) FROM groups WHERE state = 'trained' GROUP BY step"
        self.trained: dict[int, int] = dict(db.execute(trained).fetchall())
        """By step: number of groups of steps that are trained and in no checkpoint yet."""
        for group in self.ledger.open_groups(self._new_group):
            if group.state != "batched":
                self.groups[group.group_id] = self._leasable[group.seq] = group
            if group.step is not None:
                plans = self.batches if group.state == "batched" else self._planned
                plans.setdefault(group.step, []).append(group)
        if not all(can_recompose(step, plan, self.ppo) for step, plan in self._planned.items()):
            self._planned = {}  # the batch size or η was changed
            self.ledger.clear_planned_steps()
            for group in self.groups.values():
                group.step = group.place = None
