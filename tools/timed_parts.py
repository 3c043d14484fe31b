"""Run parts one after the other, each with a time limit; keep the results so far on disk.

A part is a child process in its own process group. A part that exceeds its limit is killed with all
its processes. After each part, the results so far are written as JSON and as a table.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from arealite.ext.warm_start.starts import subreaper
from arealite.impl.launcher.processes import GUARD
from tools import figures

ROOT = Path(__file__).resolve().parents[1]
PASSED, FAILED, TIMED_OUT, INTERRUPTED, SKIPPED = (
    "passed",
    "failed",
    "timed out",
    "interrupted",
    "skipped",
)
GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL at the limit of a part."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of the day."""

    name: str
    command: Sequence[str]
    share: float
    """Share of the time, relative to the shares of the other parts."""
    read_numbers: Callable[[str], Mapping[str, Any]]
    """Returns the numbers; the argument is the output of the part."""
    numbers_file: Path | None = None
    """File that the part writes. A file of an earlier day is removed."""
    folder: Path = ROOT
    """Working directory; it is created."""
    reason_to_skip: str = ""


@dataclass(kw_only=True)
class Result:
    """The result of a part."""

    part: str
    command: str
    status: str
    seconds: float = 0.0
    limit_s: float = 0.0
    exit_code: int | None = None
    text: str = ""
    """Reason why a part was skipped, or the last line of the output of a part that failed."""
    numbers: dict[str, Any] = field(default_factory=dict[str, Any])


class Day:
    """The results of all parts, in a folder."""

    def __init__(self, folder: Path, facts: Mapping[str, Any]) -> None:
        self.folder = folder
        self.facts = facts
        self.results = list[Result]()
        self.started = time.monotonic()

    def run(self, parts: Sequence[Part], limit_s: float) -> int:
        """Run the parts; return 1 if one failed, otherwise 0."""
        end = self.started + limit_s - GRACE_S
        self.write()
        with subreaper():
            for number, part in enumerate(parts):
                if part.reason_to_skip:
                    self.skip(part)
                    continue
                open_shares = [each.share for each in parts[number:] if not each.reason_to_skip]
                left_s = max(1.0, end - time.monotonic())
                self.run_part(part, left_s * part.share / sum(open_shares))
        return int(any(result.status not in (PASSED, SKIPPED) for result in self.results))

    def skip(self, part: Part) -> None:
        """Record a part that does not run."""
        self.add(
            Result(
                part=part.name,
                command=shlex.join(part.command),
                status=SKIPPED,
                text=part.reason_to_skip,
            )
        )

    def run_part(self, part: Part, limit_s: float) -> None:
        """Run a part for at most `limit_s` seconds, and record its result, also after Ctrl-C."""
        print(f"{part.name}: at most {limit_s:.0f} s: {shlex.join(part.command)}", flush=True)
        log = self.folder / f"{part.name}.log"
        if part.numbers_file is not None:
            part.numbers_file.unlink(missing_ok=True)
        result = Result(
            part=part.name,
            command=shlex.join(part.command),
            status=INTERRUPTED,
            limit_s=round(limit_s, 1),
        )
        started = time.monotonic()
        try:
            with running(part, log) as process:
                is_over = wait_for_end(process, limit_s)
                result.exit_code = process.poll()
            result.status = PASSED if result.exit_code == 0 else FAILED
            if not is_over:
                result.status = TIMED_OUT
        finally:
            output = log.read_text(errors="replace")
            result.seconds = round(time.monotonic() - started, 1)
            try:
                result.numbers = dict(part.read_numbers(output))
            except (OSError, ValueError) as error:
                result.text = f"no numbers: {error}"
            if result.status != PASSED:
                result.text = " ".join([result.text, *output.splitlines()[-1:]]).strip()
            self.add(result)

    def add(self, result: Result) -> None:
        """Record a result, and write all results so far."""
        self.results.append(result)
        self.write()
        print(f"{result.part}: {summary(result)}", flush=True)

    def write(self) -> None:
        """Write gpu_day.json and gpu_day.md."""
        report = dict(self.facts)
        report["seconds"] = round(time.monotonic() - self.started, 1)
        report["parts"] = [asdict(result) for result in self.results]
        figures.replace(self.folder / "gpu_day.json", json.dumps(report, indent=1) + "\n")
        figures.replace(self.folder / "gpu_day.md", self.table())

    def table(self) -> str:
        """Return the results as Markdown."""
        lines = [f"{name}: {value}  " for name, value in flatten(self.facts)]
        lines += ["", "| part | measurement | figure |", "|---|---|---|"]
        for result in self.results:
            lines.append(f"| **{result.part}** | result | {escape(summary(result))} |")
            for name, value in flatten(result.numbers):
                lines.append(f"| {result.part} | {escape(name)} | {escape(value)} |")
        return "\n".join(lines) + "\n"


# ------------------------------------------------------------ processes


@contextlib.contextmanager
def running(part: Part, log: Path) -> Generator[subprocess.Popen[bytes]]:
    """Run a part during the body; then end its process group and all of its other processes.

    The guard kills the process group if this process is killed.
    """
    environment = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    part.folder.mkdir(exist_ok=True)
    others = children()
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["/bin/sh", "-c", GUARD, "sh", *part.command],
            cwd=part.folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        end_group(process)
        kill_orphans(others)
        assert process.stdin is not None
        process.stdin.close()


def wait_for_end(process: subprocess.Popen[bytes], limit_s: float) -> bool:
    """Return whether a process exits within `limit_s` seconds."""
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM to a process group if its leader is running; at last SIGKILL."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        wait_for_end(process, GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def kill_orphans(others: set[int]) -> None:
    """Kill the processes that this process has adopted, with their descendants.

    Processes of a part that lead a session are not in its process group. They become children of
    this process when their parent exits.

    Args:
        others: Children that are not of the part.
    """
    while orphans := children() - others:
        for orphan in orphans:
            with contextlib.suppress(ProcessLookupError):
                os.kill(orphan, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(orphan, 0)


def children() -> set[int]:
    """Return the ids of the children of this process."""
    files = Path("/proc/self/task").glob("*/children")
    return {int(word) for file in files for word in file.read_text().split()}


# ------------------------------------------------------------ text


def summary(result: Result) -> str:
    """Return status, time and reason in one line."""
    if result.status == SKIPPED:
        return f"{SKIPPED}: {result.text}"
    line = f"{result.status} after {result.seconds:g} s of at most {result.limit_s:g} s"
    return f"{line}: {result.text}" if result.text else line


def flatten(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Return name and text of each number, also of those in mappings."""
    lines = list[tuple[str, str]]()
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            lines += flatten(value, f"{name}: ")
        elif isinstance(value, float):
            lines.append((name, f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"))
        elif isinstance(value, list):
            lines.append((name, "; ".join(map(str, value))))
        else:
            lines.append((name, str(value)))
    return lines


def escape(text: str) -> str:
    """Return a text for a cell of a table."""
    return text.replace("|", "\\|")
