"""Writes the ledger of a small run with the real store and ledger."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from arealite.api.rollout_messages import Lease
from arealite.api.trainer_messages import StepReport
from arealite.api.trajectory import TrajectoryHeader
from arealite.base import config as base_config
from arealite.base.trial_files import RunPaths
from arealite.system.data.dataset import Permutation
from arealite.system.datapipe.group_store import GroupStore
from arealite.system.ledger.ledger import Ledger
from tests.system.scenes import episode, experiment, failed, payload, tasks


@dataclass(frozen=True)
class Shape:
    """Size of a run; every second step has a checkpoint."""

    steps: int = 6
    groups: int = 3
    tokens: int = 60
    every: int = 2


class SmallRun:
    """Trains one step after the other; every fifth group is filtered."""

    def __init__(self, folder: Path, shape: Shape) -> None:
        self.shape, self.dice = shape, random.Random(7)
        self.paths = RunPaths(folder)
        config = experiment(
            folder, num_groups=shape.groups, max_attempts=1, filter_zero_variance=True
        )
        folder.mkdir(parents=True, exist_ok=True)
        base_config.save(replace(config), self.paths.config)
        self.ledger = Ledger(self.paths.ledger, fingerprint={"group_size": "2"})
        ppo = config.trainer.ppo
        self.store = GroupStore(
            self.ledger, tasks(5), ppo=ppo, sampler=Permutation(5, seed=1, shuffle=True)
        )
        self.store.version = self.step = self.store.next_step

    def play(self, lease: Lease) -> None:
        """Finish a lease with different rewards, or with equal rewards to filter the group."""
        seq = int(lease.group_id[1:])
        for member in lease.members:
            if seq == 2 and not self.store.groups[lease.group_id].failures:
                self.store.add_episode(failed(lease, member), [])
                return
            reward = 0.5 if seq % 5 == 3 else float(member)
            newest = min(self.step, lease.version + member)
            made = episode(lease, member, reward=reward, tokens=self.shape.tokens, newest=newest)
            self.store.add_episode(made, [payload(made.headers[0])])

    def train(self) -> None:
        """Complete a batch, leave one group in flight, and train the batch."""
        self.store.version = max(0, self.step - 1)  # one update behind
        while (groups := self.store.compose()) is None:
            group = self.store.next_group()
            assert group is not None
            self.play(self.store.lease(group, worker_id="w", credit=2))
            self.ledger.commit()
        headers: list[TrajectoryHeader] = [h for group in groups for h in group.headers]
        self.ledger.commit()
        self.store.mark_trained(self.step)
        ids = [header.trajectory_id for header in headers]
        self.ledger.train(
            StepReport(
                step=self.step,
                trained=ids,
                metrics={"reward/mean": 0.5},
                ranks=1,
                fingerprint=f"{self.step:x}",
            )
        )
        self.step += 1
        self.ledger.set_meta("version", str(self.step))
        if self.step % self.shape.every == 0:
            self.checkpoint()
        self.ledger.commit()

    def checkpoint(self) -> None:
        self.store.mark_durable(self.step)
        self.ledger.checkpoint(self.step, f"/step-{self.step:06d}")

    def buffer(self) -> None:
        """Add two complete groups and one group in flight."""
        for number in range(3):
            group = self.store.next_group()
            assert group is not None
            lease = self.store.lease(group, worker_id="w", credit=2)
            if number < 2:
                self.play(lease)
        self.ledger.commit()


def make_run(
    folder: Path,
    shape: Shape,
    *,
    leave_log: bool = False,
    on_step: Callable[[SmallRun], None] | None = None,
) -> Path:
    """Write a run's ledger; `leave_log` leaves its newest part in the log, as after a kill."""
    run = SmallRun(folder, shape)
    for step in range(shape.steps):
        if leave_log and step == shape.steps // 2:
            run.ledger.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            run.ledger.connection.execute("PRAGMA wal_autocheckpoint = 0")
        run.train()
        if on_step:
            on_step(run)
    run.store.version = run.step
    run.buffer()
    if leave_log:
        kept = folder.with_name(f"{folder.name}.kept")
        shutil.copytree(folder, kept)
    run.ledger.close()
    if leave_log:
        shutil.rmtree(folder)
        kept.rename(folder)
    return RunPaths(folder).ledger
