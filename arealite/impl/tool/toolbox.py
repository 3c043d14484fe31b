"""The tools of one worker: made by their names, offered by their schemas, and called with every
guard that a call of a model's needs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Literal, NamedTuple

from arealite.api.observation import ToolCall
from arealite.api.task import Task
from arealite.api.tool import Tool, ToolError, tools
from arealite.api.tool_config import ToolsEnvConfig
from arealite.base.errors import ArealiteError, DeadlineError, EpisodeError, UserError
from arealite.base.registry import unknown
from arealite.impl.tool.mcp import MCPServer, MCPTool
from arealite.system.health.waits import Wait

OWNER = "environment tools"
States = dict[str, dict[str, Any]]
"""What an episode keeps, by tool."""
TYPES: dict[Any, Any] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
}
"""What the types of a JSON schema are here."""


class ToolCrash(EpisodeError):
    """A tool raised something else than a ToolError: nothing that the agent could help."""

    failure_class = "tool_crash"


class Answer(NamedTuple):
    """What the agent is told of a call."""

    content: str
    kind: Literal["fine", "failed", "timeout", "malformed"] = "fine"


class Toolbox:
    """Holds the tools of a config, and those of its MCP servers."""

    def __init__(self, config: ToolsEnvConfig) -> None:
        self.config = config
        self.tools = dict[str, Tool]()
        """By the name that agents call."""
        for name in config.tools:
            self._add(tools.get(name)(getattr(config, name, None)))
        self.deterministic = not config.mcp and all(t.deterministic for t in self.tools.values())
        self.servers = [MCPServer(name, server) for name, server in config.mcp.items()]
        self._stack = AsyncExitStack()

    @property
    def schemas(self) -> tuple[dict[str, Any], ...]:
        """What agents are offered."""
        return tuple(tool.schema for tool in self.tools.values())

    async def setup(self) -> None:
        """Start the tools, then the servers; `close` ends what was started, also if one fails."""
        for tool in self.tools.values():
            self._stack.push_async_callback(tool.close)
            await tool.setup()
        for server in self.servers:
            self._stack.push_async_callback(server.close)
            for tool in await server.setup():
                self._add(tool)

    async def close(self) -> None:
        """Stop them."""
        await self._stack.aclose()

    @asynccontextmanager
    async def episode(self, task: Task) -> AsyncIterator[States]:
        """Hold what the tools keep for one episode."""
        states: States = {name: {} for name in self.tools}
        async with AsyncExitStack() as stack:
            for name, tool in self.tools.items():
                stack.push_async_callback(tool.end, states[name])
                await tool.begin(task, states[name])
            yield states

    async def call(self, call: ToolCall, states: States) -> Answer:
        """Make one call, and return what the agent is told.

        Raises:
            ToolCrash: the tool raised something unexpected.
        """
        tool = self.tools.get(call.name)
        problem = call.error
        if not problem and tool is None:
            problem = unknown("tool", call.name, [*self.tools])
        if not problem and tool is not None:
            problem = misfit(call.arguments, tool.schema["function"]["parameters"])
        if problem or tool is None:
            return Answer(f"error: {problem}", "malformed")
        async with tool.slots:
            return await self._call(tool, call, states[call.name])

    async def _call(self, tool: Tool, call: ToolCall, state: dict[str, Any]) -> Answer:
        what, on = f"the answer of tool {call.name}", f"tool {call.name}"
        wait = Wait(what, owner=OWNER, on=on, seconds=self.config.timeout_s)
        try:
            with wait:
                return Answer(self._cut(await tool.call(call.arguments, state)))
        except ToolError as error:
            return Answer(self._cut(f"error: {error}"), "failed")
        except DeadlineError:
            if not wait.expired:
                raise
            if isinstance(tool, MCPTool):
                tool.server.check()
            return Answer(f"error: timed out after {wait.seconds:g} s", "timeout")
        except ArealiteError:
            raise
        except Exception as error:
            what = f"tool {call.name} raised {type(error).__name__}: {error}"
            raise ToolCrash(what) from error

    def _add(self, tool: Tool) -> None:
        name = tool.schema["function"]["name"]
        if name in self.tools:
            raise UserError(f"two tools are called '{name}'. Leave one out of env.tools.tools.")
        self.tools[name] = tool

    def _cut(self, answer: str) -> str:
        more = len(answer) - self.config.answer_chars
        return answer if more <= 0 else f"{answer[:-more]} [{more} more characters]"


def misfit(arguments: dict[str, Any], parameters: dict[str, Any]) -> str:
    """Say what in the arguments is not as the JSON schema wants it, "" if nothing.

    Looks at names, plain types and enumerations; what else a schema may say is left to the tool.
    """
    known: dict[str, Any] = parameters.get("properties", {})
    for name in parameters.get("required", ()):
        if name not in arguments:
            return f"argument '{name}' is missing"
    for name, value in arguments.items():
        if name not in known:
            if known and not parameters.get("additionalProperties"):
                return unknown("argument", name, [*known])
            continue
        wanted = known[name] if isinstance(known[name], dict) else {}
        kind = wanted.get("type")
        held = TYPES.get(kind, object) if isinstance(kind, str) else object
        is_flag = isinstance(value, bool) and kind in ("integer", "number")
        if is_flag or not isinstance(value, held):
            return f"argument '{name}' must be of type {kind}"
        if "enum" in wanted and value not in wanted["enum"]:
            return f"argument '{name}' must be one of {', '.join(map(str, wanted['enum']))}"
    return ""
