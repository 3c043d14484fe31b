"""A Request: what an environment with `reset()` and `step(actions)` sends to an actor."""

from typing import Any

import msgspec

from arealite.api.observation import Observation


class Request(msgspec.Struct, frozen=True):
    """Observation and reward of an actor; returned by `reset` and `step` of `arealite.make`."""

    actor: str
    """Name of the seat; in a vector with the number of the environment, as in `x::env=2`."""
    observation: Observation
    """`str(request.observation)` is its text. Choices and tools are attributes."""
    reward: float = 0.0
    """Sum of the rewards since the actor's previous request."""
    needs_action: bool = False
    """Whether the next `step` must have an action of this actor."""
    done: bool = False
    """Whether the episode is over."""
    episode_id: str = ""
    group_id: str = ""
    """Equal for the episodes of one task, whose rewards a group algorithm compares."""
    info: dict[str, Any] = {}
    """Named parts of the reward."""
