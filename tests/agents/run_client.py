"""Runs the sessions of one client: `python run_client.py MODULE < JOBS`.

Each line of the input is the JSON of a Job. Each line of the output is the JSON of its end:
{"answer": text} or {"error": text}.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import traceback
from typing import Any

from clients.tools import Job


async def main(module: str, lines: list[str], at_once: int) -> None:
    """Run all jobs, some at a time; write their ends in the order of the input."""
    client: Any = importlib.import_module(f"clients.{module}")
    gate = asyncio.Semaphore(at_once)

    async def end(line: str) -> dict[str, str]:
        async with gate:
            try:
                return {"answer": await client.play(Job(**json.loads(line)))}
            except Exception:  # noqa: BLE001  (the test reports it)
                return {"error": traceback.format_exc()[-4000:]}

    for result in await asyncio.gather(*[end(line) for line in lines]):
        print("\nEND", json.dumps(result))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.stdin.read().splitlines(), int(sys.argv[2])))
