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

from arealite.base.errors import UserError
from arealite.base.files import read_toml
from arealite.base.folder_checks import check_folder
from arealite.base.printable import fold
from arealite.ext.diagnosis.exit_reason import exit_reason
from arealite.ext.machine import info
from arealite.ext.server_processes.server_group import probe
from arealite.ext.sglang.sglang_server import SGLANG
from arealite.impl.launcher.processes import rank_environments

LIMIT_S = 600.0
"""Longest time of a row, in seconds."""
STATUSES = "pass", "FAIL", "n/a"
PlannedCheck = dict[str, Any]
"""An entry of rows.toml with `name`; the result adds status, text, seconds, device, numbers."""
DEFAULTS: PlannedCheck = {
    "ranks": 1,
    "gpus": 0,
    "server": "",
    "options": {},
    "seconds": 0.0,
    "device": "",
}


def main(argv: Sequence[str]) -> int:
    """Run the rows; return 1 if one fails."""
    options = _parse(argv)
    out: Path = options.out
    out_folder = out.absolute().parent
    check_folder(out_folder, "folder", "--out")
    if out.is_dir():
        raise UserError(f"--out {out} is a folder. Give the file to write, such as a.json.")
    import torch

    python = Path(options.sglang_python or sys.executable)
    plan: PlannedCheck = {
        "quick": options.quick,
        "gpus": torch.cuda.device_count(),
        "limit_s": LIMIT_S,
        "python": str(python.expanduser()),
    }
    rows = _rows_with(options.only)
    explain_missing(rows, plan)
    with tempfile.TemporaryDirectory(prefix="arealite-machine-") as temp:
        results = run(rows, plan, Path(temp))
    statuses = [row["status"] for row in results]
    counts = {status: statuses.count(status) for status in STATUSES}
    host = [*info.versions(plan["python"]), *info.devices()]
    report = {
        "host": dict(host),
        **plan,
        "counts": counts,
        "rows": results,
    }
    out_folder.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")
    summary = [f"{count} {status}," for status, count in counts.items()]
    print(*summary, f"see {out}")
    return int(counts["FAIL"] > 0)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options of the command line."""
    if "--model" in argv:
        raise UserError("--machine and --model exclude each other. Use two commands.")
    parser = argparse.ArgumentParser(prog="arealite check --machine", description=__doc__)
    parser.add_argument("--machine", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="tiny models, at most 2 ranks")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("machine.json"),
        help="report to write",
    )
    parser.add_argument("--sglang-python", metavar="PATH", help="Python that has sglang")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[""],
        metavar="TEXT",
        help="in names of rows",
    )
    return parser.parse_args(argv)


def _rows_with(name_parts: Sequence[str]) -> list[PlannedCheck]:
    """Return the rows whose name contains one of `name_parts`, and the rows that they need.

    Raises:
        UserError: No row has such a name.
    """
    table = read_toml(__file__, "rows.toml")
    rows = [DEFAULTS | row | {"name": name} for name, row in table.items()]
    chosen = [row for row in rows if any(part in row["name"] for part in name_parts)]
    if not chosen:
        raise UserError(f"--only {' '.join(name_parts)}: no row has such a name. Run without it.")
    needed_names = {"reference", *(row.get("needs") for row in chosen)}
    return [row for row in rows if row in chosen or row["name"] in needed_names]


def explain_missing(rows: list[PlannedCheck], plan: PlannedCheck) -> None:
    """Set status and text of the rows that do not run: of this machine, or with --quick."""
    gpus = plan["gpus"]
    sglang_error = ""
    if any(row["server"] == "sglang" for row in rows):
        try:
            probe(SGLANG, plan["python"], "auto" if gpus else "cpu")
        except UserError as error:
            sglang_error = f"{error} Option: --sglang-python PATH"
    for row in rows:
        reason = sglang_error if row["server"] == "sglang" else ""
        if row["gpus"] > gpus:
            reason = f"GPUs: needs {row['gpus']}, found {gpus}"
        elif plan["quick"] and row["ranks"] > 2:
            reason = "left out by --quick"
        if reason:
            row["status"] = "n/a"
            row["text"] = reason


def run(rows: list[PlannedCheck], plan: PlannedCheck, folder: Path) -> list[PlannedCheck]:
    """Run rows in child processes; print and return their results.

    Consecutive rows with equal ranks and server share processes. A row that crashes them or exceeds
    `limit_s` fails; the next row gets new processes.
    """
    results_file = folder / "results.jsonl"
    results = list[PlannedCheck]()
    for _, group in groupby(rows, _processes_key):
        pending = [*group]
        while pending:
            unprinted = [row for row in pending if "status" in row]
            pending = [row for row in pending if "status" not in row]
            results_file.write_text("")
            reason = session(pending, plan, folder) if pending else ""
            result_lines = results_file.read_text().splitlines()
            finished = [json.loads(result_line) for result_line in result_lines]
            pending = pending[len(finished) :]
            if pending:
                crashed = pending.pop(0)
                outcome = {
                    "status": "FAIL",
                    "text": reason,
                    "logs": _ends_of_logs(folder),
                }
                unprinted.append(crashed | outcome)
            for row in unprinted:
                print(fold(line(row)), flush=True)
            results += finished + unprinted
    return results


def _processes_key(row: PlannedCheck) -> tuple[int, str]:
    """Return the key of the processes of a row; rows with equal keys can share processes."""
    return row["ranks"], row["server"]


def _ends_of_logs(folder: Path) -> dict[str, str]:
    """Return the last 4,000 characters of each log file."""
    files = folder.glob("*.log")
    return {file.name: file.read_text(errors="replace")[-4000:] for file in files}


def session(rows: list[PlannedCheck], plan: PlannedCheck, folder: Path) -> str:
    """Run rows in the same processes, which print and write results; return why they ended.

    The processes are forks of a server of multiprocessing that has imported torch and
    transformers, so their start takes milliseconds. It exits with this process.
    """
    from torch.multiprocessing.spawn import start_processes  # pyright: ignore

    from arealite.ext.machine.bench import main

    multiprocessing.set_forkserver_preload([main.__module__])
    gpus = plan["gpus"]
    count = rows[0]["ranks"]
    environments = rank_environments(count)
    if rows[0]["server"]:  # the server has the first GPU, the trainer the last
        last_gpu = max(0, gpus - 1)
        environments[0]["LOCAL_RANK"] = str(last_gpu)
    if gpus < count:
        for environment in environments:
            environment["CUDA_VISIBLE_DEVICES"] = ""
    try:
        start_processes(
            main,
            args=(environments, rows, plan, folder),
            nprocs=count,
            start_method="forkserver",
        )
    except Exception as error:  # noqa: BLE001  (of a rank, whichever it is)
        if getattr(error, "exit_code", 0) == -signal.SIGALRM:
            return f"no result after {plan['limit_s']:g} s"
        return exit_reason(str(error), 1)
    return "its processes exited without a result"


def line(row: PlannedCheck) -> str:
    """Return a result as one line of the table."""
    head = f"{row['status']:<4} {row['name']:<48} {row['ranks']} × {row['device']:<4}"
    return f"{head} {row['seconds']:>6.1f} s  {row['text']}"
