"""The tool `python`: each call runs one program, in the sandbox or in Monty."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from arealite.api.tool import Tool, ToolError, function
from arealite.base.extras import extra_requirement, import_optional
from arealite.ext.sandbox.config import SandboxConfig
from arealite.ext.sandbox.sandbox import Sandbox
from arealite.ext.tools.config import PythonToolConfig

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


def failed(reason: str, printed: str) -> ToolError:
    """Return an error with the reason and the program's output so far."""
    if not printed:
        return ToolError(reason)
    return ToolError(f"{reason}\nprinted before:\n{printed}")


async def run_in_sandbox(sandbox: Sandbox, code: str) -> str:
    """Run a program in the sandbox; return its stdout.

    Raises:
        ToolError: The program failed or was killed at a limit.
    """
    outcome = await sandbox.run(AS_TYPED.format(code=code))
    if outcome.status == "exited" and outcome.code == 0:
        return outcome.stdout
    if outcome.status == "timeout":
        reason = f"ran longer than {sandbox.config.timeout_s:g} s"
    elif outcome.status == "output":
        reason = f"printed more than {sandbox.config.output_kb} kB"
    else:
        _, _, last_line = outcome.stderr.strip().rpartition("\n")
        reason = last_line or f"ended with code {outcome.code}"
    raise failed(reason, outcome.stdout)


async def run_in_monty(monty: Any, pool: Any, limits: SandboxConfig, code: str) -> str:
    """Run a program in Monty; return its output and the value of its last expression.

    Monty interprets a subset of Python in child processes, without files, network or imports.

    Raises:
        ToolError: The program failed or exceeded a limit.
    """
    printed = monty.CollectString(limits.output_kb << 10)
    monty_limits = {
        "max_feed_duration_secs": limits.timeout_s,
        "max_memory": min(limits.memory_mb, MONTY_MB) << 20,
    }
    try:
        async with pool.checkout(limits=monty_limits, os_policy={"sleep": "zero"}) as shell:
            last_value = await shell.feed_run(code, print_callback=printed)
        if last_value is None:
            return printed.output
        return f"{printed.output}{last_value!r}\n"
    except monty.MontyCrashedError as error:
        raise ToolError(str(error)) from error
    except monty.MontyError as error:
        raise failed(error.display("type-msg"), printed.output) from error
    except (ValueError, RecursionError) as error:  # raised by `repr` in this process
        raise failed(f"the value cannot be shown: {error}", printed.output) from error
