"""The trainer interface and its options. A trainer runs the training loop of one rank."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from arealite.api import algorithm, offline
from arealite.api.collector_config import CollectorConfig, EvalConfig
from arealite.api.engine_config import CheckpointConfig, Head, OptimizerConfig, TrainEngineConfig
from arealite.api.fields import Constraints, named, opt, sub, with_options_of
from arealite.api.publisher import PublisherConfig
from arealite.base.registry import Registry

if TYPE_CHECKING:
    from arealite.api.experiment_config import ExperimentConfig


@dataclass(frozen=True, kw_only=True)
@with_options_of("ppo")
class PPOConfig:
    """One policy, trained with PPO or a related algorithm."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return the options of an extension, such as `distillation`."""

    lr: float = opt(1e-5, "learning rate after the warm-up", above=0)
    total_steps: int = opt(100, "batches to train", at_least=1)
    batch_size: int = opt(512, "episodes; a multiple of collector.group_size", at_least=1)
    updates: int = opt(1, "optimizer updates per batch; divides its number of groups", at_least=1)
    epochs: int = opt(1, "passes over a batch, each with `updates` updates", at_least=1)
    max_staleness: int = opt(4, "largest age of a trained token, in versions (η)", at_least=0)
    staleness_policy: Literal["wait", "mask", "drop"] = opt(
        "wait", "wait for slow episodes, mask old tokens, or drop groups", renamed={"pace": "wait"}
    )
    filter_zero_variance: bool = opt(False, "replace groups whose rewards are equal in each seat")
    partial_group: Literal["retry", "min_size", "drop"] = opt(
        "retry", "group with failed episodes: run again, train the rest if 2 are left, or drop"
    )
    max_attempts: int = opt(3, "attempts of an episode before it counts as failed", at_least=1)
    token_stats: bool = opt(
        True, "store advantage and logprob difference of each token (4 bytes) for the report"
    )
    optimizer: OptimizerConfig = sub(OptimizerConfig, "optimizer and schedule")
    reward: algorithm.ShapingConfig = sub(algorithm.ShapingConfig, "reward shaping")
    advantage: algorithm.AdvantageConfig = sub(algorithm.AdvantageConfig, "advantages")
    loss: algorithm.LossConfig = sub(algorithm.LossConfig, "policy loss")
    kl: algorithm.KLConfig = sub(algorithm.KLConfig, "KL penalty against a reference policy")
    critic: algorithm.CriticConfig = sub(algorithm.CriticConfig, "critic of advantage.type=gae")
    engine: TrainEngineConfig = sub(TrainEngineConfig, "train engine of the policy")
    collector: CollectorConfig = sub(CollectorConfig, "agents, environments and sampling")
    publisher: PublisherConfig = sub(PublisherConfig, "weight updates of the servers")
    eval: EvalConfig = sub(EvalConfig, "held-out evaluation")
    checkpoint: CheckpointConfig = sub(CheckpointConfig, "checkpoints and export")

    @property
    def num_groups(self) -> int:
        """Number of groups in a batch."""
        return self.batch_size // self.collector.group_size

    @property
    def is_single_pass(self) -> bool:
        """Whether the policy needs one forward pass over a batch: no pass before its one update."""
        adds_kl_to_rewards = self.kl.coef != 0 and self.kl.place == "reward"
        masks_by_logprobs = self.loss.m2_threshold is not None
        if adds_kl_to_rewards or masks_by_logprobs:
            return False
        return self.updates * self.epochs == 1

    def constraints(self) -> Constraints:
        """Yield the constraints between sizes, advantage, filters, critic and sampling."""
        yield from self._size_constraints()
        yield from self._group_constraints()
        yield from self._advantage_constraints()
        sampling = self.collector.sampling
        num_top = sampling.top_logprobs
        yield (
            num_top >= sampling.smallest_known_top,
            (
                f"collector.sampling.top_logprobs={num_top} never records all tokens that "
                "top_p, top_k, min_p and min_new_tokens keep, and a token without this record "
                "is not trained. Use trainer.ppo.collector.sampling.top_logprobs=20 "
                "and a top_k of at most 20, or leave these options out."
            ),
        )
        yield (
            num_top > 0 or not self.loss.centering,
            (
                "loss.centering needs the sampler's most probable tokens. "
                "Use trainer.ppo.collector.sampling.top_logprobs=20, or loss.centering=false."
            ),
        )

    def _size_constraints(self) -> Constraints:
        """Yield the constraints on the sizes of batches, groups, updates and completions."""
        batch_size = self.batch_size
        group_size = self.collector.group_size
        num_groups = -(-batch_size // group_size)  # rounded up
        yield (
            batch_size % group_size == 0,
            (
                f"collector.group_size {group_size} does not divide batch_size {batch_size}: "
                f"a batch holds whole groups. Use a multiple of {group_size}, "
                f"as in trainer.ppo.batch_size={num_groups * group_size}."
            ),
        )
        yield (
            num_groups % self.updates == 0,
            (
                f"updates {self.updates} does not divide the {num_groups} groups of a batch "
                f"(batch_size {batch_size} / group_size {group_size}). "
                f"Use a divisor of {num_groups}."
            ),
        )
        overlong_buffer = self.reward.overlong_buffer
        max_new_tokens = self.collector.sampling.max_new_tokens
        yield (
            overlong_buffer <= max_new_tokens,
            (
                f"reward.overlong_buffer={overlong_buffer} "
                f"must be at most collector.sampling.max_new_tokens={max_new_tokens}."
            ),
        )

    def _group_constraints(self) -> Constraints:
        """Yield the constraints of options that compare the episodes of a group."""
        has_several_episodes = self.collector.group_size > 1
        yield (
            has_several_episodes or not self.advantage.is_relative,
            (
                f"advantage.type={self.advantage.type} compares the episodes of a group, "
                "but collector.group_size is 1. "
                "Use at least 2, or trainer.ppo.advantage.type=reinforce or gae."
            ),
        )
        yield (
            has_several_episodes or not self.filter_zero_variance,
            (
                "filter_zero_variance drops every group if collector.group_size is 1. "
                "Use trainer.ppo.filter_zero_variance=false, or a larger group."
            ),
        )

    def _advantage_constraints(self) -> Constraints:
        """Yield the constraints of options that only some types of advantages use."""
        advantage = self.advantage
        has_discount = advantage.gamma != 1
        yield (
            not (has_discount and advantage.is_relative),
            (
                f"advantage.gamma={advantage.gamma} has no effect with "
                f"advantage.type={advantage.type}, which gives an episode one advantage. "
                "Use trainer.ppo.advantage.gamma=1, or type=reinforce or gae."
            ),
        )
        yield (
            advantage.has_critic or self.critic.path is None,
            (
                f"critic.path is set, but advantage.type={advantage.type} has no critic. "
                "Use trainer.ppo.advantage.type=gae."
            ),
        )


class TrainingOptions(Protocol):
    """The options that each trainer has, PPO or offline; their fields have the help."""

    @property
    def lr(self) -> float: ...

    @property
    def batch_size(self) -> int: ...

    @property
    def optimizer(self) -> OptimizerConfig: ...

    @property
    def engine(self) -> TrainEngineConfig: ...


@dataclass(frozen=True, kw_only=True)
@with_options_of("trainer")
class TrainerConfig:
    """The trainer and its options."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return the options of one type, such as `sft`."""

    type: str = named(
        "trainer", "async_ppo", "async_ppo; ppo (synchronous, max_staleness=0); sft, dpo, reward"
    )
    ppo: PPOConfig = sub(PPOConfig, "options of async_ppo and ppo")

    @property
    def is_offline(self) -> bool:
        """Whether the trainer learns from existing rows, without servers, workers and datapipe."""
        return offline.is_offline(self.type)

    @property
    def selected_options(self) -> TrainingOptions:
        """The options of this type: `ppo` or `offline`."""
        return self.offline if self.is_offline else self.ppo


class Trainer(ABC):
    """The training loop of one rank."""

    head: ClassVar[Head] = "lm"  # of the trained model

    @abstractmethod
    def __init__(self, config: "ExperimentConfig") -> None:
        """Create a rank; the environment variables RANK and WORLD_SIZE identify it."""

    @abstractmethod
    def train(self) -> None:
        """Train to the last step or to a stop request, then write a checkpoint."""


trainers = Registry[type[Trainer]].built_in("trainer")
