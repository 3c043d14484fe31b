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
DEFAULTS = {"ranks": 1, "gpus": 0, "server": "", "needs": "reference", "options": {}, "missing": ""}
Row = dict[str, Any]
"""An entry of rows.toml with `row`, its name; `missing`: why it cannot run; then its result."""


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

    rows = choose(read_toml(__file__, "rows.toml"), options.only)
    gpus = torch.cuda.device_count()
    explain_missing(rows, gpus, quick=options.quick, python=options.sglang_python)
    with tempfile.TemporaryDirectory(prefix="arealite-machine-") as folder:
        about = {"quick": options.quick, "gpus": gpus, "sglang": options.sglang_python}
        results = asyncio.run(run(rows, about, Path(folder)))
    counts = {status: [r["status"] for r in results].count(status) for status in STATUSES}
    host = dict([*info.versions(options.sglang_python), *info.devices()])
    report = {"host": host, **about, "counts": counts, "rows": results}
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(*(f"{count} {status}," for status, count in counts.items()), f"see {options.out}")
    return int(counts["FAIL"] > 0)


STATUSES = "pass", "FAIL", "n/a"


def choose(table: dict[str, Row], texts: Sequence[str]) -> list[Row]:
    """Return the rows whose names contain one of `texts`, and the rows that these need.

    Raises:
        UserError: There is no such row.
    """
    rows = [DEFAULTS | {"row": name} | row for name, row in table.items()]
    chosen = [row for row in rows if any(text in row["row"] for text in texts)]
    if not chosen:
        raise UserError(f"--only {' '.join(texts)}: no row has such a name.")
    names = {name for row in chosen for name in ("reference", row["row"], row["needs"])}
    return [row for row in rows if row["row"] in names]


def explain_missing(rows: list[Row], gpus: int, *, quick: bool, python: str | None) -> None:
    """Set `missing` of the rows that this machine or this version cannot run."""
    dtypes, known = (
        get_args(get_type_hints(FSDPConfig)["dtype"]),
        {f.name for f in fields(FSDPConfig)},
    )
    sglang = ""
    if any(row["server"] == "sglang" for row in rows):
        try:
            probe(str(Path(python or sys.executable).expanduser()), "auto" if gpus else "cpu")
        except UserError as error:
            sglang = f"{error} Option: --sglang-python PATH"
    for row in rows:
        unknown = {*row["options"]} - known if row["run"] == "training:update" else set[str]()
        reasons = {
            f"needs {row['gpus']} GPUs, this machine has {gpus}": row["gpus"] > gpus,
            "left out by --quick": quick and row["ranks"] > 2,
            f"engine.fsdp has no {', '.join(unknown)}": unknown,
            "engine.fsdp.dtype has no float16": row["options"].get("dtype", "float32")
            not in dtypes,
            sglang: row["server"] == "sglang" and sglang,
        }
        row["missing"] = next((reason for reason, holds in reasons.items() if holds), "")


async def run(rows: list[Row], about: dict[str, Any], folder: Path) -> list[Row]:
    """Run rows in child processes; print and return their results.

    A row that crashes its processes or exceeds LIMIT_S fails; the next rows get new processes.
    """
    results = list[Row]()
    for _, group in groupby(rows, lambda row: (row["ranks"], row["server"])):
        left = [*group]
        while left:
            failed = {result["row"] for result in results if result["status"] == "FAIL"}
            for row in left:
                if row["needs"] in failed:
                    row["missing"] = f"needs the files of '{row['needs']}', which failed"
            for row in [row for row in left if row["missing"]]:
                left.remove(row)
                results.append(row | {"status": "n/a", "text": row["missing"], "seconds": 0.0})
                print(fold(line(results[-1])), flush=True)
            reason = await session(left, about, folder) if left else ""
            path = folder / "results.jsonl"
            found = [*map(json.loads, path.read_text().splitlines())] if left else []
            results += found
            del left[: len(found)]
            if left:
                results.append(left.pop(0) | {"status": "FAIL", "text": reason, "seconds": 0.0})
                print(fold(line(results[-1])), flush=True)
    return results


async def session(rows: list[Row], about: dict[str, Any], folder: Path) -> str:
    """Run rows in the same processes, which print and write results; return why they ended."""
    gpus, count = about["gpus"], rows[0]["ranks"]
    (folder / "plan.json").write_text(json.dumps(about | {"rows": rows}))
    (folder / "results.jsonl").write_text("")
    shared = threads(max(1, (os.cpu_count() or 1) // count))
    if gpus < count:
        shared["CUDA_VISIBLE_DEVICES"] = ""
    words = [sys.executable, "-m", "arealite.cli.machine.bench", str(folder)]
    role = Role(("rank",), Budget(0), leads=True)
    role.over.set()  # a rank may exit before the others
    try:
        for rank, environment in enumerate(rank_environments(count)):
            if rows[0]["server"]:  # the server has the first GPU, the trainer the last
                environment["LOCAL_RANK"] = str(max(0, gpus - 1))
            log, stdout, name = folder / f"rank-{rank}.log", None if rank else 1, f"rank {rank}"
            environment |= shared
            child = await spawn(name, words, log=log, environment=environment, stdout=stdout)
            role.children.append(child)
        async with asyncio.timeout(LIMIT_S * (len(rows) + 1)):
            dead = await role.end()
        return dead.exit_summary if dead else "its processes exited without a result"
    except TimeoutError:
        return "its processes do not respond"
    finally:
        await end_all(role.children, signal.SIGKILL)


def line(result: Row) -> str:
    """Return a result as one line of the table."""
    where = f"{result['ranks']} × {result.get('device', '')}" if "device" in result else ""
    head = f"{result['status']:<4} {result['row']:<48} {where:<8} {result['seconds']:>5.1f} s"
    return f"{head}  {result['text']}"
