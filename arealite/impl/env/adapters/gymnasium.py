"""Adapter of Gymnasium environments, and of others with its `reset` and `step`.

Actions must be texts or numbered.
"""

import re
from collections.abc import Sequence
from typing import Any

from arealite.api.adapter_config import GymnasiumConfig
from arealite.api.agent import Agent
from arealite.api.observation import Observation
from arealite.api.task import Task
from arealite.base.errors import UserError
from arealite.base.extras import extra_requirement
from arealite.impl.env.adapters.blocking import Instance
from arealite.impl.env.adapters.foreign import LibraryEnv, seed_of
from arealite.impl.env.games.choices import chosen

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
        self._first, self.choices = actions(getattr(env, "action_space", None), self.config.actions)

    async def run(self, task: Task, **agents: Agent) -> None:
        """Reset with the task's seed, then step until the end. Each turn gets its step's reward."""
        agent = agents["agent"]
        config = self.config
        illegal = 0
        rules = task.text
        if self.choices and not config.rules:
            rules += f" Answer with one of: {', '.join(self.choices)}."
        async with self.instance() as instance:
            seed = seed_of(task)
            seen, _ = await instance.call(lambda: instance.env.reset(seed=seed))
            text = f"{rules}\n{await self._shown(instance, seen)}"
            for _ in range(config.max_steps):
                action = await agent.act(Observation(text, self.choices))
                move = self.parse(action.text)
                if move is None:
                    illegal += 1
                    agent.reward(config.illegal_reward, illegal=1.0)
                    text = "That is no action."
                    done = illegal >= config.max_illegal
                    text += f" Answer with one of: {', '.join(self.choices)}."
                else:
                    seen, reward, *ends, _ = await instance.call(instance.env.step, move)
                    agent.reward(float(reward))
                    done = any(ends)
                    text = "" if done else await self._shown(instance, seen)
                if done or action.is_last:
                    break
                text = f"{rules}\n{text}" if config.repeat_rules else text

    def parse(self, text: str) -> int | str | None:
        """Return the action that an answer names; None if it names none."""
        if not self.choices:
            return text
        name = chosen(text, self.choices)
        return None if name is None else self._first + self.choices.index(name)

    async def _shown(self, instance: Instance, seen: object) -> str:
        """Return an observation as text: the environment's rendering, if it renders text."""
        if getattr(instance.env, "render_mode", None) == "ansi":
            return HIGHLIGHT.sub(r"[\1]", str(await instance.call(instance.env.render))).strip()
        if isinstance(seen, dict):
            return "\n".join(f"{name}: {value}" for name, value in seen.items())
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
        what = f"env.gymnasium: the action space is {space}. Agents can write texts and numbers"
        raise UserError(f"{what}: use an environment with a Text or Discrete action space.")
    first = int(space.start)
    count = int(space.n)
    if names and len(names) != count:
        what = f"env.gymnasium.actions has {len(names)} names, but the environment has {count}"
        raise UserError(f"{what} actions. Name each action once.")
    return first, tuple(names) or tuple(str(first + i) for i in range(count))
