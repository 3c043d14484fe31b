"""Options of the offline trainers (sft, dpo, reward), which need no servers and no workers."""

from dataclasses import dataclass
from typing import Literal

from arealite.api.engine_config import OptimizerConfig, TrainEngineConfig
from arealite.api.fields import Constraints, opt, sub


@dataclass(frozen=True, kw_only=True)
class OfflineConfig:
    """Options that sft, dpo and reward share."""

    lr: float = opt(1e-5, "learning rate after the warm-up", above=0)
    epochs: int = opt(1, "passes over all rows, each in a new order given by the seed", at_least=1)
    max_steps: int = opt(0, "largest number of steps; 0: all epochs", at_least=0)
    batch_size: int = opt(64, "rows (or pairs) of an optimizer update, of all ranks", at_least=1)
    max_tokens: int = opt(4096, "longest row; longer rows are cut at their end", at_least=1)
    eval_every_steps: int = opt(0, "steps between held-out losses; 0: at start and end", at_least=0)
    checkpoint_every_steps: int = opt(50, "0: only at the end and on Ctrl-C", at_least=0)
    checkpoint_keep: int = opt(2, "number of checkpoints to keep, newest first", at_least=1)
    optimizer: OptimizerConfig = sub(OptimizerConfig, "optimizer and schedule")
    engine: TrainEngineConfig = sub(TrainEngineConfig, "train engine of the model")

    def total_steps(self, num_rows: int) -> int:
        """Return the number of steps of a run; each is one optimizer update."""
        steps = self.epochs * -(-num_rows // self.batch_size)
        return min(steps, self.max_steps or steps)


@dataclass(frozen=True, kw_only=True)
class SFTConfig:
    """Cross entropy on tokens of the assistant, of the environment, or both."""

    assistant_weight: float = opt(1.0, "loss weight of the assistant's tokens", at_least=0)
    next_state_weight: float = opt(
        0.0, "loss weight of other tokens after the first answer (world model)", at_least=0
    )
    turns: Literal["all", "last"] = opt("all", "trained assistant messages of a chat")
    min_reward: float | None = opt(None, "skip collected trajectories with a lower reward")

    def constraints(self) -> Constraints:
        """Yield the constraints on loss weights and turns."""
        trains_answers = self.assistant_weight > 0
        trains_next_states = self.next_state_weight > 0
        yield (
            trains_answers or trains_next_states,
            "assistant_weight and next_state_weight are both 0. Set one above 0.",
        )
        yield (
            self.turns == "all" or not trains_next_states,
            "turns=last trains no next states. Use turns=all, or next_state_weight=0.",
        )


@dataclass(frozen=True, kw_only=True)
class DPOConfig:
    """Direct preference optimization (arXiv 2305.18290)."""

    beta: float = opt(0.1, "higher values keep the policy nearer to the reference", above=0)
    loss: Literal["sigmoid", "hinge", "ipo"] = opt("sigmoid", "loss of the pair's margin")
    label_smoothing: float = opt(0.0, "assumed share of wrong preferences", at_least=0, below=0.5)
    reference_free: bool = opt(False, "use a uniform policy as the reference")
    reference: str | None = opt(None, "Hugging Face folder; null: the initial model of the run")
