"""The tool `python`: each call runs one program, in the sandbox or in Monty."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from arealite.api.sandbox import SandboxConfig
from arealite.api.tool import Tool, ToolError, function
from arealite.api.tool_config import PythonToolConfig
from arealite.base.extras import extra_requirement, import_optional
from arealite.impl.sandbox.process import Sandbox

MAX_CHARS = 20_000
MONTY_MB = 64
"""Memory limit of a program in Monty. Its last value is copied into this process."""
AS_TYPED = """import ast
_scope = {{"__name__": "__main__"}}
for _node in ast.parse({code!r}).body:
    exec(compile(ast.Interactive([_node]), "<code>", "single"), _scope)
"""
"""Runs a program like Python's interactive prompt: the value of each expression is printed."""


class PythonTool(Tool):
    """Runs a program and returns its output."""

    schema = function(
        "python",
        "Run a Python program; returns what it prints. Nothing is kept between calls.",
        required=("code",),
        code={"type": "string"},
    )

    def __init__(self, config: PythonToolConfig) -> None:
        super().__init__(config)
        self.slots = asyncio.Semaphore(config.sandbox.concurrency)
        self._stack = AsyncExitStack()
        self._run: Callable[[str], Awaitable[str]]

    async def setup(self) -> None:
        """Start the back-end.

        Raises:
            UserError: The back-end is not installed or cannot run programs on this host.
        """
        limits = self.config.sandbox
        if self.config.backend == "sandbox":
            sandbox = Sandbox(limits)
            await sandbox.setup()
            self._run = partial(run_in_sandbox, sandbox)
        else:
            monty = import_optional("pydantic_monty", extra_requirement("tools"))
            pool = monty.AsyncMonty(max_processes=limits.concurrency)
            await self._stack.enter_async_context(pool)
            self._run = partial(run_in_monty, monty, pool, limits)

    async def call(self, arguments: dict[str, Any], state: dict[str, Any]) -> str:
        """Run a program; return its output.

        Raises:
            ToolError: The program failed; the text is the last line of the error.
        """
        if len(arguments["code"]) > MAX_CHARS:
            raise ToolError(f"the program is longer than {MAX_CHARS} characters")
        return (await self._run(arguments["code"])).rstrip() or "(nothing printed)"

    async def close(self) -> None:
        """Stop the back-end."""
        await self._stack.aclose()


def failed(why: str, printed: str) -> ToolError:
    """Return an error with the reason and the program's output so far."""
    return ToolError(f"{why}\nprinted before:\n{printed}" if printed else why)


async def run_in_sandbox(sandbox: Sandbox, code: str) -> str:
    """Run a program in the sandbox; return its stdout.

    Raises:
        ToolError: The program failed or was killed at a limit.
    """
    outcome = await sandbox.run(AS_TYPED.format(code=code))
    if outcome.status == "exited" and outcome.code == 0:
        return outcome.stdout
    why = {
        "timeout": f"ran longer than {sandbox.config.timeout_s:g} s",
        "output": f"printed more than {sandbox.config.output_kb} kB",
    }
    last_line = outcome.stderr.strip().rpartition("\n")[2]
    default = last_line or f"ended with code {outcome.code}"
    raise failed(why.get(outcome.status, default), outcome.stdout)


async def run_in_monty(monty: Any, pool: Any, limits: SandboxConfig, code: str) -> str:
    """Run a program in Monty; return its output and the value of its last expression.

    Monty interprets a subset of Python in child processes, without files, network or imports.

    Raises:
        ToolError: The program failed or exceeded a limit.
    """
    printed = monty.CollectString(limits.output_kb << 10)
    most = min(limits.memory_mb, MONTY_MB) << 20
    bounds = {"max_feed_duration_secs": limits.timeout_s, "max_memory": most}
    try:
        async with pool.checkout(limits=bounds, os_policy={"sleep": "zero"}) as shell:
            value = await shell.feed_run(code, print_callback=printed)
        return printed.output + ("" if value is None else f"{value!r}\n")
    except monty.MontyCrashedError as error:
        raise ToolError(str(error)) from error
    except monty.MontyError as error:
        raise failed(error.display("type-msg"), printed.output) from error
    except (ValueError, RecursionError) as error:  # raised by `repr` in this process
        raise failed(f"the value cannot be shown: {error}", printed.output) from error
