"""Autoscaling in the datapipe: the limit of each worker and the desired number of workers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from arealite.api.collector_config import AutoscaleConfig
from arealite.api.rollout_messages import WorkerState
from arealite.ext.scaling.scaling import CONFIRM_PERIODS, Scaling, worker_index
from arealite.system.data.dataset import Permutation
from arealite.system.datapipe.group_store import GroupStore
from arealite.system.datapipe.workers import Workers
from arealite.system.ledger.ledger import Ledger
from arealite.system.names.name_registry import NameRegistry
from tests.system.scenes import experiment, tasks

MOST = 10


class Site:
    """Workers with leases, servers with loads, and a `Scaling`."""

    def __init__(self, root: Path, *, fewest: int = 1, highest: int = 3, eta: int = 2) -> None:
        config = experiment(root, num_groups=2, group_size=4, max_staleness=eta)
        ppo = config.trainer.ppo
        own = AutoscaleConfig(enabled=True, min_concurrency=2)
        collector = replace(ppo.collector, autoscale=own, concurrency=MOST)
        config = replace(
            config,
            trainer=replace(config.trainer, ppo=replace(ppo, collector=collector)),
            launcher=replace(config.launcher, rollout_workers=fewest, max_workers=highest),
        )
        self.ledger = Ledger(root / "ledger.sqlite", fingerprint={})
        ppo = config.trainer.ppo
        self.store = GroupStore(
            self.ledger, tasks(5), ppo=ppo, sampler=Permutation(5, seed=1, shuffle=True)
        )
        self.store.version = 0
        self.workers = Workers(ttl_s=100.0)
        registry = NameRegistry(root=root / "names")
        self.scaling = Scaling(
            config=config, registry=registry, groups=self.store, workers=self.workers
        )

    def hear(self, *indices: int) -> None:
        """Send the state of each worker; each lists all its leases."""
        for index in indices:
            name = f"rollout-{index}@host"
            held = list(self.workers.by_id[name].leases) if name in self.workers.by_id else []
            self.workers.update(
                b"route",
                WorkerState(worker_id=name, capacity=64, held=held, split_metrics={}, process="p"),
            )

    def fill(self) -> None:
        """Lease episodes until no worker has credit."""
        while worker := self.workers.most_idle():
            group = self.store._create_group()
            lease = self.store.lease(group, worker_id=worker.worker_id, credit=worker.credit)
            self.workers.assign(worker.worker_id, lease, lease.members)

    def pass_period(self, *, running: int, waiting: int = 0, capacity: int = 1000) -> None:
        """Add a load of the servers, and make a decision."""
        load = {"running": running, "waiting": waiting, "capacity": capacity}
        for _ in range(3):
            self.scaling._sample([load])
        self.scaling._decide()

    def in_flight(self, index: int) -> int:
        return self.workers.by_id[f"rollout-{index}@host"].in_flight


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Any]:
    made: list[Site] = []

    def build(**options: int) -> Site:
        made.append(Site(tmp_path, **options))
        return made[-1]

    yield build
    for each in made:
        each.ledger.close()


def test_worker_starts_with_the_minimum_and_gets_more_while_servers_are_idle(site: Any) -> None:
    it = site(highest=1)
    it.hear(0)
    it.fill()
    assert it.in_flight(0) == 2
    for _ in range(8):
        it.pass_period(running=it.in_flight(0))
        it.fill()
    assert it.in_flight(0) == MOST, "never more than collector.concurrency"


def test_reduction_cancels_no_episode(site: Any) -> None:
    it = site(highest=1)
    it.hear(0)
    for _ in range(8):
        it.pass_period(running=it.in_flight(0))
        it.fill()
    for _ in range(8):
        it.pass_period(running=4, waiting=6, capacity=4)
    worker = it.workers.by_id["rollout-0@host"]
    assert (it.in_flight(0), len(worker.leases)) == (MOST, len(worker.leases))
    assert worker.credit < 0
    it.hear(0)
    assert it.in_flight(0) == MOST, "what it says it holds is not taken away"
    for lease_id, held in list(worker.leases.items()):
        for member in list(held.unfinished):
            it.workers.finish(worker.worker_id, lease_id, member)
    it.fill()
    assert 2 <= it.in_flight(0) < MOST


def test_new_worker_gets_the_same_limit_as_the_others(site: Any) -> None:
    it = site(fewest=2, highest=2)
    it.hear(0)
    for _ in range(9):
        it.pass_period(running=it.in_flight(0))
        it.fill()
    it.hear(1)
    assert it.workers.by_id["rollout-1@host"].limit == it.workers.by_id["rollout-0@host"].limit


def test_worker_is_added_when_all_are_full_and_removed_when_idle(site: Any) -> None:
    it = site()
    it.hear(0)
    assert it.scaling.entry() == {}, "nothing is decided"
    while it.scaling.num_workers < 2:
        it.pass_period(running=it.in_flight(0))
        it.fill()
    assert it.in_flight(0) == MOST
    it.pass_period(running=MOST)
    assert it.scaling.entry() == {"workers": 2}, "one at a time: the second is not here yet"
    it.hear(1)
    it.fill()
    for _ in range(4):
        it.pass_period(running=it.in_flight(0) + it.in_flight(1), capacity=14)
    assert it.in_flight(1) > 0 and it.scaling.num_workers == 2
    for _ in range(30):
        it.pass_period(running=2, waiting=it.in_flight(0) + it.in_flight(1) - 2, capacity=2)
        it.hear(0, 1)
    assert it.scaling.num_workers == 2, "it still runs something"
    leaving = it.workers.by_id["rollout-1@host"]
    assert leaving.limit == 0
    leaving.leases.clear()
    it.pass_period(running=2, waiting=8, capacity=2)
    assert it.scaling.entry() == {"workers": 1}
    assert leaving.limit == 0, "nothing new until it is gone"
    it.workers.update(
        b"route",
        WorkerState(worker_id="rollout-1@host", capacity=0, held=[], split_metrics={}, process="p"),
    )
    it.pass_period(running=2, waiting=8, capacity=2)
    it.hear(1)
    assert it.workers.by_id["rollout-1@host"].limit > 0, "another of that number"


def test_no_worker_is_added_while_staleness_limits_the_episodes(
    site: Any,
) -> None:
    it = site()
    it.hear(0)
    it.fill()
    for _ in range(12):  # nothing more is leased
        it.pass_period(running=1)
    assert it.workers.metrics()["rollout/target_concurrency"] == 3 * MOST
    assert it.scaling.num_workers == 1


def test_leaving_worker_stays_when_it_is_needed_again(site: Any) -> None:
    it = site()
    it.hear(0, 1)
    it.pass_period(running=0)
    assert it.scaling.num_workers == 2, "a datapipe that is back keeps what the launcher started"
    it.fill()
    for _ in range(20):
        it.pass_period(running=1, waiting=3, capacity=1)
    assert it.workers.by_id["rollout-1@host"].limit == 0
    for _ in range(80):
        it.pass_period(running=2)
        it.fill()
    assert it.scaling.num_workers >= 2
    assert it.workers.by_id["rollout-1@host"].limit == MOST


def test_batches_that_leave_many_groups_reduce_rollouts(site: Any) -> None:
    it = site()
    for surplus, damping in ((4, 0.9), (2, 0.9), (0, 1.0)):  # of 4 that may wait
        it.store.next_step += 1
        it.store.counts["complete"] = surplus
        it.scaling.take_batch()
        it.scaling.take_batch()
        assert it.scaling.metrics()["rollout/damping"] == pytest.approx(damping)


def test_servers_without_load_change_nothing(site: Any) -> None:
    it = site()
    it.hear(0)
    for _ in range(5):
        it.scaling._sample([None])
        it.scaling._sample([])
        it.scaling._decide()
    assert it.workers.by_id["rollout-0@host"].limit == 2
    assert it.workers.metrics()["rollout/target_concurrency"] == 2.0
    assert it.workers.metrics()["rollout/workers"] == 1.0


def test_worker_index_is_read_from_the_id() -> None:
    assert [worker_index(name) for name in ("rollout-12@a-3", "rollout-0@b", "w")] == [12, 0, -1]


def test_servers_without_load_are_logged_once(site: Any) -> None:
    it = site()
    with capture_logs() as logs:
        for _ in range(3 * CONFIRM_PERIODS):
            it.scaling._sample([None])
            it.scaling._decide()
    assert [log["event"] for log in logs] == ["no server reports its load"]
