"""`arealite check --machine`: run all paths that this machine offers; print and write a table."""

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import fields
from itertools import groupby
from pathlib import Path
from typing import Any, get_args, get_type_hints

from arealite.api.engine_config import FSDPConfig
from arealite.base.data import read_toml
from arealite.base.errors import UserError
from arealite.base.places import check_folder
from arealite.cli import info
from arealite.cli.fold import fold
from arealite.impl.launcher.processes import end_all, rank_environments, spawn, threads
from arealite.impl.launcher.supervisor import Budget, Role
from arealite.impl.server.sglang import probe

LIMIT_S = 600.0
"""Longest time of a row."""
DEFAULTS = {"ranks": 1, "gpus": 0, "server": "", "options": {}, "seconds": 0.0, "device": ""}
STATUSES = "pass", "FAIL", "n/a"
Row = dict[str, Any]
"""An entry of rows.toml with `name`; the result adds status, text, seconds, device, numbers."""


def main(argv: Sequence[str]) -> int:
    """Run the rows; return 1 if one fails."""
    parser = argparse.ArgumentParser(prog="arealite check --machine", description=__doc__)
    parser.add_argument("--machine", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="tiny shapes, at most 2 ranks")
    parser.add_argument("--out", type=Path, default=Path("machine.json"), help="report to write")
    parser.add_argument("--sglang-python", metavar="PATH", help="Python that has sglang")
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="parts of names")
    options = parser.parse_args(argv)
    check_folder(options.out.absolute().parent, "folder", "--out")
    import torch

    plan: Row = {"quick": options.quick, "gpus": torch.cuda.device_count()}
    plan["python"] = str(Path(options.sglang_python or sys.executable).expanduser())
    table = read_toml(__file__, "rows.toml")
    rows = [DEFAULTS | {"name": name} | row for name, row in table.items()]
    rows = [row for row in rows if any(text in row["name"] for text in options.only)]
    if not rows:
        raise UserError(f"--only {' '.join(options.only)}: no row has such a name.")
    explain_missing(rows, plan)
    with tempfile.TemporaryDirectory(prefix="arealite-machine-") as folder:
        results = asyncio.run(run(rows, plan, Path(folder)))
    counts = {status: [row["status"] for row in results].count(status) for status in STATUSES}
    host = dict([*info.versions(plan["python"]), *info.devices()])
    report = json.dumps({"host": host, **plan, "counts": counts, "rows": results}, indent=1)
    options.out.write_text(report + "\n")
    print(*(f"{count} {status}," for status, count in counts.items()), f"see {options.out}")
    return int(counts["FAIL"] > 0)


def explain_missing(rows: list[Row], plan: Row) -> None:
    """Set status and text of the rows that this machine or this version cannot run."""
    dtypes, sglang = get_args(get_type_hints(FSDPConfig)["dtype"]), ""
    known = {field.name for field in fields(FSDPConfig)}
    if any(row["server"] == "sglang" for row in rows):
        try:
            probe(plan["python"], "auto" if plan["gpus"] else "cpu")
        except UserError as error:
            sglang = f"{error} Option: --sglang-python PATH"
    for row in rows:
        is_update, dtype = row["run"] == "training:update", row["options"].get("dtype", "float32")
        reasons = {
            f"needs {row['gpus']} GPUs, found {plan['gpus']}": row["gpus"] > plan["gpus"],
            "left out by --quick": plan["quick"] and row["ranks"] > 2,
            "an option of engine.fsdp is missing": is_update and {*row["options"]} - known,
            f"engine.fsdp.dtype has no {dtype}": dtype not in dtypes,
            sglang: row["server"] == "sglang" and sglang,
        }
        if reason := next((reason for reason, holds in reasons.items() if holds), ""):
            row |= {"status": "n/a", "text": reason}


async def run(rows: list[Row], plan: Row, folder: Path) -> list[Row]:
    """Run rows in child processes; print and return their results.

    Consecutive rows with equal ranks and server share processes. A row that crashes them or exceeds
    LIMIT_S fails; the next row gets new processes.
    """
    path, results = folder / "results.jsonl", list[Row]()
    for _, group in groupby(rows, lambda row: (row["ranks"], row["server"])):
        left = [*group]
        while left:
            missing = [row for row in left if "status" in row]
            left = [row for row in left if "status" not in row]
            path.write_text("")
            reason = await session(left, plan, folder) if left else ""
            found = [*map(json.loads, path.read_text().splitlines())]
            if left := left[len(found) :]:
                missing.append(left.pop(0) | {"status": "FAIL", "text": reason})
            for row in missing:
                print(fold(line(row)), flush=True)
            results += found + missing
    return results


async def session(rows: list[Row], plan: Row, folder: Path) -> str:
    """Run rows in the same processes, which print and write results; return why they ended."""
    gpus, count = plan["gpus"], rows[0]["ranks"]
    (folder / "plan.json").write_text(json.dumps(plan | {"rows": rows}))
    shared = threads(max(1, (os.cpu_count() or 1) // count))
    shared |= {"CUDA_VISIBLE_DEVICES": ""} if gpus < count else {}
    words = [sys.executable, "-m", "arealite.cli.machine.bench", str(folder)]
    role = Role(("rank",), Budget(0), leads=True)
    role.over.set()  # a rank may exit before the others
    try:
        for rank, own in enumerate(rank_environments(count)):
            if rows[0]["server"]:  # the server has the first GPU, the trainer the last
                own["LOCAL_RANK"] = str(max(0, gpus - 1))
            log, stdout = folder / f"rank-{rank}.log", None if rank else 1
            own |= shared
            child = await spawn(f"rank {rank}", words, log=log, environment=own, stdout=stdout)
            role.children.append(child)
        async with asyncio.timeout(LIMIT_S * (len(rows) + 1)):
            dead = await role.end()
        return dead.exit_summary if dead else "its processes exited without a result"
    except TimeoutError:
        return "its processes do not respond"
    finally:
        await end_all(role.children, signal.SIGKILL)


def line(row: Row) -> str:
    """Return a result as one line of the table."""
    head = f"{row['status']:<4} {row['name']:<48} {row['ranks']} × {row['device']:<4}"
    return f"{head} {row['seconds']:>6.1f} s  {row['text']}"
