"""The tool interface: a function that agents can call, with its JSON schema."""

import asyncio
from abc import ABC, abstractmethod
from typing import Any

from arealite.api.task import Task
from arealite.base.registry import Registry


class ToolError(Exception):
    """A call failed. The agent gets the error's text as the result of the call."""


class Tool(ABC):
    """A tool. A worker has one instance for all episodes; each episode has its own `state`."""

    schema: dict[str, Any]
    """OpenAI function schema: {"type": "function", "function": {name, description, parameters}}."""
    deterministic: bool = False
    """Whether equal sequences of calls in two episodes have equal results."""

    def __init__(self, config: Any) -> None:
        self.config = config
        """Options of this tool; None for a tool without options."""
        self.slots = asyncio.Semaphore(64)
        """Limit of concurrent calls. A call's timeout does not include the wait for a slot."""

    async def setup(self) -> None:  # noqa: B027  (optional hook)
        """Start shared, expensive resources."""

    async def begin(self, task: Task, state: dict[str, object]) -> None:  # noqa: B027  (optional hook)
        """Prepare the `state` of an episode."""

    @abstractmethod
    async def call(self, arguments: dict[str, object], state: dict[str, object]) -> str:
        """Execute a call and return its result.

        Args:
            arguments: The arguments, validated against the schema.
            state: The tool's data of this episode; the call may change it.

        Raises:
            ToolError: The call failed; the agent gets the error's text as the result.
        """

    async def end(self, state: dict[str, object]) -> None:  # noqa: B027  (optional hook)
        """Release the resources in the `state` of an episode."""

    async def close(self) -> None:  # noqa: B027  (optional hook)
        """Stop the resources of `setup`."""


tools = Registry[type[Tool]].built_in("tool")


def function(
    name: str, description: str, /, *, required: tuple[str, ...] = (), **properties: object
) -> dict[str, object]:
    """Build an OpenAI function schema.

    Args:
        name: Name of the function.
        description: Description for the model.
        required: Names of the required parameters.
        **properties: JSON schema of each parameter.
    """
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(required),
    }
    metadata = {
        "name": name,
        "description": description,
        "parameters": parameters,
    }
    return {"type": "function", "function": metadata}
