"""Run the cells of a notebook page: python3 cells.py CELLS.json (see tutorial.py).

As in Jupyter, an event loop runs, `await` works outside of functions, the value of the last line is
printed, `%%writefile` writes a file, and modules of the current folder can be imported. The module
`__main__` has no file. A cell that fails ends the run, unless the page shows its error.
"""

import ast
import asyncio
import inspect
import json
import os
import sys
import traceback
import types
from pathlib import Path

import guarded  # beside this file

MARK = "\x1e"
WRITE_FILE = "%%writefile "


async def run(body: str, main: types.ModuleType) -> None:
    """Run one cell."""
    if body.startswith(WRITE_FILE):
        write(*body.removeprefix(WRITE_FILE).split("\n", 1))
        return
    tree = ast.parse(body)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    await evaluate(compile(tree, "<cell>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), main)
    if isinstance(last, ast.Expr):
        code = compile(ast.Expression(last.value), "<cell>", "eval", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        value = await evaluate(code, main)
        if value is not None:
            print(repr(value))


def write(name: str, text: str) -> None:
    """Write the file of a cell."""
    Path(name).write_text(text)


async def evaluate(code: types.CodeType, main: types.ModuleType) -> object:
    """Return the value of compiled code; await it if it awaits."""
    value = eval(code, main.__dict__)
    return await value if code.co_flags & inspect.CO_COROUTINE else value


async def run_all(cells: list[tuple[int, str, bool]]) -> int:
    """Run the cells in order; return 1 if one fails that should not."""
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    for line, body, fails in cells:
        status = 0
        try:
            await run(body, main)
        except Exception as error:  # noqa: BLE001  as in Jupyter, any error ends the cell
            status = 1
            if not fails:
                traceback.print_exc(file=sys.stdout)
            print(f"{type(error).__name__}: {error}")
        print(f"\n{MARK}{line} {status}", flush=True)
        if status and not fails:
            return 1
    return 0


if __name__ == "__main__":
    if server := os.environ.pop(guarded.SERVER, ""):
        guarded.install(server)
    sys.path[0] = ""
    sys.exit(asyncio.run(run_all(json.loads(Path(sys.argv[1]).read_text()))))
