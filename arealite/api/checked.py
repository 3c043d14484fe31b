"""Check that an agent's `act` returns an Action."""

from functools import wraps
from typing import Any

from arealite.api.episode import Action
from arealite.base.errors import UserError


def checked(act: Any) -> Any:
    """Return `act` of a class of agents; it raises UserError if its result is no Action."""

    @wraps(act)
    async def checked_act(self: object, observation: object) -> Action:
        action = await act(self, observation)
        if isinstance(action, Action):
            return action
        name = getattr(act, "__qualname__", "act")
        raise UserError(
            f"{name} returned {action!r:.60}: an agent returns an Action, for example Action(text)."
        )

    return checked_act
