"""Test all paths that this machine offers: training, checkpoints, servers, publishing, copies."""

import argparse
import json
import multiprocessing
import signal
import sys
import tempfile
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from arealite.base.data import read_toml
from arealite.base.errors import UserError
from arealite.base.places import check_folder
from arealite.cli import info
from arealite.cli.fold import fold
from arealite.impl.launcher.exit_reason import exit_reason
from arealite.impl.launcher.processes import rank_environments
from arealite.impl.server.sglang import probe

LIMIT_S = 600.0
"""Longest time of a row, in seconds."""
STATUSES = "pass", "FAIL", "n/a"
Row = dict[str, Any]
"""An entry of rows.toml with `name`; the result adds status, text, seconds, device, numbers."""
DEFAULTS: Row = {"ranks": 1, "gpus": 0, "server": "", "options": {}, "seconds": 0.0, "device": ""}


def main(argv: Sequence[str]) -> int:
    """Run the rows; return 1 if one fails."""
    if "--model" in argv:
        raise UserError("--machine and --model exclude each other. Use two commands.")
    parser = argparse.ArgumentParser(prog="arealite check --machine", description=__doc__)
    parser.add_argument("--machine", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="tiny models, at most 2 ranks")
    parser.add_argument("--out", type=Path, default=Path("machine.json"), help="report to write")
    parser.add_argument("--sglang-python", metavar="PATH", help="Python that has sglang")
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="in names of rows")
    options = parser.parse_args(argv)
    check_folder(folder := options.out.absolute().parent, "folder", "--out")
    if options.out.is_dir():
        raise UserError(f"--out {options.out} is a folder. Give the file to write, such as a.json.")
    import torch

    plan: Row = {"quick": options.quick, "gpus": torch.cuda.device_count(), "limit_s": LIMIT_S}
    plan["python"] = str(Path(options.sglang_python or sys.executable).expanduser())
    table = read_toml(__file__, "rows.toml")
    rows = [DEFAULTS | row | {"name": name} for name, row in table.items()]
    chosen = [row for row in rows if any(text in row["name"] for text in options.only)]
    if not chosen:
        raise UserError(f"--only {' '.join(options.only)}: no row has such a name. Run without it.")
    needed = {"reference", *(row.get("needs") for row in chosen)}
    rows = [row for row in rows if row in chosen or row["name"] in needed]
    explain_missing(rows, plan)
    with tempfile.TemporaryDirectory(prefix="arealite-machine-") as temp:
        results = run(rows, plan, Path(temp))
    counts = {status: [row["status"] for row in results].count(status) for status in STATUSES}
    host = dict([*info.versions(plan["python"]), *info.devices()])
    report = json.dumps({"host": host, **plan, "counts": counts, "rows": results}, indent=1)
    folder.mkdir(parents=True, exist_ok=True)
    options.out.write_text(report + "\n")
    print(*(f"{count} {status}," for status, count in counts.items()), f"see {options.out}")
    return int(counts["FAIL"] > 0)


def explain_missing(rows: list[Row], plan: Row) -> None:
    """Set status and text of the rows that do not run: of this machine, or with --quick."""
    sglang = ""
    gpus = plan["gpus"]
    if any(row["server"] == "sglang" for row in rows):
        try:
            probe(plan["python"], "auto" if gpus else "cpu")
        except UserError as error:
            sglang = f"{error} Option: --sglang-python PATH"
    for row in rows:
        reason = sglang if row["server"] == "sglang" else ""
        if row["gpus"] > gpus:
            reason = f"GPUs: needs {row['gpus']}, found {gpus}"
        elif plan["quick"] and row["ranks"] > 2:
            reason = "left out by --quick"
        row |= {"status": "n/a", "text": reason} if reason else {}


def run(rows: list[Row], plan: Row, folder: Path) -> list[Row]:
    """Run rows in child processes; print and return their results.

    Consecutive rows with equal ranks and server share processes. A row that crashes them or exceeds
    `limit_s` fails; the next row gets new processes.
    """
    path = folder / "results.jsonl"
    results = list[Row]()
    for _, group in groupby(rows, lambda row: (row["ranks"], row["server"])):
        left = [*group]
        while left:
            missing = [row for row in left if "status" in row]
            left = [row for row in left if "status" not in row]
            path.write_text("")
            reason = session(left, plan, folder) if left else ""
            found = [*map(json.loads, path.read_text().splitlines())]
            if left := left[len(found) :]:
                files = folder.glob("*.log")
                logs = {file.name: file.read_text(errors="replace")[-4000:] for file in files}
                missing.append(left.pop(0) | {"status": "FAIL", "text": reason, "logs": logs})
            for row in missing:
                print(fold(line(row)), flush=True)
            results += found + missing
    return results


def session(rows: list[Row], plan: Row, folder: Path) -> str:
    """Run rows in the same processes, which print and write results; return why they ended.

    The processes are forks of a server of multiprocessing that has imported torch and
    transformers, so their start takes milliseconds. It exits with this process.
    """
    from torch.multiprocessing.spawn import start_processes  # pyright: ignore

    from arealite.cli.machine.bench import main

    multiprocessing.set_forkserver_preload([main.__module__])
    gpus = plan["gpus"]
    count = rows[0]["ranks"]
    environments = rank_environments(count)
    if rows[0]["server"]:  # the server has the first GPU, the trainer the last
        environments[0]["LOCAL_RANK"] = str(max(0, gpus - 1))
    if gpus < count:
        for environment in environments:
            environment["CUDA_VISIBLE_DEVICES"] = ""
    try:
        start_processes(main, (environments, rows, plan, folder), count, start_method="forkserver")
    except Exception as error:  # noqa: BLE001  (of a rank, whichever it is)
        if getattr(error, "exit_code", 0) == -signal.SIGALRM:
            return f"no result after {plan['limit_s']:g} s"
        return exit_reason(str(error), 1)
    return "its processes exited without a result"


def line(row: Row) -> str:
    """Return a result as one line of the table."""
    head = f"{row['status']:<4} {row['name']:<48} {row['ranks']} × {row['device']:<4}"
    return f"{head} {row['seconds']:>6.1f} s  {row['text']}"
