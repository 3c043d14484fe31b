"""No trained token is older than η in any history; under `wait` no group is discarded or blocks.

Trials in virtual time on the real store and ledger, with the faults of a run: workers that die with
or without stored turns, late results, failures, restarts and roll-backs.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arealite.algo import staleness
from arealite.api.rollout_messages import Episode, Lease, Progress, TurnHeader
from arealite.api.trainer_messages import StepReport
from arealite.api.trajectory import TrajectoryHeader
from arealite.ext.audit.audit import audit
from arealite.system.ledger import group as open_group
from arealite.system.ledger.ledger import connect, decode_header
from tests.system.scenes import failed, payload
from tools.staleness_table import Trial

PATIENCE = 1500
"""Number of events without a trained step after which a trial counts as stuck."""


@dataclass
class Running:
    """One episode that a worker runs."""

    lease: Lease
    member: int
    oldest: int
    """Versions of its tokens, including the turns from which it resumed."""
    turns: int = 0
    is_lost: bool = False
    is_over: bool = False


@dataclass
class Chaos(Trial):
    """A trial with latencies and faults drawn from `rng`."""

    rng: random.Random = field(default_factory=random.Random)
    quiet_from: int = 1_000_000
    """The step from which no fault occurs."""
    checkpointed: int = 0
    running: dict[str, list[Running]] = field(default_factory=dict[str, list[Running]])
    """By lease id."""
    happened: dict[str, int] = field(default_factory=dict[str, int])
    history: dict[int, list[str]] = field(default_factory=dict[int, list[str]])
    """Trajectory ids of each step ever trained."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # Without the back-off of failures, which is in seconds; attempts without a bound.
        self.ppo = replace(self.ppo, max_attempts=10**6)
        self.store.ppo = self.ppo
        self.store.ledger.set_meta("version", "0")
        self.servers = 0
        self.boot = 0
        """Number of starts of the trainer; events of an earlier start are ignored."""
        self.stuck = 0

    def pump(self) -> None:
        self.stuck += 1
        assert self.stuck < PATIENCE, f"stuck at step {self.step}: {self.describe()}"
        if self.step < self.quiet_from and self.rng.random() < 0.02:
            name = self.rng.choice(["restart", "roll_back", "checkpoint"])
            self.happened[name] = self.happened.get(name, 0) + 1
            getattr(self, name)()
        super().pump()

    def describe(self) -> str:
        groups = [(g.group_id, g.state, g.start, g.step) for g in self.store.groups.values()]
        return f"version {self.store.version}, servers {self.servers}, {groups}"

    # ------------------------------------------------------------ workers

    def begin(self, lease: Lease) -> None:
        assert lease.version <= self.servers
        for member in lease.members:
            self.free -= 1
            kept = [t.oldest_version for t in lease.turns if t.member == member]
            turns = sum(t.member == member for t in lease.turns)
            run = Running(lease, member, min([self.servers, *kept]), turns)
            self.running.setdefault(lease.lease_id, []).append(run)
            slow = 30.0 if self.rng.random() < 0.1 else 1.0
            self.after(self.rng.expovariate(1.0) * slow, lambda run=run: self.go_on(run))

    def go_on(self, run: Running) -> None:
        """Finish a turn; the episode may end, or the worker may die."""
        if self.servers < run.lease.version:  # after a roll-back: clients ask for no older weights
            self.after(1.0, lambda: self.go_on(run))
            return
        draw = self.rng.random() if self.step < self.quiet_from else 1.0
        if draw < 0.3:
            self.tell(run)
            self.after(self.rng.expovariate(1.0), lambda: self.go_on(run))
        elif draw < 0.4 and not run.is_lost:
            self.lose(run)
        else:
            self.free += not run.is_lost
            run.is_over = True
            is_failed = draw < 0.5
            made = failed(run.lease, run.member) if is_failed else self.episode(run)
            for _ in range(1 + (draw < 0.6)):  # also twice
                self.store.add_episode(made, [] if is_failed else [payload(made.headers[0])])

    def tell(self, run: Running) -> None:
        turn = TurnHeader(
            member=run.member, seat="agent", index=run.turns, oldest_version=run.oldest
        )
        run.turns += 1
        told = Progress(
            worker_id="w", lease_id=run.lease.lease_id, group_id=run.lease.group_id, turns=[turn]
        )
        self.store.add_turns(told, [b"turn"])

    def lose(self, run: Running) -> None:
        """Lose a lease; its results may still arrive."""
        self.happened["lost"] = self.happened.get("lost", 0) + 1
        self.store.end_lease(run.lease, is_lost=True)
        for other in self.running[run.lease.lease_id]:
            self.free += not (other.is_lost or other.is_over)
            other.is_lost = True
        run.is_over = self.rng.random() < 0.5
        if not run.is_over:
            self.after(self.rng.expovariate(0.1), lambda: self.go_on(run))

    def episode(self, run: Running) -> Episode:
        newest = max(run.oldest, self.servers)
        header = TrajectoryHeader(
            trajectory_id=f"{run.lease.group_id}/{run.member}/agent",
            group_id=run.lease.group_id,
            member=run.member,
            seat="agent",
            task_id=run.lease.task.task_id,
            reward=float(self.rng.random() < 0.8),
            reward_parts={},
            segment_lengths=[6],
            trained_tokens=3,
            oldest_version=run.oldest,
            newest_version=newest,
            turns=1,
            truncated=False,
            interruptions=0,
            seconds=1.0,
            waits={},
        )
        return Episode(
            lease_id=run.lease.lease_id,
            group_id=run.lease.group_id,
            member=run.member,
            headers=[header],
            failure=None,
        )

    # ------------------------------------------------------------ trainer

    def after(self, seconds: float, act) -> None:
        if getattr(act, "__name__", "") == "trained":
            boot = self.boot
            super().after(seconds, lambda: act() if boot == self.boot else None)
        else:
            super().after(seconds, act)

    def trained(self) -> None:
        self.stuck = 0
        headers = [h for group in self.store.batches[self.step] for h in group.headers]
        ids = [header.trajectory_id for header in headers]
        assert self.history.setdefault(self.step, ids) == ids, "a step is trained as it was"
        if self.policy != "mask":
            assert max(self.step - h.oldest_version for h in headers) <= self.eta
        self.store.mark_trained(self.step)
        self.ledger.train(StepReport(step=self.step, trained=ids, metrics={}))
        self.ledger.commit()
        self.step += 1
        self.idle_since = self.now
        boot, version = self.boot, self.step
        self.after(self.rng.random(), lambda: self.publish(version) if boot == self.boot else None)

    def publish(self, version: int) -> None:
        self.servers = version
        self.store.version = version
        self.ledger.set_meta("version", str(version))

    def checkpoint(self) -> None:
        self.checkpointed = self.step
        self.store.mark_durable(self.step)
        self.ledger.checkpoint(self.step, "/x")

    def roll_back(self) -> None:
        """Kill the trainer and restart it from its checkpoint."""
        self.ledger.commit()
        self.boot += 1
        self.step, self.idle_since = self.checkpointed, None
        self.store.roll_back(self.step)
        boot = self.boot
        self.after(self.rng.random() * 5, lambda: self.return_(boot))

    def return_(self, boot: int) -> None:
        if boot == self.boot:
            self.publish(self.step)
            self.idle_since = self.now

    def restart(self) -> None:
        """Kill the datapipe just after a commit and restart it from the ledger."""
        self.ledger.commit()
        self.ledger.close()
        self.open()


