"""AReaLite: asynchronous reinforcement learning for language-model agents on plain asyncio.

The names of `__all__` are the public Python API. Each is imported when it is first used, so that
`import arealite` is fast. `__init__.pyi` gives them to type checkers and editors.
"""

import importlib

__version__ = "0.2.0"

_MODULES = {
    "ext.notebook.functions": "train evaluate collect serve",
    "ext.notebook.run": "Run",
    "ext.session.opening": "session",
    "ext.session.training_session": "Session",
    "ext.session.sample_rows": "Sample",
    "ext.session.calls": "Call",
    "ext.wrappers.play": "make make_vec",
    "ext.wrappers.wrappers": "wrap Record ScaleReward TimeLimit TransformObservation",
    "api.observation": "Request",
    "api.env": "Env StepEnv StepResult envs",
    "api.agent": "Agent agents",
    "api.episode": "Action",
    "api.reward": "Reward Score rewards",
    "api.tool": "Tool tools",
    "api.task": "Row Task",
    "api.engine": "TrainEngine Sequence LossInput",
    "api.trainer": "Trainer",
    "base.errors": "UserError",
}
"""The public names by their module."""
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}
__all__ = [*_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    """Import a public name."""
    if name not in _HOMES:
        raise AttributeError(f"module 'arealite' has no attribute '{name}'")
    return getattr(importlib.import_module(f"arealite.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
