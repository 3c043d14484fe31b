"""One rank of a step of PPO on given episodes.

The folder holds `model`; ranks leave `out-<world size>-<rank>.pt`: the weights of policy and critic
and the step's metrics. RANK, WORLD_SIZE and MASTER_* come from the environment.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from arealite.api.algorithm import (
    AdvantageConfig,
    CriticConfig,
    KLConfig,
    LossConfig,
    ShapingConfig,
)
from arealite.api.collector_config import CollectorConfig
from arealite.api.engine_config import FSDPConfig, OptimizerConfig, TrainEngineConfig
from arealite.api.experiment_config import ExperimentConfig, ModelConfig
from arealite.api.llm import SamplingConfig
from arealite.api.trainer import CheckpointConfig, PPOConfig, TrainerConfig
from arealite.api.trajectory import Segment, TrajectoryHeader
from arealite.api.trial import ClusterConfig
from arealite.impl.trainer.base import Components, load_ppo_engines
from arealite.impl.trainer.ppo import PPOTrainer
from arealite.impl.trainer.rank_group import World
from tests.impl.trainer.scripted import Events, ScriptedLink, ScriptedPipe, ScriptedPublisher
from tests.impl.trainer.trajectories import batch, header, segment

OPTIMIZER = OptimizerConfig(type="sgd", beta1=0.0, clip_grad_norm=0.0, warmup_steps=0)
KINDS = ("gae", "grpo")


def algorithm(kind: str) -> dict[str, Any]:
    """Return a config with all options enabled."""
    return {
        "reward": ShapingConfig(scale=0.5, overlong_buffer=4),
        "advantage": AdvantageConfig(type=kind, normalize=True),
        "loss": LossConfig(
            m2_threshold=0.05,
            entropy_coef=0.01 if kind == "gae" else 0.0,
            reduction="token_mean" if kind == "gae" else "seq_mean_token_mean",
        ),
        "kl": KLConfig(
            coef=0.05, place="loss" if kind == "grpo" else "reward", reference="initial"
        ),
        "critic": CriticConfig(lr=0.1, optimizer=OPTIMIZER),
        "optimizer": OPTIMIZER,
    }


def experiment(folder: Path, kind: str, world_size: int) -> ExperimentConfig:
    """Return small micro-batches for two ranks, and one packed micro-batch for one rank."""
    fsdp = FSDPConfig(max_tokens_per_microbatch=12)
    if world_size == 1:
        fsdp = FSDPConfig(layout="packed")
    ppo = PPOConfig(
        lr=0.05,
        total_steps=1,
        updates=2,
        max_staleness=0,
        collector=CollectorConfig(sampling=SamplingConfig(max_new_tokens=8)),
        engine=TrainEngineConfig(fsdp=fsdp),
        checkpoint=CheckpointConfig(every_steps=0, export=False),
        **algorithm(kind),
    )
    return ExperimentConfig(
        trial_name=f"{kind}-{world_size}",
        model=ModelConfig(path=str(folder / "model")),
        cluster=ClusterConfig(run_root=str(folder)),
        trainer=TrainerConfig(type="ppo", ppo=ppo),
    )


def episodes(step: int) -> list[tuple[TrajectoryHeader, list[Segment]]]:
    """Draw 12 episodes of 4 groups, of one to three segments each."""
    draw = np.random.default_rng(step)
    played = []
    for name in "abcd":
        for member in range(3):
            parts = [
                segment(
                    draw.integers(3, 60, size).tolist(),
                    sampled=int(size) - 2,
                    version=step,
                    logprob=-4.0 - draw.random(),
                    reward=float(draw.integers(0, 3)),
                )
                for size in draw.integers(3, 11, int(draw.integers(1, 4))).tolist()
            ]
            reward = sum(float(np.frombuffer(part.rewards, "<f4").sum()) for part in parts)
            cut = bool(draw.integers(2))
            made = header(f"{name}{step}/{member}/agent", parts, reward=reward, truncated=cut)
            played.append((made, parts))
    return played


class GivenLink(ScriptedLink):
    """A link that returns this rank's shard of the given episodes."""

    rank, size = 0, 1

    def next_batch(self, step: int, **_: Any) -> Any:
        ranks = np.random.default_rng(9).integers(0, self.size, 12).tolist()
        updates = [0] * 6 + [1] * 6
        sent = {"step": step, "rank": self.rank, "ranks": ranks, "minibatches": updates}
        return batch(episodes(step), **sent)


def main(folder: Path) -> None:
    """Train with one kind of advantage, then with another."""
    out = dict[str, Any]()
    world = Stays.init(threads=1, seed=1)
    GivenLink.rank, GivenLink.size = world.rank, world.size
    for kind in KINDS:
        config, pipe = experiment(folder, kind, world.size), ScriptedPipe(Events())
        connect: Any = lambda: GivenLink(pipe)  # noqa: B023, E731
        publisher = Publisher(pipe.events) if world.is_rank0 else None
        parts = Components(
            world=world, connect=connect, publisher=publisher, **load_ppo_engines(config)
        )
        trainer, found = PPOTrainer(config, parts), out.setdefault(kind, {})
        trainer.join_publish = lambda: found.update(weights(parts))  # type: ignore[method-assign]  # noqa: B023
        trainer.train()
        found["metrics"] = [report.metrics for report in pipe.reports]
    torch.save(out, folder / f"out-{world.size}-{world.rank}.pt")
    World.destroy(world)


class Stays(World):
    """A process group that several trainers share."""

    def destroy(self) -> None:
        pass


class Publisher(ScriptedPublisher):
    """A publisher that accepts any weights."""

    def stage(self, version: int, weights: Any) -> bool:
        self.staged = float(len(list(weights)))
        return False


def weights(parts: Components) -> dict[str, torch.Tensor]:
    """Gather both models and destroy the process group."""
    engines = {"policy": parts.engine, "critic": parts.critic}
    return {
        f"{model}/{name}": value
        for model, engine in engines.items()
        if engine is not None
        for name, value in engine.stream_weights()
    }
