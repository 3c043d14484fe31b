"""A tool is a function that agents may call: its schema, and what it answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from arealite.api.fields import opt, sub
from arealite.base.registry import Registry


@dataclass(frozen=True, kw_only=True)
class ToolsEnvConfig:
    """A task solved with tools."""

    tools: list[str] = sub(lambda: ["calculator"], "names in the table of tools")
    max_turns: int = opt(8, "an agent that still calls tools then is stopped", at_least=1)


class ToolError(Exception):
    """A call failed for a reason that the agent should be told; its text is the tool's answer."""


class Tool(ABC):
    """One instance a worker process, shared by all episodes; what an episode keeps is in its
    `state`."""

    schema: ClassVar[dict[str, Any]]
    """OpenAI function schema: {"type": "function", "function": {name, description, parameters}}."""

    def __init__(self, config: ToolsEnvConfig) -> None:
        self.config = config

    async def setup(self) -> None:  # noqa: B027  (optional hook)
        """Start what is shared and costly."""

    @abstractmethod
    async def call(self, arguments: dict[str, Any], state: dict[str, Any]) -> str:
        """Return the answer to one call; `state` is this tool's own, of this episode.

        Raises:
            ToolError: what the agent is told instead.
        """

    async def end(self, state: dict[str, Any]) -> None:  # noqa: B027  (optional hook)
        """Give back what an episode's calls left in `state`."""

    async def close(self) -> None:  # noqa: B027  (optional hook)
        """Stop what `setup` started."""


tools: Registry[Tool] = Registry("tool", {})
