"""Adapter of Gymnasium environments, and of others with its `reset` and `step`.

Actions must be texts or numbered.
"""

import re
from collections.abc import Sequence
from typing import Any

from arealite.api.agent import Agent
from arealite.api.observation import Observation
from arealite.api.task import Task
from arealite.base.errors import UserError
from arealite.base.extras import extra_requirement
from arealite.ext.adapters.blocking import Instance
from arealite.ext.adapters.config import GymnasiumConfig
from arealite.ext.adapters.foreign import LibraryEnv, seed_of
from arealite.ext.games.choices import chosen

HIGHLIGHT = re.compile(r"\x1b\[[\d;]*m(.*?)\x1b\[0m")


class GymnasiumEnv(LibraryEnv):
    """One seat acts until the environment ends the episode or `max_steps` is reached."""

    package = "gymnasium"
    install = extra_requirement("envs")

    @classmethod
    def prompt(cls, config: GymnasiumConfig, name: str) -> str:
        """Return the rules, the prompt of generated rows."""
        return config.rules or f"You act in {name}."

    def check_env(self, env: object) -> None:
        """Read the actions of `env`.

        Raises:
            UserError: Actions are neither texts nor numbered.
        """
        space = getattr(env, "action_space", None)
        self._first, self.choices = actions(space, self.config.actions)

    async def run(self, task: Task, **agents: Agent) -> None:
        """Reset with the task's seed, then step until the end. Each turn gets its step's reward."""
        agent = agents["agent"]
        config = self.config
        num_illegal = 0
        request = f"Answer with one of: {', '.join(self.choices)}."
        rules = task.text
        if self.choices and not config.rules:
            rules = f"{rules} {request}"
        async with self.instance() as instance:
            seed = seed_of(task)
            seen, _ = await instance.call(lambda: instance.env.reset(seed=seed))
            content = f"{rules}\n{await self._shown(instance, seen)}"
            for _ in range(config.max_steps):
                action = await agent.act(Observation(content, self.choices))
                move = self.parse(action.text)
                if move is None:
                    num_illegal += 1
                    agent.reward(config.illegal_reward, illegal=1.0)
                    is_over = num_illegal >= config.max_illegal
                    content = f"That is no action. {request}"
                else:
                    seen, reward, *ends, _ = await instance.call(instance.env.step, move)
                    agent.reward(float(reward))
                    is_over = any(ends)
                    content = "" if is_over else await self._shown(instance, seen)
                if is_over or action.is_last:
                    break
                if config.repeat_rules:
                    content = f"{rules}\n{content}"

    def parse(self, answer: str) -> int | str | None:
        """Return the action that an answer names; None if it names none."""
        if not self.choices:
            return answer
        name = chosen(answer, self.choices)
        if name is None:
            return None
        return self._first + self.choices.index(name)

    async def _shown(self, instance: Instance, seen: object) -> str:
        """Return an observation as text: the environment's rendering, if it renders text."""
        if getattr(instance.env, "render_mode", None) == "ansi":
            rendering = str(await instance.call(instance.env.render))
            return HIGHLIGHT.sub(r"[\1]", rendering).strip()
        if isinstance(seen, dict):
            lines = [f"{name}: {field}" for name, field in seen.items()]
            return "\n".join(lines)
        return str(seen)


def actions(space: Any, names: Sequence[str]) -> tuple[int, tuple[str, ...]]:
    """Read an action space.

    Args:
        space: Gymnasium's action space, or None.
        names: Names of the actions; empty: their numbers.

    Returns:
        The number of the first action and the names of all actions; () if actions are texts.

    Raises:
        UserError: Actions are neither texts nor numbered, or the number of names is wrong.
    """
    kind = type(space).__name__
    if space is None or kind == "Text":
        return 0, ()
    if kind != "Discrete":
        raise UserError(
            f"env.gymnasium: the action space is {space}. "
            "Agents can write texts and numbers: "
            "use an environment with a Text or Discrete action space."
        )
    first = int(space.start)
    count = int(space.n)
    if not names:
        numbers = range(first, first + count)
        return first, tuple(map(str, numbers))
    if len(names) != count:
        raise UserError(
            f"env.gymnasium.actions has {len(names)} names, "
            f"but the environment has {count} actions. "
            "Name each action once."
        )
    return first, tuple(names)
