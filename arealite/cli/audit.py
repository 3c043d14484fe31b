"""`arealite audit RUN`: the ledger's balance as a table; exit code 1 when it is off."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from arealite.base.errors import UserError
from arealite.base.names import RunPaths
from arealite.cli.fold import fold
from arealite.system.ledger.audit import audit


def main(argv: Sequence[str]) -> int:
    """Print the audit of a run folder (or of a ledger file)."""
    parser = argparse.ArgumentParser(
        prog="arealite audit", description="Balance a run's ledger: no sample lost, none repeated."
    )
    parser.add_argument("run", type=Path, help="run folder, as in runs/EXPERIMENT/TRIAL")
    run: Path = parser.parse_args(argv).run
    ledger = run if run.is_file() else RunPaths(run).ledger
    if not ledger.is_file():
        raise UserError(f"no ledger at {ledger}. Name a run folder, as in runs/EXPERIMENT/TRIAL.")
    report = audit(ledger)
    print(fold(report.table()))
    return 0 if report.ok else 1
