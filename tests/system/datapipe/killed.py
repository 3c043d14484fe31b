"""Kill processes before a chosen statement of their ledger.

One process imports the modules, which takes seconds, and forks a process for each kill.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib import import_module
from itertools import count
from pathlib import Path

from arealite.system.ledger.ledger import Ledger, Statement

ROOT = Path(__file__).resolve().parents[3]
KILLED = 9
"""Exit code of a killed process."""
Victim = Callable[[Path, Callable[[], None]], None]
"""Gets a folder and a function; the statements after a call of the function count."""


def kill_before(victim: Victim, folders: Mapping[int, Path]) -> dict[int, int]:
    """Run a function of a module in one process for each kill.

    Args:
        victim: The function.
        folders: By number of the statement before which the process exits: its folder.

    Returns:
        By number: the exit code; 0 if the function has executed fewer statements.
    """
    jobs = json.dumps({number: str(folder) for number, folder in folders.items()})
    names = [victim.__module__, victim.__name__]
    process = subprocess.run(
        [sys.executable, "-m", "tests.system.datapipe.killed", *names, jobs],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        check=True,
    )
    last_line = process.stdout.splitlines()[-1]
    return {int(number): code for number, code in json.loads(last_line).items()}


def die_before(number: int) -> None:
    """Exit without cleanup before this statement, counted from now."""
    execute = Ledger.execute
    numbers = count()

    def until_death(statements: Iterable[Statement]) -> Iterator[Statement]:
        for statement in statements:
            if next(numbers) == number:
                os._exit(KILLED)
            yield statement

    Ledger.execute = lambda ledger, statements: execute(ledger, until_death(statements))  # type: ignore[method-assign]


def run_in_fork(victim: Victim, number: int, folder: Path) -> int:
    """Return the exit code of a fork that runs the function."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            victim(folder, partial(die_before, number))
            code = 0
        except BaseException:  # noqa: BLE001  (a fork must not run the code of its parent)
            traceback.print_exc()
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main(module: str, name: str, jobs: str) -> None:
    victim: Victim = getattr(import_module(module), name)
    codes = {
        number: run_in_fork(victim, int(number), Path(folder))
        for number, folder in json.loads(jobs).items()
    }
    print(json.dumps(codes))


if __name__ == "__main__":
    main(*sys.argv[1:])
