"""Stores every open group: its leases, finished episodes, failures, and the batch that it joins.

A group is open until it is filtered or its batch is trained. Each change is queued for the ledger.
This module has no sockets and no event loop, so tests can run random histories on it.
"""

import sqlite3
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence

from arealite.algo import staleness
from arealite.api.payloads import Payload
from arealite.api.rollout_messages import Episode, Failure, Lease, Progress, TurnHeader
from arealite.api.task import Task, TaskSampler
from arealite.api.trainer import PPOConfig
from arealite.system.datapipe.filtered import STALE, FilterStreak
from arealite.system.ledger.group import FAILURE_WINDOW, LOST, Group, can_recompose
from arealite.system.ledger.ledger import Ledger, meta_number


class GroupStore:
    """All open groups of a trial. Each change is queued for the ledger."""

    def __init__(
        self,
        ledger: Ledger,
        train: Sequence[Task],
        *,
        ppo: PPOConfig,
        sampler: TaskSampler,
    ) -> None:
        self.ledger = ledger
        self.train = train
        self.ppo = ppo
        self.sampler = sampler
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
        version = self.version
        if version is None or version >= self.ppo.total_steps:
            return None
        max_attempts = self.ppo.max_attempts
        now = time.monotonic()
        for seq in sorted(self._leasable):
            group = self._leasable[seq]
            is_open = group.state in ("offered", "leased")
            if not is_open or not group.leasable(max_attempts):
                del self._leasable[seq]
            elif group.leasable(max_attempts, now) and not self._makes_stale(group, version):
                return group
        return self._create_group() if self._may_create_group(version) else None

    def _may_create_group(self, version: int) -> bool:
        """Return whether a new group is admitted and belongs to at most one batch too many."""
        num_groups = self.ppo.num_groups
        num_batched = self.next_step * num_groups
        num_open = sum(self.counts[state] for state in ("offered", "leased", "complete"))
        outstanding = num_batched + num_open
        if outstanding >= (self.ppo.total_steps + 1) * num_groups:
            return False
        eta = self.ppo.max_staleness
        return staleness.may_lease(outstanding, version, eta=eta, num_groups=num_groups)

    def lease(
        self,
        group: Group,
        *,
        worker_id: str,
        credit: int,
    ) -> Lease:
        """Lease up to `credit` missing members of a group to a worker."""
        assert self.version is not None
        self.num_leases += 1
        lease_id = f"{group.group_id}.{self.ledger.boot}.{self.num_leases}"
        members = group.leasable(self.ppo.max_attempts, time.monotonic())[:credit]
        turns = self._resumable_turns(group, members)
        lease = Lease(
            lease_id=lease_id,
            group_id=group.group_id,
            split="train",
            task=group.task,
            members=members,
            version=min([self.version, *(turn.oldest_version for turn in turns)]),
            turns=turns,
        )
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
        if is_lost:
            failure = Failure(
                failure_class=LOST,
                detail="the worker exited, was silent, or does not list the lease",
            )
            for member in group.unfinished(group.leases[lease.lease_id]):
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
        turns: list[TurnHeader] = []
        for member in members:
            turns_by_place = group.turns.get(member, {})
            turns += [turns_by_place[place] for place in sorted(turns_by_place)]
        if not turns:
            return []
        oldest_version = min(turn.oldest_version for turn in turns)
        if self._fits(group, oldest_version):
            return turns
        for member in members:
            self._delete_turns(group, member)
        return []

    def _delete_turns(self, group: Group, member: int) -> None:
        """Delete the stored turns of an episode that ended or starts from its beginning."""
        if group.turns.pop(member, None):
            self.ledger.delete_turns(group.group_id, member)

    def _makes_stale(self, group: Group, version: int) -> bool:
        """Return whether a lease of `version` (after a roll-back) would make a group too old."""
        start = group.start
        if start is not None and start <= version:
            return False
        is_too_old_already = start is not None and not self._fits(group, start)
        return not is_too_old_already and not self._fits(group, version)

    def _fits(self, group: Group, version: int) -> bool:
        """Return whether a group with tokens of `version` can be trained before it is too old.

        Under `wait`, the other leased and complete groups need their places in batches too.
        """
        policy = self.ppo.staleness_policy
        if policy == "mask":
            return True
        eta = self.ppo.max_staleness
        starts = [version if group.start is None else min(version, group.start)]
        first_step = max(self._planned, default=self.next_step - 1) + 1
        if policy == "wait":
            for other in self.candidates():
                # Complete groups that are too old, because η was reduced, will be dropped.
                is_dropped = other.is_complete and other.start < first_step - eta
                if other.seq != group.seq and not is_dropped:
                    starts.append(other.start)
        return staleness.fits(
            starts,
            first_step,
            eta=eta,
            num_groups=self.ppo.num_groups,
        )

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
        unfinished = set(group.unfinished(lease))
        for turn, payload in zip(progress.turns, payloads, strict=True):
            if turn.member not in unfinished or turn.oldest_version < lease.version:
                continue
            member_turns = group.turns.setdefault(turn.member, {})
            member_turns[turn.seat, turn.index] = turn
            self.ledger.add_turn(group.group_id, turn, payload)

    def add_episode(self, episode: Episode, payloads: Sequence[Payload]) -> None:
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
            failure = Failure(
                failure_class="too_old", detail="tokens older than the lease's version"
            )
        if failure is None:
            self._add_finished(group, episode, payloads)
        elif self._add_failure(group, episode.member, episode.lease_id, failure):
            self.failed_window.append(True)
            self.first_failure = self.first_failure or failure
            self._delete_turns(group, episode.member)
            group.back_off(episode.member)
        for lease in list(group.leases.values()):
            if not group.unfinished(lease):
                self.end_lease(lease)
        self._close_if_finished(group)

    def _add_finished(
        self,
        group: Group,
        episode: Episode,
        payloads: Sequence[Payload],
    ) -> None:
        """Store the trajectories of a finished episode."""
        self.failed_window.append(False)
        # The ledger is read in this order, so a batch is the same after a restart.
        group.finished[episode.member] = sorted(episode.headers, key=lambda header: header.seat)
        self._delete_turns(group, episode.member)
        for header, payload in zip(episode.headers, payloads, strict=True):
            self.ledger.add_trajectory(header, payload)

    def _is_too_late(self, group: Group, episode: Episode) -> bool:
        """Return whether a late episode, or one older than its lease, breaks the bound."""
        if self.ppo.staleness_policy != "wait":
            return False
        if not episode.headers:
            return False
        oldest = min(header.oldest_version for header in episode.headers)
        lease = group.leases.get(episode.lease_id)
        if lease is not None and oldest >= lease.version:
            return False
        return not self._fits(group, oldest)

    def _add_failure(
        self,
        group: Group,
        member: int,
        lease_id: str,
        failure: Failure,
    ) -> bool:
        """Record a failed attempt; return False if it is recorded already (a result was resent)."""
        if group.has_failed(member, lease_id):
            return False
        group.failures.append((member, lease_id, failure.failure_class))
        self._leasable[group.seq] = group
        self.ledger.add_failure(group.group_id, member, lease_id, failure)
        return True

    def _close_if_finished(self, group: Group) -> None:
        """Complete or filter a group once each member has finished or has no attempt left."""
        if group.state != "leased":
            return
        outcome = group.outcome(self.ppo)
        if outcome is None:
            return
        state, reason = outcome
        if state == "filtered":
            self._filter(group, reason)
        else:
            self._set_state(group, state)

    # ------------------------------------------------------------ batches

    def candidates(self) -> Iterator[staleness.Candidate]:
        """Yield the leased and complete groups that belong to no rolled-back batch."""
        for group in self.groups.values():
            start = group.start
            if start is not None and group.step is None:
                yield staleness.Candidate(
                    start=start, seq=group.seq, is_complete=group.state == "complete"
                )

    def compose(self) -> list[Group] | None:
        """Compose the next batch and return its groups; None while no batch may be released."""
        step = self.next_step
        chosen = self._planned.pop(step, None) or self._choose(step)
        if chosen is None:
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
        """Choose the groups of a new batch; None while no batch may be released."""
        num_groups = self.ppo.num_groups
        policy = self.ppo.staleness_policy
        if self.counts["complete"] < num_groups and policy != "drop":
            return None
        candidates = list(self.candidates())
        if policy != "mask":  # under wait, groups are too old only if η was reduced
            candidates = self._drop_stale(candidates, step)
        if all(candidate.is_complete for candidate in candidates):
            policy = "drop"  # no group to wait for: all fit, unless the batch size was reduced
        chosen = staleness.select_batch(
            candidates,
            step,
            policy=policy,
            eta=self.ppo.max_staleness,
            num_groups=num_groups,
        )
        if chosen is None:
            return None
        return [self.groups[f"g{candidate.seq}"] for candidate in chosen]

    def _drop_stale(
        self, candidates: list[staleness.Candidate], step: int
    ) -> list[staleness.Candidate]:
        """Filter the complete groups that are too old for a batch; return the other candidates."""
        oldest_start = step - self.ppo.max_staleness
        fresh: list[staleness.Candidate] = []
        for candidate in candidates:
            if not candidate.is_complete or candidate.start >= oldest_start:
                fresh.append(candidate)
                continue
            group = self.groups[f"g{candidate.seq}"]
            for header in group.headers:
                self.dropped_lengths[1 << header.num_tokens.bit_length()] += 1
            self._filter(group, STALE)
        return fresh

    def mark_trained(self, step: int) -> None:
        """Mark the groups of a batch as trained: the optimizer has applied it."""
        groups = self.batches[step]
        for group in groups:
            group.state = "trained"
        self.counts["batched"] -= len(groups)
        self.counts["trained"] += len(groups)
        self.trained[step] = len(groups)
        for earlier_step in [batch_step for batch_step in self.batches if batch_step < step]:
            del self.batches[earlier_step]

    def mark_durable(self, step: int) -> None:
        """Mark the steps before `step` as durable: a checkpoint contains them."""
        for earlier_step in [trained_step for trained_step in self.trained if trained_step < step]:
            num_groups = self.trained.pop(earlier_step)
            self.counts["trained"] -= num_groups
            self.counts["durable"] += num_groups

    def num_trained_steps(self) -> int:
        """Return the number of trained steps."""
        untrained_steps = [
            step for step, groups in self.batches.items() if groups[0].state == "batched"
        ]
        return min(untrained_steps, default=self.next_step)

    @property
    def newest_version(self) -> int:
        """Newest version that can have sampled a token, including versions before a roll-back."""
        return max(self._newest, self.num_trained_steps())

    def filter_unusable(self, step: int, reasons: Mapping[str, str]) -> None:
        """Filter groups of an untrained batch (`reasons` by group id), and compose it again."""
        batch = [group for group in self.batches.get(step, ()) if group.state == "batched"]
        if reasons.keys().isdisjoint(group.group_id for group in batch):
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
        has_later_batches = self.next_step > step
        self._load()
        if not has_later_batches:
            return 0
        return sum(len(groups) for groups in self._planned.values())

    # ------------------------------------------------------------ internals

    def _create_group(self) -> Group:
        seq = self.offered
        epoch, row = self.sampler.draw(seq)
        group = self._new_group(seq, epoch, row)
        self.offered += 1
        self.groups[group.group_id] = self._leasable[seq] = group
        self.counts["offered"] += 1
        self.ledger.put_group(group)
        return group

    def _new_group(self, seq: int, epoch: int, row: int) -> Group:
        return Group(
            seq=seq,
            group_id=f"g{seq}",
            task=self.train[row],
            size=self.ppo.collector.group_size,
            epoch=epoch,
            row=row,
        )

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
            rewards = [header.reward for header in group.headers]
            self.sampler.record(group.seq, group.row, rewards)
        self.counts[group.state] -= 1
        self.counts[state] += 1
        group.state = state
        if state in ("complete", "filtered"):
            self.filtered.record(group)
        self.ledger.put_group(group)

    def _load(self) -> None:
        """Load the state from the ledger, at the start and after a roll-back."""
        db = self.ledger.connection
        self.sampler.load(db)
        self.filtered.load(db)
        self._load_numbers(db)
        self.groups: dict[str, Group] = {}
        self.batches: dict[int, list[Group]] = {}
        """By step: composed batches that are not trained, and the last trained batch."""
        self._planned: dict[int, list[Group]] = {}
        """By step: rolled-back batches, which are composed again from the same groups."""
        self._leasable: dict[int, Group] = {}
        """By seq: groups that may have unleased members."""
        for group in self.ledger.open_groups(self._new_group):
            is_batched = group.state == "batched"
            if not is_batched:
                self.groups[group.group_id] = group
                self._leasable[group.seq] = group
            if group.step is not None:
                batches = self.batches if is_batched else self._planned
                batches.setdefault(group.step, []).append(group)
        if not all(can_recompose(step, groups, self.ppo) for step, groups in self._planned.items()):
            self._planned = {}  # the batch size or η was changed
            self.ledger.clear_planned_steps()
            for group in self.groups.values():
                group.step = None
                group.place = None

    def _load_numbers(self, db: sqlite3.Connection) -> None:
        """Load the counts of groups, the next step and the versions."""
        query = "SELECT state, COUNT(*) FROM groups GROUP BY state"
        self.counts = Counter(dict(db.execute(query)))
        """Number of groups by state, and of filtered groups by `filtered:<reason>`."""
        self.offered = self.counts.total()
        """Number of groups created so far: the position in the dataset."""
        query = "SELECT 'filtered:' || reason, COUNT(*) FROM groups WHERE reason NOTNULL GROUP BY 1"
        self.counts.update(dict(db.execute(query)))
        query = "SELECT MAX(step) FROM groups WHERE state IN ('batched', 'trained', 'durable')"
        (last_step,) = db.execute(query).fetchone()
        self.next_step: int = 0 if last_step is None else last_step + 1
        """Number of the batch that is composed next."""
        version_row = db.execute("SELECT value FROM meta WHERE key = 'version'").fetchone()
        self.version = int(version_row[0]) if version_row else None
        """The newest version that every server has confirmed; None before the first."""
        self._newest = meta_number(db, "newest")
        query = "SELECT step, COUNT(*) FROM groups WHERE state = 'trained' GROUP BY step"
        self.trained: dict[int, int] = dict(db.execute(query).fetchall())
        """By step: number of groups of steps that are trained and in no checkpoint yet."""
