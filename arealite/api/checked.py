"""Check that an agent's `act` returns an Action."""

from functools import wraps
from typing import Any, TypeVar

from arealite.api.episode import Action
from arealite.base.errors import UserError

T = TypeVar("T")


def checked(cls: type[T]) -> type[T]:
    """Make `act` of a class of agents raise UserError if it returns anything but an Action.

    The class is changed, once, and not its agents: an agent that refers to itself would be freed
    only by the garbage collector, which costs a sixth of a worker's CPU time.
    """
    act: Any = getattr(cls, "act", None)
    if not hasattr(act, "is_checked"):
        setattr(cls, "act", _checked(act))  # noqa: B010  (a method)
    return cls


def _checked(act: Any) -> Any:
    @wraps(act)
    async def checked_act(self: object, observation: object) -> Action:
        action = await act(self, observation)
        if isinstance(action, Action):
            return action
        name = getattr(act, "__qualname__", "act")
        fix = "an agent returns an Action, for example Action(text)."
        raise UserError(f"{name} returned {action!r:.60}: {fix}")

    setattr(checked_act, "is_checked", True)  # noqa: B010  (unknown to the type checker)
    return checked_act
