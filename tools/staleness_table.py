"""What wait, mask and drop make of long episodes: trials in virtual time on the real group store.

Lengths are log-normal and latency is proportional to length; nothing sleeps. The real `GroupStore`
and ledger decide what is leased, released and filtered; trainer and workers are a heap of events.
Run: python tools/staleness_table.py [--etas 0 1 2 4 8] [--steps 200]
"""

from __future__ import annotations

import argparse
import bisect
import heapq
import itertools
import math
import random
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from arealite.api.payloads import Payload
from arealite.api.rollout_messages import Episode, Lease
from arealite.api.task import Task
from arealite.api.trainer import PPOConfig
from arealite.api.trainer_messages import StepReport
from arealite.api.trajectory import TrajectoryHeader
from arealite.system.data.dataset import Permutation
from arealite.system.datapipe.group_store import GroupStore
from arealite.system.ledger.ledger import Ledger

MEDIAN_TOKENS, SIGMA = 600, 1.0
"""Of the log-normal lengths: mean 990, p95 3,100, one in a thousand above 13,000."""
TOKENS_PER_S = 50.0
"""Of one episode; it does not depend on how many run."""
SLOTS = 64
"""Episodes in flight at most."""
GROUP_SIZE, NUM_GROUPS = 4, 8
TRAIN_S, PUBLISH_S = 8.0, 1.0
NO_PAYLOAD = Payload(prompt=b"", turns=b"")


def length_of(seed: int, group_id: str, member: int) -> int:
    """Tokens of an episode: the same whatever the policy."""
    dice = random.Random(f"{seed}/{group_id}/{member}")
    return max(1, round(math.exp(dice.gauss(math.log(MEDIAN_TOKENS), SIGMA))))


@dataclass
class Sample:
    """One trained episode."""

    group_id: str
    tokens: int
    with_loss: int
    age: int
    """Of its oldest token with loss."""


@dataclass
class Trial:
    """One trial of `steps` steps under a policy; call `run`."""

    folder: Path
    policy: str
    eta: int
    steps: int
    seed: int = 1
    group_size: int = GROUP_SIZE
    num_groups: int = NUM_GROUPS
    free: int = SLOTS
    now: float = 0.0
    step: int = 0
    """The next to be trained."""
    idle_since: float | None = 0.0
    waited: float = 0.0
    paced: float = 0.0
    """Of `waited`: seconds with a full batch that `wait` kept back."""
    samples: list[Sample] = field(default_factory=list[Sample])
    published: list[float] = field(default_factory=lambda: [0.0])
    """When each version reached the servers."""
    events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.order = itertools.count()
        self.started: dict[tuple[str, int], float] = {}
        self.ppo = PPOConfig(
            batch_size=self.group_size * self.num_groups,
            max_staleness=self.eta,
            staleness_policy=self.policy,  # type: ignore[arg-type]
            collector=replace(PPOConfig().collector, group_size=self.group_size),
        )
        self.open()
        self.store.version = 0

    def open(self) -> None:
        """Open the ledger, and read back what it knows."""
        tasks = [
            Task(task_id=f"train-{row}", prompt="", ground_truth=None, extra_info={})
            for row in range(1000)
        ]
        about = {"group_size": str(self.group_size)}
        self.ledger = Ledger(self.folder / "ledger.sqlite", fingerprint=about)
        sampler = Permutation(len(tasks), seed=self.seed, shuffle=True)
        self.store = GroupStore(self.ledger, tasks, ppo=self.ppo, sampler=sampler)

    def run(self) -> Trial:
        """Play until the last step is trained."""
        while self.step < self.steps:
            self.pump()
            if not self.events:
                raise RuntimeError(f"deadlock at step {self.step}")
            before = self.now
            self.now, _, act = heapq.heappop(self.events)
            if self.idle_since is not None and self.store.counts["complete"] >= self.num_groups:
                self.paced += self.now - before
            act()
        self.ledger.commit()
        self.ledger.close()
        return self

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.order), act))

    def pump(self) -> None:
        """What the datapipe does after every event: give leases, compose the next batch."""
        while self.free > 0 and (group := self.store.next_group()) is not None:
            self.begin(self.store.lease(group, worker_id="w", credit=self.free))
        if self.store.next_step <= self.step + 1:  # asked for a step ahead
            self.store.compose()
        if self.idle_since is not None and self.step in self.store.batches:
            self.waited += self.now - self.idle_since
            self.idle_since = None
            self.after(TRAIN_S, self.trained)

    def begin(self, lease: Lease) -> None:
        for member in lease.members:
            self.free -= 1
            self.started[lease.group_id, member] = self.now
            seconds = length_of(self.seed, lease.group_id, member) / TOKENS_PER_S
            self.after(seconds, lambda member=member: self.finish(lease, member))

    def finish(self, lease: Lease, member: int) -> None:
        self.free += 1
        tokens = length_of(self.seed, lease.group_id, member)
        header = TrajectoryHeader(
            trajectory_id=f"{lease.group_id}/{member}/agent",
            group_id=lease.group_id,
            member=member,
            seat="agent",
            task_id=lease.task.task_id,
            reward=1.0,
            reward_parts={},
            segment_lengths=[tokens],
            trained_tokens=tokens,
            oldest_version=lease.version,
            newest_version=len(self.published) - 1,
            turns=1,
            truncated=False,
            interruptions=0,
            seconds=1.0,
            waits={},
        )
        self.store.add_episode(
            Episode(
                lease_id=lease.lease_id,
                group_id=lease.group_id,
                member=member,
                headers=[header],
                failure=None,
            ),
            [NO_PAYLOAD],
        )

    def trained(self) -> None:
        headers = [h for group in self.store.batches[self.step] for h in group.headers]
        self.samples += [self.sample(header) for header in headers]
        self.store.mark_trained(self.step)
        self.ledger.train(
            StepReport(step=self.step, trained=[h.trajectory_id for h in headers], metrics={})
        )
        self.ledger.commit()
        self.step += 1
        self.idle_since = self.now
        self.after(PUBLISH_S, lambda version=self.step: self.publish(version))

    def publish(self, version: int) -> None:
        self.published.append(self.now)
        self.store.version = version
        self.ledger.set_meta("version", str(version))

    def sample(self, header: TrajectoryHeader) -> Sample:
        """Say which of its tokens the trainer gives loss: all, or under mask the young ones."""
        begin, tokens = self.started[header.group_id, header.member], header.num_tokens
        oldest, limit = header.oldest_version, self.step - self.eta
        if self.policy != "mask" or oldest >= limit:
            return Sample(header.group_id, tokens, tokens, self.step - oldest)
        old = 0  # until the weights of version `limit` came
        if limit < len(self.published):
            old = min(tokens, math.ceil((self.published[limit] - begin) * TOKENS_PER_S))
        return Sample(header.group_id, tokens, tokens - old, self.eta if old < tokens else 0)

    def offered(self) -> list[int]:
        """Lengths of all episodes of the groups offered so far."""
        groups = range(self.store.offered)
        return [
            length_of(self.seed, f"g{seq}", m) for seq in groups for m in range(self.group_size)
        ]


