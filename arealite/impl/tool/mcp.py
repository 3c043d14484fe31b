"""Tools of a server of the Model Context Protocol, through its SDK (`mcp`, an extra).

One session a worker. The SDK wants its contexts left by the task that entered them, so each session
has a task of its own; when a server dies, its session is begun anew, once for a call.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from arealite.api.tool import Tool, ToolError
from arealite.api.tool_config import MCPServerConfig
from arealite.base import log
from arealite.base.errors import DeadlineError, EpisodeError, UserError
from arealite.base.extras import extra_requirement, import_optional
from arealite.system.health.waits import Wait

logger = log.get(__name__)

LOST = {-32000, -32600, -32001}
"""Errors that end a session: connection closed; and, by HTTP, what servers that were started anew
say of a session they do not know."""
MAX_PAGES = 100
"""Of a server's list of tools."""


class MCPUnavailable(EpisodeError):
    """A server of tools is dead and stays so: nothing that the agent could help."""

    failure_class = "mcp_unavailable"


class MCPServer:
    """One server, and the session with it."""

    def __init__(self, name: str, config: MCPServerConfig) -> None:
        if bool(config.command) == bool(config.url):
            where = f"env.tools.mcp.{name}"
            raise UserError(f"{where} needs either a command or a url. Set one of them.")
        self.name = name
        self.config = config
        self._session: _Session | None = None
        self._restarting = asyncio.Lock()
        self.slots = asyncio.Semaphore(config.concurrency)

    async def setup(self) -> list[MCPTool]:
        """Start the server or find it; return its tools, sorted by name.

        Raises:
            UserError: it does not answer, lacks a tool of `config.tools`, or the SDK is missing.
        """
        self._sdk = import_optional("mcp", extra_requirement("tools"))
        try:
            self._session = await self._begin()
        except MCPUnavailable as error:
            raise UserError(f"{error}. Correct env.tools.mcp.{self.name}.") from error
        listed = {tool.name: tool for tool in self._session.tools}
        if missing := set(self.config.tools).difference(listed):
            raise UserError(
                f"MCP server '{self.name}' has no tool {', '.join(sorted(missing))}. "
                f"Set env.tools.mcp.{self.name}.tools to some of: {', '.join(sorted(listed))}."
            )
        return [MCPTool(self, listed[name]) for name in sorted(self.config.tools or listed)]

    async def call(self, tool: str, arguments: dict[str, Any]) -> Any:
        """Return the result of a call; a server that died is started once more for it.

        Raises:
            MCPUnavailable: it died again, or does not start.
        """
        for _ in range(2):
            session = await self._alive()
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
        """Raise MCPUnavailable while there is no session: a call then waits for it in vain."""
        if self._session is None or self._session.is_lost:
            raise MCPUnavailable(f"MCP server '{self.name}' died and is not back")

    async def close(self) -> None:
        """End the session, and with it a server that was started."""
        if self._session is not None:
            await self._session.end()

    async def _alive(self) -> _Session:
        """Return a session that is not known to be lost; begin one if need be."""
        async with self._restarting:
            if self._session is None or self._session.is_lost:
                logger.warning("mcp server lost", server=self.name)
                await self.close()
                self._session = await self._begin()
            return self._session

    async def _begin(self) -> _Session:
        config, target = self.config, self.config.url
        if config.command:
            program, *rest = config.command
            env = {name: os.path.expandvars(value) for name, value in config.env.items()}
            target = self._sdk.StdioServerParameters(command=program, args=rest, env=env)
        session = _Session(self._sdk.Client(target), f"session with MCP server {self.name}")
        what, owner = f"the tools of MCP server {self.name}", "environment tools"
        try:
            on, seconds = f"MCP server {self.name}", config.start_timeout_s
            with Wait(what, owner=owner, on=on, seconds=seconds):
                await session.begin()
        except BaseException as error:
            await session.end()
            if not isinstance(error, Exception):
                raise
            why = str(error) if isinstance(error, DeadlineError) else first(error)
            raise MCPUnavailable(f"MCP server '{self.name}' did not start: {why}") from error
        return session


class _Session:
    """A client of the SDK's, entered and left by a task of its own."""

    def __init__(self, client: Any, name: str) -> None:
        self.client = client
        self.name = name
        self.tools = list[Any]()
        self.is_lost = False
        self._listed, self._ended = asyncio.Event(), asyncio.Event()
        self._error: Exception | None = None

    async def begin(self) -> None:
        """Enter the client and list the tools; raises what the client did."""
        self._owner = asyncio.create_task(self._own(), name=self.name)
        await self._listed.wait()
        if self._error is not None:
            raise self._error

    async def end(self) -> None:
        """Leave the client, and wait until it is left."""
        self._ended.set()
        if not self._listed.is_set():
            self._owner.cancel()
        await asyncio.wait([self._owner])  # which goes on to its end when this is cancelled

    async def _own(self) -> None:
        try:
            async with self.client:
                cursor = None
                for _ in range(MAX_PAGES):
                    page = await self.client.list_tools(cursor=cursor)
                    self.tools += page.tools
                    if (cursor := page.next_cursor) is None:
                        break
                self._listed.set()
                await self._ended.wait()
        except Exception as error:  # noqa: BLE001  (the server's, at any time: the session is over)
            self._error = error
        finally:
            self.is_lost = True
            self._listed.set()


class MCPTool(Tool):
    """One tool of a server, called `server__tool`."""

    def __init__(self, server: MCPServer, tool: Any) -> None:
        super().__init__(server.config)
        self.slots = server.slots
        self.server = server
        self.name = tool.name
        about = {"name": f"{server.name}__{tool.name}", "description": tool.description or ""}
        self.schema = {"type": "function", "function": about | {"parameters": tool.input_schema}}

    async def call(self, arguments: dict[str, Any], state: dict[str, Any]) -> str:
        """Call it; what is no text is named by its kind."""
        result = await self.server.call(self.name, arguments)
        texts = [getattr(block, "text", f"[{block.type}]") for block in result.content]
        answer = "\n".join(texts)
        if result.is_error:
            raise ToolError(answer)
        return answer


def first(error: BaseException) -> str:
    """Describe an error, or the first one of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
