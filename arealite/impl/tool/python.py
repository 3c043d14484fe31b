"""Runs the agent's Python, each call a program of its own, in the project's sandbox or in Monty."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from contextlib import AsyncExitStack
from typing import Any

from arealite.api.sandbox import SandboxConfig
from arealite.api.tool import PythonToolConfig, Tool, ToolError, function
from arealite.base.extras import extra, ours
from arealite.impl.sandbox.process import Sandbox

MAX_CHARS = 20_000
MONTY_MB = 64
"""What a program may keep in Monty: its value is made anew here, in the event loop."""
AS_TYPED = """import ast
_scope = {{"__name__": "__main__"}}
for _node in ast.parse({code!r}).body:
    exec(compile(ast.Interactive([_node]), "<code>", "single"), _scope)
"""
"""Runs a program as a prompt does that is typed into: it prints the value of each expression."""


class PythonTool(Tool):
    """Runs a program and answers with what it prints."""

    schema = function(
        "python",
        "Run a Python program; returns what it prints. Nothing is kept between calls.",
        required=("code",),
        code={"type": "string"},
    )

    def __init__(self, config: PythonToolConfig) -> None:
        super().__init__(config)
        self.slots = asyncio.Semaphore(config.sandbox.concurrency)
        self.stack = AsyncExitStack()
        make = _Monty if config.backend == "monty" else _Sandbox
        self.runner: _Runner = make(config.sandbox)

    async def setup(self) -> None:
        """Start what runs programs."""
        await self.runner.setup(self.stack)

    async def call(self, arguments: dict[str, Any], state: dict[str, Any]) -> str:
        """Run a program; of an error, the agent gets the last line."""
        if len(arguments["code"]) > MAX_CHARS:
            raise ToolError(f"the program is longer than {MAX_CHARS} characters")
        return (await self.runner.run(arguments["code"])).rstrip() or "(nothing printed)"

    async def close(self) -> None:
        """Stop it."""
        await self.stack.aclose()


def failed(why: str, printed: str) -> ToolError:
    """Say why a program failed, and after that what it had printed."""
    return ToolError(f"{why}\nprinted before:\n{printed}" if printed else why)


class _Runner(ABC):
    def __init__(self, config: SandboxConfig) -> None:
        self.config = config

    @abstractmethod
    async def setup(self, stack: AsyncExitStack) -> None:
        """Start; `stack` ends it."""

    @abstractmethod
    async def run(self, code: str) -> str:
        """Return what the program printed; a ToolError says how it failed."""


class _Sandbox(_Runner):
    async def setup(self, stack: AsyncExitStack) -> None:
        self.sandbox = Sandbox(self.config)
        await self.sandbox.setup()

    async def run(self, code: str) -> str:
        outcome = await self.sandbox.run(AS_TYPED.format(code=code))
        if outcome.status == "exited" and outcome.code == 0:
            return outcome.stdout
        why = {
            "timeout": f"ran longer than {self.config.timeout_s:g} s",
            "output": f"printed more than {self.config.output_kb} kB",
        }
        said = outcome.stderr.strip().rpartition("\n")[2] or f"ended with code {outcome.code}"
        raise failed(why.get(outcome.status, said), outcome.stdout)


class _Monty(_Runner):
    """A pool of processes that interpret a subset of Python, without files, network or imports."""

    async def setup(self, stack: AsyncExitStack) -> None:
        self.monty = extra("pydantic_monty", ours("tools"))
        pool = self.monty.AsyncMonty(max_processes=self.config.concurrency)
        self.pool = await stack.enter_async_context(pool)

    async def run(self, code: str) -> str:
        printed = self.monty.CollectString(self.config.output_kb << 10)
        limits: Any = {
            "max_feed_duration_secs": self.config.timeout_s,
            "max_memory": min(self.config.memory_mb, MONTY_MB) << 20,
        }
        session = self.pool.checkout(limits=limits, os_policy={"sleep": "zero"})
        try:
            async with session as shell:
                value = await shell.feed_run(code, print_callback=printed)
            return printed.output + ("" if value is None else f"{value!r}\n")
        except self.monty.MontyCrashedError as error:
            raise ToolError(str(error)) from error
        except self.monty.MontyError as error:
            raise failed(error.display("type-msg"), printed.output) from error
        except (ValueError, RecursionError) as error:  # of repr, of this Python's
            raise failed(f"the value cannot be shown: {error}", printed.output) from error