@contextmanager
def played(seed: int, policy: str, eta: int, num_groups: int, steps: int = 25) -> Iterator[Chaos]:
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as name, patch.object(open_group, "BACK_OFF_S", 0.0):
        trial = Chaos(
            Path(name),
            policy,
            eta,
            steps,
            seed % 1000,
            2,
            num_groups,
            rng.randint(1, 12),
            rng=rng,
            quiet_from=steps - 4,
        )
        trial.run()
        yield trial


def check(trial: Chaos, eta: int) -> None:
    """Check the file with the audit and with every trained header."""
    report = audit(trial.ledger.path)
    assert report.ok, report.table()
    assert report.groups.trained == trial.steps * trial.num_groups
    with closing(connect(trial.ledger.path, read_only=True)) as db:
        rows = db.execute(
            "SELECT g.step, t.header FROM trajectories t JOIN groups g USING (group_id) "
            "WHERE g.state IN ('trained', 'durable')"
        ).fetchall()
    ages = [step - decode_header(blob).oldest_version for step, blob in rows]
    assert len(ages) == trial.steps * trial.num_groups * trial.group_size
    if trial.policy != "mask":
        assert max(ages) <= eta
    assert min(ages) >= 0


CASES = {"seed": st.integers(0, 2**32), "eta": st.integers(0, 4), "num_groups": st.integers(1, 3)}


@settings(max_examples=30, deadline=None)
@given(**CASES)
def test_wait_discards_nothing_and_never_blocks_for_good(
    seed: int, eta: int, num_groups: int
) -> None:
    with played(seed, "wait", eta, num_groups) as trial:
        check(trial, eta)
        assert not [name for name in trial.store.counts if name.startswith("filtered")]
        trained = {key.split("/")[0] for s in range(trial.steps) for key in trial.history[s]}
        still_open = {*trial.store.groups} | {
            g.group_id
            for s, groups in trial.store.batches.items()
            if s >= trial.step
            for g in groups
        }
        assert trained | still_open == {f"g{seq}" for seq in range(trial.store.offered)}
        assert not trained & still_open


@settings(max_examples=12, deadline=None)
@given(policy=st.sampled_from(["mask", "drop"]), **CASES)
def test_mask_and_drop_keep_the_staleness_bound(
    policy: str, seed: int, eta: int, num_groups: int
) -> None:
    with played(seed, policy, eta, num_groups) as trial:
        check(trial, eta)
        filtered = {name for name in trial.store.counts if name.startswith("filtered:")}
        assert filtered <= ({"filtered:stale"} if policy == "drop" else set())


def test_every_fault_occurs_in_the_trials(tmp_path: Path) -> None:
    """Each fault occurs, and without policy `wait` the bound would be broken."""
    happened: set[str] = set()
    oldest = stale = 0
    for seed in range(6):
        with played(seed, "mask", 1, 2) as trial:
            oldest = max(oldest, audit(trial.ledger.path).max_staleness)
            happened |= trial.happened.keys()
        with played(seed, "drop", 1, 2) as trial:
            stale += trial.store.counts["filtered:stale"]
    assert happened == {"restart", "roll_back", "checkpoint", "lost"}
    assert oldest > 1
    assert stale > 0


may_lease = staleness.may_lease


def one_batch_more(outstanding: int, version: int, *, eta: int, num_groups: int) -> bool:
    return may_lease(outstanding, version, eta=eta + 1, num_groups=num_groups)


@pytest.mark.parametrize(
    ("name", "rule"), [("fits", lambda *_, **__: True), ("may_lease", one_batch_more)]
)
def test_broken_rule_is_detected(name: str, rule: Callable[..., bool]) -> None:
    """The property detects batches released too early, and one group admitted too many."""
    with patch.object(staleness, name, rule), pytest.raises(AssertionError):
        for seed in range(10):
            with played(seed, "wait", 1, 2) as trial:
                check(trial, 1)
                assert not [n for n in trial.store.counts if n.startswith("filtered")]
