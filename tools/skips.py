"""Compare the skipped tests of `make test` with a list, or run them.

    tools/skips.py check LIST REPORT TABLE...    exit 1 unless exactly the tests in these tables of
                                                 the list were skipped, for the reasons given there
    tools/skips.py rerun REPORT COMMAND...       run COMMAND with the skipped tests' names added

tests/skip_report.py writes a report to the file in the environment variable SKIPS: a line for each
skipped test, with its name, a tab and its reason. A list is TOML: tables that map each reason to
the names of its tests.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str]) -> int:
    """Run one of the two commands."""
    match argv:
        case ["check", file, report, *tables] if tables:
            listed = tomllib.loads(Path(file).read_text("utf-8"))
            skipped = read(Path(report))
            wrong = problems([listed[table] for table in tables], skipped)
            for line in wrong:
                print(line)
            if wrong:
                print(f"error: {len(wrong)} differences between {report} and {file}")
            else:
                print(f"{len(skipped)} tests were skipped, as {file} says")
            return 1 if wrong else 0
        case ["rerun", report, *command] if command:
            skipped = read(Path(report))
            if not skipped:
                print(f"{report} names no skipped test: nothing to run")
                return 0
            return subprocess.run([*command, *skipped], check=False).returncode
        case _:
            print(__doc__)
            return 2


def read(report: Path) -> dict[str, str]:
    """Return the reason of each skipped test.

    Raises:
        SystemExit: there is no report.
    """
    if not report.exists():
        sys.exit(f"error: {report} does not exist: run `make test` first, which writes it")
    lines = report.read_text("utf-8").splitlines()
    return dict(line.split("\t", 1) for line in lines)  # pyright: ignore


def problems(tables: Sequence[dict[str, list[str]]], skipped: dict[str, str]) -> list[str]:
    """Return a line for each skipped test that is not listed, and for each listed test that ran."""
    listed = {(name, why) for table in tables for why, names in table.items() for name in names}
    here = set(skipped.items())
    return [
        *(f"skipped, and not listed: {name} ({why})" for name, why in sorted(here - listed)),
        *(f"listed, and not skipped: {name} ({why})" for name, why in sorted(listed - here)),
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
