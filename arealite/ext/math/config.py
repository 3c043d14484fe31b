"""Options of the environment of mathematical questions."""

from dataclasses import dataclass

from arealite.api.fields import opt, sub
from arealite.api.reward import RewardConfig

ANSWER = "Put the final answer in \\boxed{}."


@dataclass(frozen=True, kw_only=True)
class MathEnvConfig:
    """One question, one answer, scored by a reward function."""

    reward: RewardConfig = sub(RewardConfig, "reward function of the answer")
    kinds: list[str] = sub(
        lambda: ["arithmetic", "algebra", "word", "multi_step"], "kinds of generated questions"
    )
    levels: list[int] = sub(lambda: [1, 2, 3], "1 to 5, of generated questions; equally likely")
    instruction: str = opt(ANSWER, "text after each generated question")
