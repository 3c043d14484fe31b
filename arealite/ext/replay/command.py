"""`arealite replay RUN`: train again from the ledger, and compare the parameters after each step.

The replay of a session is one process. That of a run has as many ranks as the run. If their number
or the config changed during the run, new processes resume from a checkpoint in a temporary folder.
The run's folder is only read.
"""

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from arealite.api.experiment_config import ExperimentConfig
from arealite.base import log
from arealite.base.errors import UserError
from arealite.base.printable import fold
from arealite.base.trial_files import RunPaths, step_of
from arealite.cli import configs
from arealite.cli.options import run_parser
from arealite.impl.launcher.processes import die_with_parent
from arealite.system.ledger.ledger import meta_number, open_read_only, read_any_format

POSSIBLE_CAUSES = """\
Possible causes. The first step differs: model.path has another model now, or
torch, the type of processor or the number of threads differ from the run's. A
later step differs: a trajectory was changed, a checkpoint was not loaded as it
was saved, or the trainer is not deterministic (sums on a GPU may not be)."""
"""Printed if a replayed step differs."""
IS_SESSION = "SELECT 1 FROM meta WHERE key = 'trainer' AND value = 'session'"
"""SQL: selects a row if the ledger is that of a session."""

PROGRESS_S = 5.0


@dataclass(frozen=True, kw_only=True)
class StepRange:
    """Consecutive steps with the same number of ranks and the same config."""

    config: Path
    ranks: int
    stop: int
    """One past the last step."""


def main(argv: Sequence[str]) -> int:
    """Replay a run; return 0 if all steps are bitwise equal, 1 if a step differs."""
    parser = run_parser("replay", "Train a run again from its ledger, and compare each step.")
    parser.add_argument("--to", type=step_of, metavar="STEP", help="last step to replay")
    parser.add_argument("--as-rank", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    paths = RunPaths(options.run.absolute())
    if options.as_rank:
        return run_rank(paths, *options.as_rank)
    with open_read_only(paths.ledger) as db:
        is_session = db.execute(IS_SESSION).fetchone() is not None
    if is_session:
        return run_session(paths, options.to)
    run_segments = segments(paths, options.to)
    last_segment = run_segments[-1]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="arealite-replay-") as scratch:
        for segment in run_segments:
            words = [
                str(paths.root),
                "--as-rank",
                str(segment.config),
                str(segment.stop),
                scratch,
                "" if segment is last_segment else "leave",
            ]
            if code := asyncio.run(run_ranks(segment, words)):
                return code
    print_equal(last_segment.stop, began)
    return 0


def print_equal(steps: int, began: float) -> None:
    """Print that all steps are equal."""
    seconds = time.monotonic() - began
    print(f"replayed {steps} steps: bitwise equal ({seconds:.1f} s)")


def run_session(paths: RunPaths, to: int | None) -> int:
    """Replay a session in this process; return the exit code."""
    from arealite.ext.replay.replay_trainer import Differs
    from arealite.ext.replay.session_replay import replay_session

    log.setup("replay", "error")
    began = time.monotonic()
    try:
        print_equal(replay_session(paths, to), began)
    except Differs as error:
        return print_difference(error)
    return 0


def print_difference(error: Exception) -> int:
    """Print which step differs, and possible causes; return the exit code."""
    print(fold(f"{error}\n{POSSIBLE_CAUSES}", sys.stderr), file=sys.stderr)
    return 1


