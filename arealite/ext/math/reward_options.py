"""Options of the reward for mathematical answers."""

from dataclasses import dataclass

from arealite.api.fields import opt


@dataclass(frozen=True, kw_only=True)
class MathVerifyConfig:
    """The reward for an answer that is mathematically equal to the ground truth."""

    workers: int = opt(1, "checker processes of one rollout worker", at_least=1)
    timeout_s: float = opt(2.0, "CPU seconds of a check; slower ones give reward 0", above=0)
