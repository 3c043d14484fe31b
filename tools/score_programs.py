"""Score programs of made rows in the real sandbox: right, wrong, half right, and cheats.

Usage: python tools/score_programs.py [--rows 1000] [--backend bwrap|unsafe]

Prints the number of programs of each kind with the expected score; exits 1 if a score differs.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from arealite.ext.code.config import CodeEnvConfig
from arealite.ext.code.env import CodeEnv, program, read_cases
from arealite.ext.sandbox.config import SandboxConfig
from tests.ext.code.generated import CHEATS, GeneratedRow, generated_rows
from tests.ext.games.players import task


async def main() -> int:
    """Score all rows; return 1 if a score is not the known one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=15)
    parser.add_argument("--backend", default="bwrap")
    options = parser.parse_args()
    sandbox = SandboxConfig(backend=options.backend, timeout_s=60.0, concurrency=4)
    env = CodeEnv(None, CodeEnvConfig(sandbox=sandbox, case_timeout_s=20.0))
    await env.setup()
    begin, right, wrong = time.monotonic(), Counter[str](), Counter[str]()
    slots = asyncio.Semaphore(16)

    async def score(made: GeneratedRow, name: str) -> None:
        text, due = made.programs[name]
        async with slots:
            cases = read_cases(task(made.prompt, **made.info), env.config.case_timeout_s)
            found = await env.judge(program(text, made.prompt, cases.entry), cases)
        is_right = found.passed == due and (name != "right" or found.total == made.total)
        (right if is_right else wrong)[name] += 1
        if not is_right:
            print(f"{made.kind} {name}: {found}, not {due} of {made.total}\n{made.info}\n{text}")

    async with asyncio.TaskGroup() as group:
        for number, made in enumerate(generated_rows(options.rows, options.seed)):
            for name in ("right", "innocent", "wrong", "first")[: 1 + number % 4]:
                group.create_task(score(made, name))
            group.create_task(score(made, [*CHEATS][number % len(CHEATS)]))
    for name in right | wrong:
        print(f"{name:10} {right[name]:6} as known, {wrong[name]} not")
    seconds = time.monotonic() - begin
    print(f"{options.rows} rows, {right.total() + wrong.total()} programs in {seconds:.0f} s")
    await env.close()
    return int(wrong.total() > 0)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
