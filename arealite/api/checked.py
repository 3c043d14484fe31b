"""Check that an agent's `act` returns an Action."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from arealite.api.episode import Action
from arealite.base.errors import UserError


def checked(act: Callable[[object], Awaitable[object]]) -> Callable[[object], Awaitable[Action]]:
    """Wrap `act` so that it raises UserError if it returns anything but an Action."""

    async def checked_act(observation: object) -> Action:
        action = await act(observation)
        if isinstance(action, Action):
            return action
        name = getattr(act, "__qualname__", "act")
        raise UserError(
            f"{name} returned {action!r:.60}: an agent returns an Action, for example Action(text)."
        )

    return checked_act
