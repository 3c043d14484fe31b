"""Options of the reward that calls Python functions."""

from dataclasses import dataclass

from arealite.api.fields import Constraints, RewardOptions, opt, sub


@dataclass(frozen=True, kw_only=True)
class FunctionRewardConfig(RewardOptions):
    """The weighted sum of Python functions."""

    paths: list[str] = sub(list, "functions: module:name or file.py:name")
    weights: list[float] = sub(list, "weight of each function; []: 1 each")
    processes: int = opt(1, "processes of one worker that call the functions", at_least=1)
    timeout_s: float = opt(60.0, "seconds of a call; a longer one fails the episode", above=0)

    def unused_constraints(self, chosen: str) -> Constraints:
        """Yield the constraint that another reward has no `paths`."""
        yield (
            not self.paths,
            (
                f"type={chosen} uses no function.paths={self.paths}. "
                "Set type=function, or remove function.paths."
            ),
        )
