"""A launcher whose terminal or output disappears: it stops with a checkpoint, or continues."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.impl.launcher.test_local import UNTIL_TERM, after, started
from tests.terminals import terminal
from tests.waiting import until

pytestmark = pytest.mark.processes

NOHUP = ["/bin/sh", "-c", "trap '' HUP; exec \"$@\"", "sh"]
RUN = """
import sys
from pathlib import Path
from arealite.base import outputs
from arealite.base.config import save
from arealite.base.printable import guard_output
from arealite.impl.launcher import progress
from tests.impl.launcher.test_local import ScriptedLauncher
root = Path(sys.argv[1])
guard_output()
outputs.protect()
outputs.log_to(root / "launcher-0.log")
progress.DRAW_S = 0.05
roles = dict(zip(sys.argv[2::2], sys.argv[3::2]))
launcher = ScriptedLauncher(root, roles)
save(launcher.config, launcher.paths.config)
sys.exit(launcher.run())
"""


DIES_WITH_LAUNCHER = """
from arealite.impl.launcher.processes import die_with_parent
die_with_parent()
"""


def scripts(folder: Path) -> dict[str, str]:
    """Return roles of which the trainer writes a checkpoint when it is stopped."""
    done = folder / "done"
    others = DIES_WITH_LAUNCHER + "print('ready', flush=True)\n" + after(done)
    trainer = DIES_WITH_LAUNCHER + UNTIL_TERM + f"print('checkpoint'); open({str(done)!r}, 'w')"
    return {"datapipe": others, "rollout": others, "trainer": trainer}


def trainer_log(folder: Path) -> str:
    return (folder / "e/t/logs/trainer-0.log").read_text()


def test_hang_ups_of_shell_and_kernel_stop_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    """A second Ctrl-C would stop it at once, without a checkpoint."""
    with started(tmp_path, **scripts(tmp_path)) as (run, _):
        run.send_signal(signal.SIGHUP)
        assert run.stdout is not None
        assert "stopping" in run.stdout.readline()
        run.send_signal(signal.SIGHUP)
        assert run.wait(60) == 130
    assert "checkpoint" in trainer_log(tmp_path)


def command(folder: Path) -> Sequence[str]:
    roles = [word for pair in scripts(folder).items() for word in pair]
    return ["-c", RUN, str(folder), *roles]


def are_ready(folder: Path) -> bool:
    logs = [folder / f"e/t/logs/{name}.log" for name in ("rollout-0", "trainer-0", "trainer-1")]
    return all(log.exists() and "ready" in log.read_text() for log in logs)


def test_run_continues_without_its_terminal_if_hang_ups_are_ignored(tmp_path: Path) -> None:
    log = tmp_path / "launcher-0.log"
    script = "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    script += "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])\n"
    with terminal(["-c", script, *command(tmp_path)]) as on:
        on.until("╰")
        until(lambda: are_ready(tmp_path), what="the roles")
        on.hang_up()
        os.kill(on.process.pid, signal.SIGHUP)
        os.kill(on.process.pid, signal.SIGTERM)
        assert on.process.wait(60) == 130
    text = log.read_text()
    assert text.splitlines()[0].startswith("stdout is closed or full (")
    assert text.count("is closed or full") == 1
    assert "stopping after this step" in text and "run folder: " in text
    assert text.count("╭") <= 1, "no panel is drawn below each line"
    assert "checkpoint" in trainer_log(tmp_path)


def test_terminal_that_closes_stops_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    with terminal(command(tmp_path)) as on:
        on.until("╰")
        until(lambda: are_ready(tmp_path), what="the roles")
        on.hang_up()  # the kernel sends SIGHUP
        assert on.process.wait(60) == 130
    assert "stopping after this step" in (tmp_path / "launcher-0.log").read_text()
    assert "checkpoint" in trainer_log(tmp_path)


def test_nohup_keeps_a_run_alive(tmp_path: Path) -> None:
    words = [*NOHUP, sys.executable, *command(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as run:
        try:
            until(lambda: are_ready(tmp_path), what="the roles")
            run.send_signal(signal.SIGHUP)
            run.send_signal(signal.SIGTERM)
            shown = run.communicate(timeout=60)[0]
        finally:
            run.kill()
    assert run.returncode == 130, shown
    assert shown.count("stopping after this step") == 1
