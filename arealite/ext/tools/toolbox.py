"""The tools of one worker: constructed by name, offered by schema, and called with a deadline.

The toolbox checks the arguments of each call and truncates long answers.
"""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Literal, NamedTuple

from arealite.api.observation import ToolCall
from arealite.api.task import Task
from arealite.api.tool import Tool, ToolError, tools
from arealite.base.errors import ArealiteError, DeadlineError, EpisodeError, UserError
from arealite.base.registry import unknown
from arealite.ext.tools.config import ToolsEnvConfig
from arealite.ext.tools.mcp import MCPServer, MCPTool
from arealite.system.health.waits import Wait

OWNER = "environment tools"
States = dict[str, dict[str, object]]
"""An episode's state by the name of the tool."""
TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
}
"""Python types by their names in a JSON schema."""


class ToolCrash(EpisodeError, failure_class="tool_crash"):
    """A tool raised an exception other than ToolError. The agent is not at fault."""


class ToolAnswer(NamedTuple):
    """The answer to a call, as the agent gets it."""

    content: str
    kind: Literal["fine", "failed", "timeout", "malformed"] = "fine"


class Toolbox:
    """The tools of a config and of its MCP servers."""

    def __init__(self, config: ToolsEnvConfig) -> None:
        self.config = config
        self.tools = dict[str, Tool]()
        """Tools by the name that agents call."""
        for name in config.tools:
            self._add(tools.get(name)(getattr(config, name, None)))
        all_deterministic = all(tool.deterministic for tool in self.tools.values())
        self.deterministic = all_deterministic and not config.mcp
        self.servers = [MCPServer(name, server) for name, server in config.mcp.items()]
        self._stack = AsyncExitStack()

    @property
    def schemas(self) -> tuple[dict[str, object], ...]:
        """The function schemas that agents are offered."""
        return tuple(tool.schema for tool in self.tools.values())

    async def setup(self) -> None:
        """Start the tools, then the servers. Call `close` also if this fails."""
        for tool in self.tools.values():
            self._stack.push_async_callback(tool.close)
            await tool.setup()
        for server in self.servers:
            self._stack.push_async_callback(server.close)
            for tool in await server.setup():
                self._add(tool)

    async def close(self) -> None:
        """Stop all tools and servers that were started."""
        await self._stack.aclose()

    @asynccontextmanager
    async def episode(self, task: Task) -> AsyncIterator[States]:
        """Prepare the tools for an episode; end it when the body exits.

        Yields:
            The tools' states, for `call`.
        """
        states: States = {name: {} for name in self.tools}
        async with AsyncExitStack() as stack:
            for name, tool in self.tools.items():
                stack.push_async_callback(tool.end, states[name])
                await tool.begin(task, states[name])
            yield states

    async def call(self, call: ToolCall, states: States) -> ToolAnswer:
        """Execute one call; return the answer for the agent.

        Raises:
            ToolCrash: The tool raised an unexpected exception.
        """
        tool = self.tools.get(call.name)
        if tool is None:
            problem = call.error or unknown("tool", call.name, [*self.tools])
            return ToolAnswer(f"error: {problem}", "malformed")
        parameters = tool.schema["function"]["parameters"]
        problem = call.error or mismatch(call.arguments, parameters)
        if problem:
            return ToolAnswer(f"error: {problem}", "malformed")
        async with tool.slots:
            return await self._call(tool, call, states[call.name])

    async def _call(self, tool: Tool, call: ToolCall, state: dict[str, object]) -> ToolAnswer:
        wait = Wait(
            event=f"the answer of tool {call.name}",
            owner=OWNER,
            on=f"tool {call.name}",
            seconds=self.config.timeout_s,
        )
        try:
            with wait:
                content = await tool.call(call.arguments, state)
                return ToolAnswer(self._cut(content))
        except ToolError as error:
            return ToolAnswer(self._cut(f"error: {error}"), "failed")
        except DeadlineError:
            if not wait.expired:
                raise
            if isinstance(tool, MCPTool):
                tool.server.check()
            return ToolAnswer(f"error: timed out after {wait.seconds:g} s", "timeout")
        except ArealiteError:
            raise
        except Exception as error:
            error_type = type(error).__name__
            raise ToolCrash(f"tool {call.name} raised {error_type}: {error}") from error

    def _add(self, tool: Tool) -> None:
        name = tool.schema["function"]["name"]
        if name in self.tools:
            raise UserError(
                f"two tools have the name '{name}'. Remove one of env.tools.tools or env.tools.mcp."
            )
        self.tools[name] = tool

    def _cut(self, answer: str) -> str:
        """Truncate an answer to the limit, and say how many characters are missing."""
        num_excess_chars = len(answer) - self.config.answer_chars
        if num_excess_chars <= 0:
            return answer
        return f"{answer[:-num_excess_chars]} [{num_excess_chars} more characters]"


def mismatch(arguments: dict[str, object], parameters: dict[str, Any]) -> str:
    """Check arguments against a JSON schema.

    Only names, plain types and enumerations are checked. Tools check other constraints themselves.

    Returns:
        The first problem; "" if there is none.
    """
    properties: dict[str, Any] = parameters.get("properties", {})
    for name in parameters.get("required", ()):
        if name not in arguments:
            return f"argument '{name}' is missing"
    for name, argument in arguments.items():
        if name in properties:
            problem = property_mismatch(name, argument, properties[name])
            if problem:
                return problem
        elif properties and not parameters.get("additionalProperties"):
            return unknown("argument", name, [*properties])
    return ""


def property_mismatch(name: str, argument: object, schema: Any) -> str:
    """Check the type of an argument, and that it is in the enumeration, if its schema has one.

    Returns:
        The first problem; "" if there is none.
    """
    if not isinstance(schema, dict):
        return ""
    type_name = schema.get("type")
    if not has_type(argument, type_name):
        return f"argument '{name}' must be of type {type_name}"
    if "enum" in schema and argument not in schema["enum"]:
        choices = ", ".join(map(str, schema["enum"]))
        return f"argument '{name}' must be one of {choices}"
    return ""


def has_type(argument: object, type_name: object) -> bool:
    """Return whether an argument has a plain type of JSON schema; True for any other type name."""
    if not isinstance(type_name, str):
        return True
    if isinstance(argument, bool) and type_name in ("integer", "number"):
        return False
    return isinstance(argument, TYPES.get(type_name, object))