def segments(paths: RunPaths, to: int | None) -> list[StepRange]:
    """Divide the run's steps into segments of equal ranks and config.

    Raises:
        UserError: There is no step to replay, a payload, a fingerprint or the model is missing, or
            the ledger's format cannot be read.
    """
    with open_read_only(paths.ledger) as db:
        read_any_format(db)
        rows = db.execute("SELECT step, ranks, fingerprint FROM steps ORDER BY step").fetchall()
        dropped = meta_number(db, "dropped")
    rows = rows[:to]
    if not rows or (to is not None and to < 1):
        raise UserError(f"{paths.root} has no trained step to replay.")
    if dropped:
        raise UserError(
            f"payloads of steps 1 to {dropped} were dropped (datapipe.keep_payloads), "
            "but a replay begins with step 1. Replay a run with keep_payloads=all."
        )
    for step, _, fingerprint in rows:
        if not fingerprint:
            raise UserError(
                f"step {step + 1} of {paths.root} has no fingerprint: its engine computed none. "
                "Replay a run whose engine does."
            )
    last_step, _, _ = rows[-1]
    if last_step != len(rows) - 1:
        raise UserError(f"{paths.ledger} lacks steps. Run `arealite audit {paths.root}`.")
    run_segments = _merge_steps(paths, [(step, ranks) for step, ranks, _ in rows])
    for file in {segment.config for segment in run_segments}:
        load(file)
    return run_segments


def _merge_steps(paths: RunPaths, ranks_of_steps: Sequence[tuple[int, int]]) -> list[StepRange]:
    """Merge consecutive steps with the same number of ranks and the same config.

    Args:
        paths: The run's files, with the config of each start of the run.
        ranks_of_steps: Each step and its number of ranks.
    """
    starts = paths.starts
    config = starts.get(0, paths.config)
    merged = list[StepRange]()
    for step, ranks in ranks_of_steps:
        start_config = starts.get(step, config)
        if start_config.read_text() != config.read_text():
            config = start_config
        if merged and merged[-1].ranks == ranks and merged[-1].config == config:
            merged.pop()
        merged.append(StepRange(config=config, ranks=ranks, stop=step + 1))
    return merged


def load(file: Path) -> ExperimentConfig:
    """Load a run's config, and check that its model exists."""
    config = configs.load(ExperimentConfig, file, [], is_saved=True)
    if not (Path(config.model.path).expanduser() / "config.json").is_file():
        raise UserError(f"model.path={config.model.path} of {file} is missing: restore it.")
    return config


async def run_ranks(segment: StepRange, words: Sequence[str]) -> int:
    """Run the ranks of a segment to their end; return 0, or the exit code of the first cause."""
    from arealite.impl.launcher.processes import end_all, rank_environments, spawn, threads
    from arealite.impl.launcher.supervisor import Budget, Role

    command = [sys.executable, "-m", "arealite.cli.main", "replay", *words]
    shared = threads(load(segment.config).launcher.trainer_threads)
    ranks = Role(names=("replay",), budget=Budget(limit=0), leads=True)
    ranks.over.set()  # a rank may exit long before the others
    try:
        for rank in rank_environments(segment.ranks):
            child = await spawn("replay", command, log=None, environment=shared | rank)
            ranks.children.append(child)
        dead = await ranks.end()
        return max(dead.code, 1) if dead else 0
    finally:
        await end_all(ranks.children, signal.SIGKILL)


def run_rank(paths: RunPaths, config: str, stop: str, scratch: str, leave: str) -> int:
    """Run one rank of a segment; rank 0 prints the progress every PROGRESS_S seconds."""
    from arealite.ext.replay.replay_trainer import Differs, replay

    die_with_parent()
    log.setup("replay", "error")
    printed_at = time.monotonic()

    def on_step(step: int) -> None:
        nonlocal printed_at
        now = time.monotonic()
        if now - printed_at > PROGRESS_S:
            printed_at = now
            print(f"equal up to step {step + 1}", flush=True)

    try:
        replay(
            load(Path(config)),
            paths.ledger,
            scratch=Path(scratch),
            stop=int(stop),
            leave=bool(leave),
            on_step=on_step,
        )
    except Differs as error:
        return print_difference(error)
    except RuntimeError as error:
        rank = os.environ["RANK"]
        if rank == "0":
            raise
        print(f"rank {rank} ended: {error}", file=sys.stderr)  # rank 0 prints the likely cause
        return 1
    return 0
