"""Events of rollout workers: leases, results, turns and lost leases; see `test_histories`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from hypothesis import strategies as st
from hypothesis.stateful import precondition

from arealite.api.llm import LLMResponse
from arealite.api.payloads import Payload
from arealite.api.rollout_messages import Episode, Lease, Progress, TurnHeader, WorkerState
from arealite.api.turns import Turn, encode_turn
from arealite.system.ledger.ledger import read_turns
from tests.payloads import GARBAGE, result_frames
from tests.system.datapipe.history_parts import PICK, ROUTE, TTL_S, Parts, event
from tests.system.datapipe.model import MAX_ATTEMPTS, MEMBERS, ModelGroup, ModelLease, Sample
from tests.system.scenes import failed, header, payload

WORKERS = st.sampled_from(["w0", "w1"])
SEATS = st.sampled_from([("agent", "judge"), ("judge", "agent")])


@cache
def turn_payload(token: int) -> bytes:
    """Return a valid turn of one token."""
    response = LLMResponse(
        output_ids=[token], logprobs=[-1.0], versions=[0], stop_reason="stop", interruptions=0
    )
    return encode_turn(Turn(response=response, temperature=1.0, prompt=bytes(16)))


class WorkerEvents(Parts):
    """Workers that run episodes, die, and send results twice, late or damaged."""

    @event(worker=WORKERS, credit=st.integers(1, 4), count=st.integers(1, 5))
    def lease(self, worker: str, credit: int, count: int) -> None:
        """Lease up to `count` groups; a lease is sent after a commit."""
        self.hear(worker)
        for _ in range(count):
            group = self.store.next_group()
            due_groups = self.model.due_groups()
            if group is None:
                assert not self.model.may_create_group and not due_groups
                break
            if group.group_id not in self.model.groups:
                assert self.model.may_create_group and not due_groups
                assert group.group_id == f"g{len(self.model.groups)}"
                self.model.groups[group.group_id] = ModelGroup()
            assert all(group.seq <= int(group_id[1:]) for group_id in due_groups)
            self.grant(self.store.lease(group, worker_id=worker, credit=credit), worker, credit)
        self.commit()

    def grant(self, lease: Lease, worker: str, credit: int) -> None:
        """A lease has exactly the missing members, and their stored turns."""
        self.workers.assign(worker, lease, lease.members)
        group = self.model.groups[lease.group_id]
        assert lease.members == group.due(self.model.now)[:credit]
        turns = {key: turn for key, turn in sorted(group.turns.items()) if key[0] in lease.members}
        if self.model.has_gap and not lease.turns:
            # The store counts from the last planned batch, and may find the turns too old.
            for member in lease.members:
                group.forget_turns(member)
            turns = {}
        assert [(turn.member, turn.seat, turn.index) for turn in lease.turns] == [*turns]
        if turns:
            self.ledger.commit()
            headers, payloads = read_turns(self.ledger.path, lease)
            assert headers == lease.turns
            versions = [turn.oldest_version for turn in headers]
            assert [*zip(versions, payloads, strict=True)] == [*turns.values()]
        assert self.model.version is not None
        assert lease.version == min([self.model.version, *(oldest for oldest, _ in turns.values())])
        assert lease.lease_id not in {other.lease_id for _, other in self.granted}
        group.leases[lease.lease_id] = ModelLease(lease.members, lease.version)
        group.workers[lease.lease_id] = worker
        self.granted.append((worker, lease))

    @event(
        pick=PICK, member=st.sampled_from(MEMBERS), reward=st.sampled_from([0.0, 1.0]),
        age=st.integers(-1, 1), seats=SEATS, is_intact=st.integers(0, 9).map(bool),
    )  # fmt: skip
    def finish(
        self, pick: int, member: int, reward: float, age: int, seats: tuple[str, ...],
        is_intact: bool,
    ) -> None:  # fmt: skip
        """A worker finishes an episode, perhaps of a lost lease, or with a damaged payload."""
        worker, lease = self.pick(pick)
        member = lease.members[member % len(lease.members)]
        newest = max(self.model.newest_version, self.model.num_trained)
        oldest = min(max(0, lease.version + age), newest)
        headers = [
            header(lease.group_id, member, version=oldest, newest=newest, reward=reward, seat=seat)
            for seat in seats
        ]
        payloads = [payload(h) for h in headers]
        if not is_intact:
            payloads[-1] = GARBAGE
        made = Episode(
            lease_id=lease.lease_id,
            group_id=lease.group_id,
            member=member,
            headers=headers,
            failure=None,
        )
        self.send(worker, made, payloads)

    @event(pick=PICK, rewards=st.lists(st.sampled_from([0.0, 1.0]), min_size=3, max_size=3))
    def finish_lease(self, pick: int, rewards: list[float]) -> None:
        """A worker finishes all episodes of a lease."""
        lease = self.pick(pick)[1]
        for member in lease.members:
            self.finish(pick, member, rewards[member], 0, ("agent",), True)

    @event(pick=PICK, member=st.sampled_from(MEMBERS), times=st.integers(1, MAX_ATTEMPTS))
    def fail(self, pick: int, member: int, times: int) -> None:
        """An episode fails, and perhaps again after its back-off."""
        worker, lease = self.pick(pick)
        group_id = lease.group_id
        member = lease.members[member % len(lease.members)]
        for _ in range(times):
            if member in lease.members:
                self.send(worker, failed(lease, member), [])
            self.model.now += 1.0
            self.lease(worker, credit=1, count=1)
            worker, lease = [grant for grant in self.granted if grant[1].group_id == group_id][-1]

    @precondition(lambda self: self.results)
    @event(pick=PICK)
    def send_again(self, pick: int) -> None:
        """A worker sends a result twice, because it got no acknowledgement."""
        self.send(*self.results[-1 - pick % len(self.results)])

    @event(how=st.sampled_from(["worker", "lease", "other group", "new group"]))
    def forge(self, how: str) -> None:
        """A faulty worker sends a result of a lease that it does not have."""
        self.grant_some()
        worker, lease = self.pick(0)
        group_id = lease.group_id
        lease_id = lease.lease_id
        if how == "worker":
            worker = "w1" if worker == "w0" else "w0"
        elif how == "lease":
            lease_id += "9"
        elif how == "other group":
            lease_id = self.granted[0][1].lease_id
        else:
            group_id = f"g{len(self.model.groups)}"
            lease_id = f"{group_id}.1.1"
        made = header(group_id, lease.members[0], version=0, seat="agent")
        self.send(
            worker,
            Episode(
                lease_id=lease_id,
                group_id=group_id,
                member=lease.members[0],
                headers=[made],
                failure=None,
            ),
            [payload(made)],
        )

    def send(self, worker: str, episode: Episode, payloads: list[Payload]) -> None:
        """Deliver a result to the datapipe, and to the model."""
        self.results.append((worker, episode, payloads))
        num_late = self.store.late_results
        result, frames = result_frames(worker, [episode], payloads)
        self.intake.take(result, frames, "")
        self.handler.changed = True
        is_late = self.store.late_results > num_late
        self.expect(worker, episode, payloads, is_late=is_late)
        self.serve()

    def expect(
        self, worker: str, episode: Episode, payloads: list[Payload], *, is_late: bool
    ) -> None:
        ids = (episode.lease_id, episode.group_id, episode.member)
        is_leased = self.model.is_leased(worker, *ids)
        intact = [payload(h) for h in episode.headers]
        if not is_leased or payloads != intact:
            self.model.rejections += 1
        if not is_leased:
            assert not is_late
            return
        group = self.model.groups[episode.group_id]
        lease = group.leases.get(episode.lease_id)
        oldest = min((h.oldest_version for h in episode.headers), default=0)
        if is_late:  # then it is older than its lease, or a lost lease's result than the group
            limit = group.start if lease is None else lease.version
            assert limit is None or oldest < limit or self.model.has_gap
            self.model.late_results += 1
            if lease is None:
                return
        failure = "too_old" if is_late else episode.failure and episode.failure.failure_class
        if payloads != intact:
            failure = "rejected"
        if failure:
            self.model.fail(episode.group_id, episode.member, episode.lease_id, failure)
            return
        by_seat = dict(sorted(zip((h.trajectory_id for h in episode.headers), intact, strict=True)))
        sample = Sample(oldest, episode.headers[0].reward or 0.0, by_seat)
        self.model.finish(episode.group_id, episode.member, sample)

    @event(
        pick=PICK, members=st.lists(st.sampled_from(MEMBERS), min_size=1, max_size=2),
        seat=st.sampled_from(["agent", "judge"]), index=st.integers(0, 1), age=st.integers(-1, 1),
        is_owner=st.integers(0, 9).map(bool),
    )  # fmt: skip
    def store_turns(
        self, pick: int, members: Sequence[int], seat: str, index: int, age: int, is_owner: bool
    ) -> None:
        """A worker, or one that does not have the lease, sends turns of running episodes."""
        worker, lease = self.pick(pick)
        sender = worker if is_owner else "w9"
        newest = max(self.model.newest_version, self.model.num_trained)
        oldest = min(max(0, lease.version + age), newest)
        turns = [
            TurnHeader(member=member, seat=seat, index=index, oldest_version=oldest)
            for member in members
        ]
        payloads = [turn_payload(self.num_payloads + n) for n in range(len(turns))]
        self.num_payloads += len(turns)
        progress = Progress(
            worker_id=sender, lease_id=lease.lease_id, group_id=lease.group_id, turns=turns
        )
        self.intake.take_progress(progress, payloads)
        group = self.model.groups[lease.group_id]
        if group.is_listed and group.workers.get(lease.lease_id, sender) != sender:
            self.model.rejections += 1
        elif group.is_listed and lease.lease_id in group.leases:
            running = group.running(lease.lease_id)
            for turn, text in zip(turns, payloads, strict=True):
                if turn.member in running and oldest >= group.leases[lease.lease_id].version:
                    group.turns[turn.member, seat, index] = (oldest, text)

    def pick(self, number: int) -> tuple[str, Lease]:
        """Return a granted lease with its worker; 0 is the newest."""
        if not self.granted:
            self.grant_some()
        return self.granted[-1 - number % len(self.granted)]

    def hear(self, worker: str, *, capacity: int = 8, holds: bool = True) -> list[Lease]:
        """Send the state of a worker; return the leases that it has lost."""
        known = self.workers.by_id.get(worker)
        held = [*known.leases] if known and holds else []
        state = WorkerState(
            worker_id=worker,
            capacity=capacity,
            held=held,
            split_metrics={},
            process=str(self.processes[worker]),
        )
        return self.workers.update(ROUTE, state)[0]

    @event(how=st.sampled_from(["restarted", "silent", "drains"]))
    def lose_worker(self, how: str) -> None:
        """A worker with a new lease and turns loses its leases; to drain is no failed attempt."""
        worker = self.pick(0)[0]
        self.hear(worker)
        self.lease(worker, credit=2, count=1)
        self.store_turns(0, members=[0, 2], seat="agent", index=0, age=0, is_owner=True)
        if how == "restarted":
            self.processes[worker] += 1
            ended = self.hear(worker, holds=False)
        elif how == "drains":
            ended = self.hear(worker, capacity=0, holds=False)
        else:
            self.model.now += TTL_S + 1.0
            self.hear("w1" if worker == "w0" else "w0")
            ((silent, ended),) = self.workers.expire()
            assert silent.worker_id == worker
        for lease in ended:
            self.store.end_lease(lease, is_lost=how != "drains")
        self.handler.changed = True
        for group_id, group in self.model.groups.items():
            for lease_id in [key for key in group.leases if group.workers.get(key) == worker]:
                self.model.end_lease(group_id, lease_id, is_lost=how != "drains")
        self.serve()

    # ------------------------------------------------------------ normal work

    def grant_some(self) -> None:
        self.lease("w0", credit=3, count=1)
        self.lease("w1", credit=2, count=1)

    def send_turns(self) -> None:
        """Send turns in the order 1, 0: concurrent turns end in any order."""
        members = self.pick(0)[1].members
        for index in (1, 0):
            self.store_turns(0, members, seat="agent", index=index, age=0, is_owner=True)

    def send_old_tokens(self) -> None:
        """Send a turn and a result that are older than their lease."""
        self.store_turns(0, MEMBERS, seat="agent", index=0, age=-1, is_owner=True)
        self.finish(0, member=0, reward=1.0, age=-1, seats=("agent",), is_intact=True)

    def forge_worker(self) -> None:
        self.forge("worker")

    def fail_one(self) -> None:
        self.fail(0, member=0, times=1)

    def lose_one(self) -> None:
        self.lose_worker("restarted")

    def finish_one(self) -> None:
        """Finish one episode of the newest lease that is not finished."""
        for lease_id, group_id, members in reversed(self.running()):
            self.finish_normally(lease_id, group_id, members[:1])
            return

    def finish_oldest(self) -> None:
        for lease_id, group_id, members in self.running()[:1]:
            self.finish_normally(lease_id, group_id, members)

    def running(self) -> list[tuple[str, str, list[int]]]:
        """Return lease id, group id and members of each lease with unfinished episodes."""
        return [
            (lease_id, group_id, members)
            for group_id, group in self.model.groups.items()
            if group.state == "leased"
            for lease_id in group.leases
            if (members := group.running(lease_id))
        ]

    def finish_normally(self, lease_id: str, group_id: str, members: list[int]) -> None:
        worker = self.model.groups[group_id].workers[lease_id]
        version = self.model.groups[group_id].leases[lease_id].version
        has_variance = int(group_id[1:]) % 4 != 3
        for member in members:
            reward = float(member % 2) if has_variance else 1.0
            made = header(group_id, member, version=version, reward=reward)
            result = Episode(
                lease_id=lease_id, group_id=group_id, member=member, headers=[made], failure=None
            )
            self.send(worker, result, [payload(made)])
