"""`arealite audit RUN`: print the balance of a run's ledger; exit with 1 if the audit fails."""

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from arealite.base.errors import UserError
from arealite.base.printable import fold
from arealite.base.trial_files import RunPaths
from arealite.cli.options import run_parser
from arealite.ext.audit.audit import audit


def main(argv: Sequence[str]) -> int:
    """Print the audit of a run folder or of a ledger file; return 1 if it fails."""
    description = "Check from a run's ledger that no sample was lost or repeated."
    parser = run_parser("audit", description)
    run: Path = parser.parse_args(argv).run
    ledger = run if run.is_file() else RunPaths(run).ledger
    if not ledger.is_file():
        raise UserError(f"no ledger at {ledger}. Name a run folder, like runs/EXPERIMENT/TRIAL.")
    console = Console(file=sys.__stderr__)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("trajectories", total=None)

        def on_row(number: int, total: int) -> None:
            progress.update(task, completed=number, total=total)

        report = audit(ledger, on_row=on_row)
    print(fold(report.table()))
    return 0 if report.ok else 1
