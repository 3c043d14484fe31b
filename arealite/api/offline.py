"""The options of trainers that learn from rows that exist: no server, no datapipe, no worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from arealite.api.engine_config import OptimizerConfig, TrainEngineConfig
from arealite.api.fields import Constraints, opt, sub


@dataclass(frozen=True, kw_only=True)
class OfflineConfig:
    """What sft, dpo and reward have in common."""

    lr: float = opt(1e-5, "learning rate after the warm-up", above=0)
    epochs: int = opt(1, "times every row is seen, in a new seeded order each", at_least=1)
    max_steps: int = opt(0, "stop there even if rows are left; 0 takes all epochs", at_least=0)
    batch_size: int = opt(64, "rows (pairs) of an optimizer update, over all ranks", at_least=1)
    max_tokens: int = opt(4096, "a longer row is cut at its end", at_least=1)
    eval_every_steps: int = opt(
        0, "loss on the held-out rows; 0 only before the first and after the last step", at_least=0
    )
    checkpoint_every_steps: int = opt(50, "0 checkpoints only at the end and on Ctrl-C", at_least=0)
    checkpoint_keep: int = opt(2, "newest checkpoints kept", at_least=1)
    optimizer: OptimizerConfig = sub(OptimizerConfig, "optimizer and schedule")
    engine: TrainEngineConfig = sub(TrainEngineConfig, "what holds the model")


@dataclass(frozen=True, kw_only=True)
class SFTConfig:
    """Cross entropy on the tokens that assistants wrote, or that environments answered."""

    assistant_weight: float = opt(1.0, "of a token written by the assistant", at_least=0)
    next_state_weight: float = opt(
        0.0, "of a token by anyone else after the first assistant's: a world model", at_least=0
    )
    turns: Literal["all", "last"] = opt("all", "which assistant messages of a chat are learned")
    min_reward: float | None = opt(None, "leave out collected trajectories with less")

    def constraints(self) -> Constraints:
        """Yield the constraints on what is learned."""
        yield (
            self.assistant_weight > 0 or self.next_state_weight > 0,
            "assistant_weight and next_state_weight are both 0.",
        )
        yield (
            self.turns == "all" or not self.next_state_weight,
            "turns=last learns no next states. Use turns=all, or next_state_weight=0.",
        )


@dataclass(frozen=True, kw_only=True)
class DPOConfig:
    """Direct preference optimization (arXiv 2305.18290)."""

    beta: float = opt(0.1, "how far the policy may leave the reference: higher is nearer", above=0)
    loss: Literal["sigmoid", "hinge", "ipo"] = opt("sigmoid", "of the margin between the pair")
    label_smoothing: float = opt(0.0, "share of pairs taken as reversed", at_least=0, below=0.5)
    reference_free: bool = opt(False, "compare with a uniform policy instead of a reference")
    reference: str | None = opt(None, "Hugging Face folder; null: the model the run begins with")
