"""Tools of Model Context Protocol servers, by the SDK `mcp` (extra `tools`).

A worker has one session with each server. The SDK requires that the task that enters a client also
exits it, so each session has its own task. If a server dies during a call, the session is restarted
and the call is repeated once.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from arealite.api.tool import Tool, ToolError
from arealite.base import log
from arealite.base.errors import DeadlineError, EpisodeError, UserError
from arealite.base.extras import extra_requirement, import_optional
from arealite.ext.tools.config import MCPServerConfig
from arealite.system.health.waits import Wait

if TYPE_CHECKING:
    from mcp import Client, StdioServerParameters, types

logger = log.get(__name__)

LOST = {-32000, -32600, -32001}
"""Error codes that end a session: the connection was closed, or the server was restarted and does
not know the session."""
MAX_PAGES = 100
"""Maximum number of pages of a server's list of tools."""


class MCPUnavailable(EpisodeError, failure_class="mcp_unavailable"):
    """An MCP server died and does not start again. The agent is not at fault."""


class MCPServer:
    """One MCP server and the worker's session with it."""

    def __init__(self, name: str, config: MCPServerConfig) -> None:
        if bool(config.command) == bool(config.url):
            raise UserError(f"env.tools.mcp.{name}: set command or url, and not both.")
        self.name = name
        self.config = config
        self._session: _Session | None = None
        self._restarting = asyncio.Lock()
        self.slots = asyncio.Semaphore(config.concurrency)

    async def setup(self) -> list[MCPTool]:
        """Connect to the server, starting it if it has a command; return its tools by name.

        Raises:
            UserError: The server does not answer or lacks a tool of `config.tools`, or the SDK is
                not installed.
        """
        self._sdk = import_optional("mcp", extra_requirement("tools"))
        try:
            self._session = await self._begin()
        except MCPUnavailable as error:
            raise UserError(f"{error}. Correct env.tools.mcp.{self.name}.") from error
        listed = {tool.name: tool for tool in await self._session.tools}
        missing = set(self.config.tools).difference(listed)
        if missing:
            raise UserError(
                f"MCP server '{self.name}' has no tool {', '.join(sorted(missing))}. "
                f"Set env.tools.mcp.{self.name}.tools to some of: {', '.join(sorted(listed))}."
            )
        tool_names = sorted(self.config.tools or listed)
        return [MCPTool(self, listed[name]) for name in tool_names]

    async def call(self, tool: str, arguments: dict[str, object]) -> types.CallToolResult:
        """Call a tool; return the SDK's result.

        If the server dies, restart the session and repeat the call once.

        Raises:
            ToolError: The server refused the arguments.
            MCPUnavailable: The server died twice or does not start again.
        """
        for _ in range(2):
            session = await self._live_session()
            try:
                return await session.client.call_tool(tool, arguments)
            except self._sdk.MCPError as error:
                if error.code == self._sdk.types.INVALID_PARAMS:
                    raise ToolError(error.message) from None
                if error.code not in LOST:
                    raise
                session.is_lost = True
        raise MCPUnavailable(f"MCP server '{self.name}' died twice in a call of {tool}")

    def check(self) -> None:
        """Check that there is a session.

        Raises:
            MCPUnavailable: The session is lost.
        """
        if self._session is None or self._session.is_lost:
            raise MCPUnavailable(f"MCP server '{self.name}' died and has not started again")

    async def close(self) -> None:
        """Close the session and stop the server if `command` started it."""
        if self._session is not None:
            await self._session.end()

    async def _live_session(self) -> _Session:
        """Return the session; start a new one if it is lost."""
        async with self._restarting:
            if self._session is None or self._session.is_lost:
                logger.warning("mcp server lost", server=self.name)
                await self.close()
                self._session = await self._begin()
            return self._session

    async def _begin(self) -> _Session:
        client = self._sdk.Client(self._target())
        session = _Session(client, f"session with MCP server {self.name}")
        wait = Wait(
            event=f"the tools of MCP server {self.name}",
            owner="environment tools",
            on=f"MCP server {self.name}",
            seconds=self.config.start_timeout_s,
        )
        try:
            with wait:
                await session.tools
        except BaseException as error:
            await session.end()
            if not isinstance(error, Exception):
                raise
            reason = str(error) if isinstance(error, DeadlineError) else describe(error)
            raise MCPUnavailable(f"MCP server '{self.name}' did not start: {reason}") from error
        return session

    def _target(self) -> str | StdioServerParameters:
        """Return the address of the server, or the command that starts it."""
        if not self.config.command:
            return self.config.url
        program, *arguments = self.config.command
        environment = {
            name: os.path.expandvars(setting) for name, setting in self.config.env.items()
        }
        return self._sdk.StdioServerParameters(command=program, args=arguments, env=environment)


class _Session:
    """A client of the SDK that one task enters and exits."""

    def __init__(self, client: Client, name: str) -> None:
        self.client = client
        self.is_lost = False
        self.tools: asyncio.Future[list[types.Tool]] = asyncio.get_running_loop().create_future()
        """The server's tools, or the error of the client."""
        self._ended = asyncio.Event()
        self._owner = asyncio.create_task(self._run(), name=name)

    async def end(self) -> None:
        """Exit the client and wait until it has closed."""
        self._ended.set()
        if not self.tools.done() or self.tools.cancelled():
            self._owner.cancel()
        await asyncio.wait([self._owner])  # cancelling this call does not cancel the owner

    async def _run(self) -> None:
        try:
            async with self.client:
                tools: list[types.Tool] = []
                cursor = None
                for _ in range(MAX_PAGES):
                    page = await self.client.list_tools(cursor=cursor)
                    tools += page.tools
                    cursor = page.next_cursor
                    if cursor is None:
                        break
                self.tools.set_result(tools)
                await self._ended.wait()
        except Exception as error:  # noqa: BLE001  (any error of the client ends the session)
            if not self.tools.done():
                self.tools.set_exception(error)
        finally:
            self.is_lost = True


class MCPTool(Tool):
    """One tool of an MCP server, with the name `server__tool`."""

    def __init__(self, server: MCPServer, tool: types.Tool) -> None:
        super().__init__(server.config)
        self.slots = server.slots
        self.server = server
        self.name = tool.name
        function = {
            "name": f"{server.name}__{tool.name}",
            "description": tool.description or "",
            "parameters": tool.input_schema,
        }
        self.schema = {"type": "function", "function": function}

    async def call(self, arguments: dict[str, object], state: dict[str, object]) -> str:
        """Return the text of the result; each block without text becomes "[TYPE]"."""
        result = await self.server.call(self.name, arguments)
        blocks = [getattr(block, "text", f"[{block.type}]") for block in result.content]
        answer = "\n".join(blocks)
        if result.is_error:
            raise ToolError(answer)
        return answer


def describe(error: BaseException) -> str:
    """Return the type and text of an error; of an exception group, those of its first error."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
