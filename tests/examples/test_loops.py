"""The loops on a session learn their task, within their staleness bounds."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import ENVIRONMENT
from tests.examples.conftest import EXAMPLES, LIMIT_S

pytestmark = [pytest.mark.examples, pytest.mark.timeout(2 * LIMIT_S)]
STEP = re.compile(r"step +(\d+)  reward ([\d.]+)  staleness (\d+)  interrupted +(\d+) ")


def run(name: str, folder: Path) -> tuple[float, float, list[tuple[str, ...]]]:
    """Run an example in a folder; return the shares of right answers and the printed steps."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first, last = re.findall(r"right answers (?:before|after) training: ([\d.]+)", done.stdout)
    return float(first), float(last), STEP.findall(done.stdout)


def test_rl_loop_learns_the_task_with_staleness_0(tmp_path: Path) -> None:
    before, after, steps = run("rl_loop", tmp_path)
    assert before < 0.4 and after >= 0.7
    assert [int(step) for step, *_ in steps] == [*range(80)]
    assert {(staleness, interrupted) for _, _, staleness, interrupted in steps} == {("0", "0")}


def test_async_loop_learns_the_task_within_its_staleness_bound(tmp_path: Path) -> None:
    before, after, steps = run("async_loop", tmp_path)
    assert before < 0.4 and after > before + 0.2
    assert len(steps) == 80 and all(int(staleness) <= 2 for _, _, staleness, _ in steps)
