"""The turns of an episode on a page: what the agent is told, and what becomes of its actions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from arealite.api.agent import Agent
from arealite.api.observation import Observation
from arealite.impl.browser.actions import RULES, BadAction, parse

if TYPE_CHECKING:
    from arealite.impl.browser.page import Page, View


async def play(
    page: Page,
    agent: Agent,
    *,
    goal: str,
    max_steps: int,
    look: Callable[[], Awaitable[View]],
    is_over: Callable[[View], bool] = lambda _: False,
    tells_where: bool = True,
) -> tuple[str | None, View]:
    """Let the agent act until it stops, `is_over` or `max_steps`; return (its answer, None if it
    never stopped; the last view). `tells_where`: observations have the page's title and address.

    What is no action, or cannot be done, is told to the agent, and counted as `bad_actions`.
    """
    rules, view = RULES[page.config.rules], await look()
    for _ in range(max_steps):
        where = f"Page: {view.title} ({view.url})" if tells_where else ""
        said = tell(rules, f"Goal: {goal}", *page.notes, where, view.text)
        page.notes.clear()
        action = await agent.act(Observation(said, (*view.choices,)))
        rules = RULES["none" if page.config.rules == "none" else "short"]
        is_bad = 0.0
        try:
            command = parse(action.text)
            if command.verb == "stop":
                return command.text, view
            await page.perform(command)
        except BadAction as error:
            page.notes.append(f"error: {error}")
            is_bad = 1.0
        finally:
            agent.reward(0.0, bad_actions=is_bad)
        view = await look()
        if is_over(view) or action.is_last:
            break
    return None, view


def tell(*parts: str) -> str:
    """Write an observation that stands on its own."""
    return "\n".join(part for part in parts if part)
