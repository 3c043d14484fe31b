"""Play an episode on a page: send observations to the agent and perform its actions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from arealite.api.agent import Agent
from arealite.api.observation import Observation
from arealite.ext.web.browser.actions import RULES, BadAction, parse

if TYPE_CHECKING:
    from arealite.ext.web.browser.page import Page, View


async def play(
    page: Page,
    agent: Agent,
    *,
    goal: str,
    max_steps: int,
    look: Callable[[], Awaitable[View]],
    is_over: Callable[[View], bool] = lambda _: False,
    shows_address: bool = True,
) -> tuple[str | None, View]:
    """Run the agent until it stops, the episode is over or `max_steps` is reached.

    An invalid or impossible action is reported to the agent and counted in the reward part
    `bad_actions`.

    Args:
        page: The page to act on.
        agent: The acting agent.
        goal: The task, in each observation.
        max_steps: Maximum number of actions.
        look: Returns a description of the page.
        is_over: Returns whether the episode ends, after each action.
        shows_address: Whether observations hold the page's title and address.

    Returns:
        The answer of the agent's `stop`, None if it did not stop; and the last view.
    """
    rules = RULES[page.config.rules]
    view = await look()
    for _ in range(max_steps):
        address = f"Page: {view.title} ({view.url})" if shows_address else ""
        lines = (rules, f"Goal: {goal}", *page.notes, address, view.text)
        description = "\n".join(filter(None, lines))
        page.notes.clear()
        action = await agent.act(Observation(description, tuple(view.choices)))
        rules = RULES["none" if page.config.rules == "none" else "short"]
        is_bad = 0.0
        try:
            command = parse(action.text)
            if command.verb == "stop":
                return command.argument, view
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
