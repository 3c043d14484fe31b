"""A trainer runs an algorithm's loop over batches; its config says how one policy learns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from arealite.api.algorithm import (
    AdvantageConfig,
    CriticConfig,
    KLConfig,
    LossConfig,
    ShapingConfig,
)
from arealite.api.collector import CollectorConfig, EvalConfig
from arealite.api.engine_config import CheckpointConfig, OptimizerConfig, TrainEngineConfig
from arealite.api.fields import Constraints, opt, sub
from arealite.api.offline import DPOConfig, OfflineConfig, SFTConfig
from arealite.api.publisher_config import PublisherConfig
from arealite.base.registry import Registry

if TYPE_CHECKING:
    from arealite.api.config import ExperimentConfig


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """One policy trained with PPO or one of its relatives."""

    lr: float = opt(1e-5, "learning rate after the warm-up", above=0)
    total_steps: int = opt(100, "batches to train", at_least=1)
    batch_size: int = opt(512, "episodes; a multiple of collector.group_size", at_least=1)
    updates: int = opt(1, "optimizer updates a batch; must divide its number of groups", at_least=1)
    epochs: int = opt(1, "times these updates are made", at_least=1)
    max_staleness: int = opt(4, "eta: no trained token is older than so many versions", at_least=0)
    staleness_policy: Literal["wait", "mask", "drop"] = opt(
        "wait", "wait for slow episodes, mask old tokens, or drop groups", renamed={"pace": "wait"}
    )
    filter_zero_variance: bool = opt(False, "replace groups of equal rewards in each seat")
    partial_group: Literal["retry", "min_size", "drop"] = opt(
        "retry", "what becomes of a group with failed episodes"
    )
    max_attempts: int = opt(3, "offers of an episode before it has failed for good", at_least=1)
    token_stats: bool = opt(
        True, "keep advantage and logprob difference of each token, 4 bytes, for `arealite report`"
    )
    optimizer: OptimizerConfig = sub(OptimizerConfig, "optimizer and schedule")
    reward: ShapingConfig = sub(ShapingConfig, "rewards, as the algorithm sees them")
    advantage: AdvantageConfig = sub(AdvantageConfig, "advantages")
    loss: LossConfig = sub(LossConfig, "policy loss")
    kl: KLConfig = sub(KLConfig, "distance to a reference policy")
    critic: CriticConfig = sub(CriticConfig, "value model of advantage.type=gae")
    engine: TrainEngineConfig = sub(TrainEngineConfig, "what holds the model")
    collector: CollectorConfig = sub(CollectorConfig, "how episodes are run")
    publisher: PublisherConfig = sub(PublisherConfig, "how weights reach the servers")
    eval: EvalConfig = sub(EvalConfig, "held-out evaluation")
    checkpoint: CheckpointConfig = sub(CheckpointConfig, "checkpoints and export")

    @property
    def num_groups(self) -> int:
        """Groups in a batch."""
        return self.batch_size // self.collector.group_size

    @property
    def is_single_pass(self) -> bool:
        """Whether the pass of the one update over a batch is the policy's only pass over it."""
        known = self.loss.m2_threshold is not None or (self.kl.coef and self.kl.place == "reward")
        return self.updates * self.epochs == 1 and not known

    def constraints(self) -> Constraints:
        """Yield the constraints on the algorithm's numbers."""
        size, group, sampling = self.batch_size, self.collector.group_size, self.collector.sampling
        groups, buffer = -(-size // group), self.reward.overlong_buffer
        kind, gamma = f"advantage.type={self.advantage.type}", self.advantage.gamma
        yield (
            size % group == 0,
            f"collector.group_size {group} does not divide batch_size {size}: a batch holds whole "
            f"groups. Use a multiple of {group}, as in trainer.ppo.batch_size={groups * group}.",
        )
        yield (
            groups % self.updates == 0,
            f"updates {self.updates} does not divide the {groups} groups of a batch "
            f"(batch_size {size} / group_size {group}). Use a divisor of {groups}.",
        )
        yield (
            buffer <= sampling.max_new_tokens,
            f"reward.overlong_buffer={buffer} must be at most "
            f"collector.sampling.max_new_tokens={sampling.max_new_tokens}, before which it lies.",
        )
        yield (
            group > 1 or not self.advantage.is_relative,
            f"{kind} compares an episode with others of its task, but collector.group_size is 1. "
            "Use at least 2, or trainer.ppo.advantage.type=reinforce or gae.",
        )
        yield (
            group > 1 or not self.filter_zero_variance,
            "filter_zero_variance would leave out every group of collector.group_size 1. Use "
            "trainer.ppo.filter_zero_variance=false, or a larger group.",
        )
        yield (
            gamma == 1 or not self.advantage.is_relative,
            f"advantage.gamma={gamma} discounts nothing in {kind}, which takes an episode as a "
            "whole. Use trainer.ppo.advantage.gamma=1, or type=reinforce or gae.",
        )
        yield (
            self.critic.path is None or self.advantage.type == "gae",
            f"critic.path is set, but {kind} has no critic. Use trainer.ppo.advantage.type=gae.",
        )


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """Which trainer runs, and its options."""

    type: str = opt("async_ppo", "async_ppo; ppo (synchronous, max_staleness=0); sft, dpo, reward")
    ppo: PPOConfig = sub(PPOConfig, "options of async_ppo and ppo")
    offline: OfflineConfig = sub(OfflineConfig, "options of sft, dpo and reward alike")
    sft: SFTConfig = sub(SFTConfig, "options of sft alone")
    dpo: DPOConfig = sub(DPOConfig, "options of dpo alone")

    @property
    def is_offline(self) -> bool:
        """Whether it learns from rows that exist: without servers, workers and datapipe."""
        return self.type in ("sft", "dpo", "reward")


class Trainer(ABC):
    """One rank's training loop."""

    @abstractmethod
    def __init__(self, config: ExperimentConfig) -> None:
        """Make what the rank needs; RANK and WORLD_SIZE of the environment say which rank it is."""

    @abstractmethod
    def train(self) -> None:
        """Train to the end, or until asked to stop; leave a durable checkpoint."""


trainers: Registry[Trainer] = Registry(
    "trainer",
    {
        "ppo": "arealite.impl.trainer.ppo:PPOTrainer",
        "async_ppo": "arealite.impl.trainer.ppo:AsyncPPOTrainer",
        "sft": "arealite.impl.trainer.sft:SFTTrainer",
        "dpo": "arealite.impl.trainer.preference:DPOTrainer",
        "reward": "arealite.impl.trainer.preference:RewardTrainer",
    },
)
