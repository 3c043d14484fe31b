"""The scenario of a seed: settings of the run, behaviour of episodes, and fault rates."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path

from arealite.api.collector_config import AgentConfig
from arealite.api.env import EnvConfig
from arealite.api.experiment_config import CurriculumConfig, DatapipeConfig, ExperimentConfig
from arealite.api.task import Task

FAULTS = {
    "kill datapipe": 4.0,
    "kill datapipe in a write": 4.0,
    "kill datapipe at a message": 2.0,
    "kill worker": 3.0,
    "kill worker at a message": 1.0,
    "kill rank": 3.0,
    "kill rank at a message": 1.5,
    "kill launcher": 1.0,
    "stop run": 1.0,
    "freeze datapipe": 1.0,
    "freeze worker": 1.0,
    "freeze rank": 1.0,
    "reset connection": 2.0,
    "partition": 2.5,
    "kill server": 1.0,
    "pause machine": 0.3,
    "full disk": 0.4,
    "terminate worker": 0.5,
}
"""Kinds of fault and their default weights; a seed draws its own."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """All settings of a simulation, drawn from its seed."""

    seed: int
    policy: str
    eta: int
    num_groups: int
    group_size: int
    updates: int
    total_steps: int
    rows: int
    shuffle: bool
    partial_group: str
    max_attempts: int
    filter_zero_variance: bool
    ranks: int
    workers: int
    concurrency: int
    servers: int
    checkpoint_every: int
    eval_every: int
    eval_rows: int
    samples: int
    turns: int
    resumable: bool
    failure_rate: float
    latency_s: float
    sigma: float
    tail_share: float
    tail_s: float
    train_s: float
    lease_ttl_s: float
    episode_timeout_s: float
    fault_s: float
    """Virtual seconds with faults."""
    faults_per_s: float
    weights: dict[str, float]
    loss: float
    duplicates: float
    net_latency_s: float
    net_jitter: float
    curriculum: bool

    @classmethod
    def draw(cls, seed: int) -> Scenario:
        """Return the scenario of a seed."""
        rng = random.Random(f"scenario {seed}")
        calm = rng.random() < 0.1
        weights = {name: w * rng.choice((0.0, 1.0, 1.0, 3.0)) for name, w in FAULTS.items()}
        num_groups, group_size = rng.choice((1, 2, 2, 3)), rng.choice((1, 2, 2, 3))
        return cls(
            seed=seed,
            policy=rng.choice(("wait", "wait", "mask", "drop")),
            eta=rng.choice((0, 1, 2, 2, 4)),
            num_groups=num_groups,
            group_size=group_size,
            updates=rng.choice((1, 1, 2)) if num_groups > 1 else 1,
            total_steps=rng.randint(3, 7),
            rows=rng.choice((3, 7, 20)),
            shuffle=rng.random() < 0.7,
            partial_group=rng.choice(("retry", "retry", "min_size", "drop")),
            max_attempts=rng.choice((1, 2, 3, 3)),
            filter_zero_variance=group_size > 1 and rng.random() < 0.3,
            ranks=rng.choice((1, 1, 2, 3)),
            workers=rng.choice((1, 2, 2, 3)),
            concurrency=rng.choice((1, 2, 3, 8, 16)),
            servers=rng.choice((1, 2)),
            checkpoint_every=rng.choice((0, 1, 1, 2, 3)),
            eval_every=rng.choice((0, 0, 1, 2)),
            eval_rows=rng.choice((0, 0, 1, 2)),
            samples=rng.choice((1, 2)),
            turns=rng.choice((1, 1, 2, 3)),
            resumable=rng.random() < 0.6,
            failure_rate=rng.choice((0.0, 0.0, 0.05, 0.2)),
            latency_s=rng.choice((0.05, 0.2, 0.5)),
            sigma=rng.choice((0.1, 0.7, 1.3)),
            tail_share=rng.choice((0.0, 0.02, 0.1)),
            tail_s=rng.choice((5.0, 20.0)),
            train_s=rng.choice((0.05, 0.3, 1.0)),
            lease_ttl_s=rng.choice((3.0, 6.0, 15.0)),
            episode_timeout_s=rng.choice((8.0, 30.0)),
            fault_s=rng.uniform(3.0, 25.0),
            faults_per_s=0.0 if calm else rng.choice((0.1, 0.3, 0.7)),
            weights=weights,
            loss=0.0 if calm else rng.choice((0.0, 0.0, 0.01, 0.08)),
            duplicates=rng.choice((0.0, 0.02, 0.1)),
            net_latency_s=rng.choice((0.0002, 0.002, 0.03)),
            net_jitter=rng.choice((0.1, 1.0, 2.0)),
            curriculum=rng.random() < 0.3,
        )

    def experiment(self, root: Path) -> ExperimentConfig:
        """Return the package's config of the scenario."""
        config = ExperimentConfig(seed=self.seed)
        ppo = config.trainer.ppo
        collector = replace(
            ppo.collector,
            agent=AgentConfig(type="simulated"),
            env=EnvConfig(type="simulated"),
            group_size=self.group_size,
            concurrency=self.concurrency,
            episode_timeout_s=self.episode_timeout_s,
        )
        ppo = replace(
            ppo,
            total_steps=self.total_steps,
            batch_size=self.num_groups * self.group_size,
            updates=min(self.updates, self.num_groups),
            max_staleness=self.eta,
            staleness_policy=self.policy,  # type: ignore[arg-type]
            filter_zero_variance=self.filter_zero_variance,
            partial_group=self.partial_group,  # type: ignore[arg-type]
            max_attempts=self.max_attempts,
            collector=collector,
            eval=replace(ppo.eval, every_steps=self.eval_every, samples=self.samples),
        )
        return replace(
            config,
            cluster=replace(config.cluster, run_root=str(root), name_root=str(root / "names")),
            dataset=replace(config.dataset, shuffle=self.shuffle),
            trainer=replace(config.trainer, ppo=ppo),
            datapipe=DatapipeConfig(
                lease_ttl_s=self.lease_ttl_s,
                max_failed_share=1.0,
                stall_timeout_s=3600.0,
                curriculum=CurriculumConfig(by="level" if self.curriculum else "", window=3),
            ),
        )

    def changed(self, rng: random.Random) -> Scenario:
        """Return a changed scenario, for a launch after a stop or a crash."""
        return replace(
            self,
            policy=rng.choice((self.policy, "wait", "mask", "drop")),
            eta=rng.choice((self.eta, self.eta, 0, 1, 2, 4)),
            num_groups=rng.choice((self.num_groups, 1, 2, 3)),
        )

    @property
    def oldest(self) -> float:
        """Maximum age of a trained token in the ledger."""
        return float("inf") if self.policy == "mask" else self.eta

    def tasks(self, count: int, split: str) -> list[Task]:
        """Return the rows of a split."""
        return [
            Task(
                task_id=f"{split}-{row}",
                prompt="?",
                ground_truth=None,
                extra_info={"data_source": "simulated", "level": level_of(row)},
            )
            for row in range(count)
        ]


def level_of(row: int) -> int:
    """Return the class of a row; few rows are of the second class."""
    return int(row % 3 == 1)
