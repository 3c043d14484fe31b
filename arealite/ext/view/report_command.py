"""`arealite report RUN`: write a run's report as one HTML file that needs no network."""

import time
from collections.abc import Sequence
from pathlib import Path

from arealite.base.trial_files import RunPaths
from arealite.cli.options import run_parser
from arealite.ext.view.report import write_report


def main(argv: Sequence[str]) -> int:
    """Write the report of a run folder; print its path and size."""
    parser = run_parser("report", "Write a run's report: one HTML file that needs no network.")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: RUN/report.html")
    parser.add_argument(
        "--trajectories",
        type=int,
        default=10_000,
        metavar="N",
        help="show at most N trajectories, in whole groups, evenly over the steps (10000)",
    )
    options = parser.parse_args(argv)
    if options.trajectories < 0:
        parser.error(f"--trajectories {options.trajectories}: use a number of at least 0")
    paths = RunPaths(options.run)
    began = time.monotonic()
    out: Path = options.out or paths.report
    counts = write_report(paths, out, most=options.trajectories)
    shown = counts["shown"]
    left_out = counts["trajectories"] - shown
    megabytes = counts["bytes"] / 1e6
    seconds = time.monotonic() - began
    print(
        f"{out}: {shown} trajectories ({left_out} left out), {megabytes:.1f} MB, {seconds:.1f} s",
    )
    return 0
