"""AReaLite: asynchronous reinforcement learning for language-model agents on plain asyncio.

The names of `__all__` are the public Python API. Each is imported when it is first used, so that
`import arealite` is fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.2.0"

if TYPE_CHECKING:
    from arealite.api.agent import Agent, agents
    from arealite.api.engine import TrainEngine
    from arealite.api.env import Env, StepEnv, StepResult, envs
    from arealite.api.episode import Action
    from arealite.api.reward import Reward, Score, rewards
    from arealite.api.task import Row, Task
    from arealite.api.tool import Tool, tools
    from arealite.api.trainer import Trainer
    from arealite.base.errors import UserError
    from arealite.impl.env.requests import make  # pyright: ignore
    from arealite.python.functions import collect, evaluate, train
    from arealite.python.run import Run
    from arealite.python.servers import serve, serve_llm

_HOMES = {
    "python.functions": "train evaluate collect",
    "python.servers": "serve serve_llm",
    "python.run": "Run",
    "impl.env.requests": "make",
    "api.env": "Env StepEnv StepResult envs",
    "api.agent": "Agent agents",
    "api.episode": "Action",
    "api.reward": "Reward Score rewards",
    "api.tool": "Tool tools",
    "api.task": "Row Task",
    "api.engine": "TrainEngine",
    "api.trainer": "Trainer",
    "base.errors": "UserError",
}
"""The public names by module below arealite."""
__all__ = [  # noqa: RUF022
    "train", "evaluate", "collect", "serve", "serve_llm", "Run", "make",
    "Env", "StepEnv", "StepResult", "Agent", "Action", "Reward", "Score", "Tool",
    "Row", "Task", "TrainEngine", "Trainer", "UserError", "envs", "agents", "rewards", "tools",
]  # fmt: skip


def __getattr__(name: str) -> object:
    """Import a public name at its first use."""
    home = next((home for home, names in _HOMES.items() if name in names.split()), None)
    if home is None:
        raise AttributeError(f"module 'arealite' has no attribute '{name}'")
    globals()[name] = value = getattr(importlib.import_module(f"arealite.{home}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
