"""A run whose groups are all filtered says so on the console and in `why`, and ends by itself."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from arealite.base.trial_files import RunPaths
from arealite.cli import main as cli
from arealite.ext.audit.audit import audit
from tests.e2e.conftest import ENVIRONMENT, SLOW_S, Site, all_gone
from tests.waiting import until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]

REWARD = "def reward(completion, ground_truth):\n    return 1.0\n"
SAYS = "groups in a row were filtered, and none was completed: "


def test_run_with_equal_rewards_is_reported_and_stops_at_the_bound(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "constant.py").write_text(REWARD)
    options = [
        "trainer.ppo.filter_zero_variance=true",
        "trainer.ppo.collector.env.math.reward.type=function",
        f"trainer.ppo.collector.env.math.reward.function.paths=[{tmp_path / 'constant.py'}:reward]",
        "dataset.eval=null",
    ]
    paths = RunPaths(tmp_path / "e2e" / "t")
    console = tmp_path / "console.txt"
    command = site.command(tmp_path, *options, "datapipe.max_filtered_groups=0")
    with console.open("w") as output:
        run = subprocess.Popen(command, cwd=tmp_path, stdout=output, stderr=output, env=ENVIRONMENT)
    try:
        until(
            lambda: "datapipe-0 is filtering: " in console.read_text() or run.poll() is not None,
            what="the line on the console",
            seconds=SLOW_S,
        )
        assert run.poll() is None, console.read_text()
        assert cli.main(["why", str(paths.root)]) == 1
        shown = capsys.readouterr().out
    finally:
        run.send_signal(signal.SIGINT)
        run.wait(SLOW_S)
    assert run.returncode == 130, console.read_text()
    assert "BLOCKING ROLES" in shown and "datapipe-0 is FILTERING for " in shown
    assert SAYS in " ".join(shown.split()) and "zero_variance" in shown
    lines = [line for line in console.read_text().splitlines() if " is filtering: " in line]
    assert len(lines) == 1 and SAYS in lines[0] and "filter_zero_variance=false" in lines[0]
    all_gone(tmp_path)

    before = audit(paths.ledger).filtered_by_reason["zero_variance"]
    done = site.train(tmp_path, *options, "datapipe.max_filtered_groups=8")
    assert done.code == 3, done.shown + done.logs()
    errors = [line for line in done.shown.splitlines() if line.lstrip().startswith("error: ")]
    # The datapipe's answer can end the trainer before its own end is seen.
    assert (
        "datapipe-0 died (exit code 3)" in errors[0] or "trainer-0 died (exit code 3)" in errors[0]
    )
    assert SAYS in errors[1] and "(datapipe.max_filtered_groups=8)" in errors[1]
    assert SAYS in paths.end.read_text()
    assert "started again" not in done.shown
    report = audit(paths.ledger)
    assert report.ok and report.steps == 0
    assert report.filtered_by_reason["zero_variance"] >= before + 8
