"""`arealite check --machine`: run all paths that this machine offers; print and write a table."""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from arealite.base.errors import UserError
from arealite.base.places import check_folder
from arealite.cli import info
from arealite.cli.fold import fold
from arealite.cli.machine.rows import Row, plan
from arealite.impl.launcher.processes import Child, end_all, rank_environments, spawn

LIMIT_S = 600.0
"""Longest time of a row, the start of its processes included."""
Result = dict[str, Any]


def main(argv: Sequence[str]) -> int:
    """Run the rows; return 1 if one fails."""
    parser = argparse.ArgumentParser(prog="arealite check --machine", description=__doc__)
    parser.add_argument("--machine", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="tiny shapes, at most 2 ranks")
    parser.add_argument("--out", type=Path, default=Path("machine.json"), help="report to write")
    parser.add_argument("--sglang-python", metavar="PATH", help="Python that has sglang")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="rows whose names contain TEXT")
    options = parser.parse_args(argv)
    check_folder(options.out.absolute().parent, "folder", "--out")
    import torch

    gpus = torch.cuda.device_count()
    rows = plan(gpus=gpus, quick=options.quick, sglang_python=options.sglang_python)
    if options.only:
        chosen = [row for row in rows if any(text in row.name for text in options.only)]
        names = {name for row in chosen for name in (row.name, row.needs, "reference")}
        rows = [row for row in rows if row.name in names]
        if not rows:
            raise UserError(f"--only {' '.join(options.only)}: no row has such a name.")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="arealite-machine-") as folder:
        results = asyncio.run(_report(rows, gpus, Path(folder), options.quick))
    failed = [found["row"] for found in results if found["status"] == "FAIL"]
    counted = {name: sum(r["status"] == name for r in results) for name in ("pass", "FAIL", "n/a")}
    about = {
        "host": dict([*info.versions(options.sglang_python), *info.devices()]),
        "quick": options.quick,
        "seconds": round(time.monotonic() - began, 1),
        "counts": counted,
        "rows": results,
    }
    options.out.write_text(json.dumps(about, indent=1) + "\n")
    print(", ".join(f"{count} {name}" for name, count in counted.items()), f"→ {options.out}")
    return int(bool(failed))


async def _report(rows: list[Row], gpus: int, folder: Path, quick: bool) -> list[Result]:
    found = list[Result]()
    async for result in run(rows, gpus=gpus, folder=folder, quick=quick):
        found.append(result)
        print(fold(line(result)), flush=True)
    return found


def line(result: Result) -> str:
    """Return a result as one line of the table."""
    numbers = [
        f"{name} {value if isinstance(value, str) else format(value, '.3g')}"
        for name, value in result["numbers"].items()
    ]
    words = "; ".join([*result["failures"], *numbers])
    return f"{result['status']:<4} {result['row']:<36} {result['seconds']:>5.1f} s  {words}"


async def run(
    rows: Sequence[Row], *, gpus: int, folder: Path, quick: bool, limit_s: float = LIMIT_S
) -> AsyncIterator[Result]:
    """Run rows in child processes, and yield the result of each.

    A row that crashes its processes or exceeds `limit_s` fails; the next rows get new processes.
    """
    plan_file = {"quick": quick, "rows": [asdict(row) for row in rows]}
    (folder / "plan.json").write_text(json.dumps(plan_file))
    failed = set[str]()
    for _, group in groupby(enumerate(rows), lambda each: each[1].session):
        left = {row.name: (number, row) for number, row in group}
        while left:
            for name, (_, row) in [*left.items()]:
                why = f"it needs the files of {row.needs}, which failed"
                if why := row.missing or (why if row.needs in failed else ""):
                    yield _result(left.pop(name)[1], "n/a", {"failures": [why]})
            async for result in _session([*left.values()], gpus, folder, limit_s):
                yield result
                left.pop(result["row"])
                if result["status"] == "FAIL":
                    failed.add(result["row"])


async def _session(
    numbered: list[tuple[int, Row]], gpus: int, folder: Path, limit_s: float
) -> AsyncIterator[Result]:
    """Start the ranks of a session; yield the results of rows up to the first crash."""
    if not numbered:
        return
    numbers, rows = [str(number) for number, _ in numbered], [row for _, row in numbered]
    first, children = rows[0], list[Child]()
    words = [sys.executable, "-m", "arealite.cli.machine.bench", str(folder), *numbers]
    threads = str(max(1, (os.cpu_count() or 1) // first.ranks))
    shared = {"OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
    if first.device == "cpu":
        shared["CUDA_VISIBLE_DEVICES"] = ""
    if first.server and gpus:  # the server has the first GPU, the trainer the last
        shared["LOCAL_RANK"] = str(gpus - 1)
    try:
        for rank, environment in enumerate(rank_environments(first.ranks)):
            log = folder / f"{'-'.join(map(str, first.session))}-{rank}.log"
            pipe = asyncio.subprocess.PIPE if rank == 0 else None
            name, environment = f"rank {rank}", environment | shared
            child = await spawn(name, words, log=log, environment=environment, stdout=pipe)
            children.append(child)
        for row in rows:
            began = time.monotonic()
            found = await _next(children, limit_s)
            if isinstance(found, str):
                seconds = round(time.monotonic() - began, 2)
                yield _result(row, "FAIL", {"failures": [found], "seconds": seconds})
                return
            yield _result(row, "FAIL" if found["failures"] else "pass", found)
        await asyncio.wait([asyncio.ensure_future(c.process.wait()) for c in children], timeout=20)
    finally:
        await end_all(children, grace_s=0.0)


async def _next(children: Sequence[Child], limit_s: float) -> Result | str:
    """Return what rank 0 reports next, or why it reports nothing."""
    reading = asyncio.ensure_future(_read(children[0]))
    running = {asyncio.ensure_future(child.process.wait()): child for child in children}
    until = time.monotonic() + limit_s
    try:
        while not reading.done() and time.monotonic() < until:
            left = until - time.monotonic()
            first = asyncio.FIRST_COMPLETED
            done, _ = await asyncio.wait([reading, *running], timeout=left, return_when=first)
            dead = [running.pop(task) for task in done if task in running]
            if reason := next((child.exit_summary for child in dead if child.code), ""):
                return reason
        return reading.result() if reading.done() else f"no result after {limit_s:g} s"
    finally:
        for task in (reading, *running):
            task.cancel()


async def _read(child: Child) -> Result | str:
    assert child.process.stdout is not None
    async for raw in child.process.stdout:
        if raw.startswith(b'{"row": '):
            return json.loads(raw)
    await child.process.wait()
    return child.exit_summary


def _result(row: Row, status: str, found: Result) -> Result:
    where = {"status": status, "ranks": row.ranks, "device": row.device}
    return {"row": row.name, "numbers": {}, "failures": [], "seconds": 0.0, **found, **where}