def distance(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the Kolmogorov-Smirnov statistic: the largest difference of the two distributions."""
    a, b = sorted(ours), sorted(theirs)

    def below(values: Sequence[float], limit: float) -> float:
        return bisect.bisect_right(values, limit) / len(values)

    return max(abs(below(a, value) - below(b, value)) for value in {*a, *b})


def p95(values: Sequence[float]) -> float:
    """Return the 95th percentile."""
    return sorted(values)[int(len(values) * 0.95)]


def row(trial: Trial) -> list[str]:
    """Describe a finished trial."""
    stale = trial.store.counts["filtered:stale"] * trial.group_size
    trained = [s.with_loss for s in trial.samples]
    return [
        trial.policy,
        str(trial.eta),
        f"{len(trained) / (len(trained) + stale):.1%}",
        f"{sum(trained) / sum(s.tokens for s in trial.samples):.1%}",
        f"{statistics.mean(trained):,.0f}",
        f"{p95(trained):,.0f}",
        f"{distance(trained, trial.offered()):.3f}",
        f"{trial.steps / trial.now * 3600:.0f}",
        str(max(s.age for s in trial.samples)),
        f"{trial.waited / trial.now:.0%}",
        f"{trial.paced / trial.now:.0%}",
    ]


COLUMNS = (
    "policy",
    "η",
    "samples trained",
    "of their tokens, with loss",
    "mean length",
    "p95 length",
    "KS distance",
    "steps/h",
    "max age",
    "trainer waits",
    "… for slow episodes",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--etas", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rows: list[list[str]] = []
    offered: list[int] = []
    for policy in ("wait", "mask", "drop"):
        for eta in options.etas:
            with tempfile.TemporaryDirectory() as name:
                trial = Trial(Path(name), policy, eta, options.steps, options.seed).run()
            rows.append(row(trial))
            offered = trial.offered()
    print(f"Offered: mean {statistics.mean(offered):,.0f}, p95 {p95(offered):,.0f} tokens.\n")
    print("| " + " | ".join(COLUMNS) + " |")
    print("|---" * len(COLUMNS) + "|")
    for cells in rows:
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
