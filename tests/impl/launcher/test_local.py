"""The local launcher with scripted children: how a run ends, and that nothing survives it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from arealite.api.config import ClusterConfig, ExperimentConfig
from arealite.api.launcher import LauncherConfig, LocalLauncherConfig
from arealite.api.trainer import PPOConfig, TrainerConfig
from arealite.impl.launcher import supervisor
from arealite.impl.launcher.local import LocalLauncher, free_port
from tests.waiting import until

RUN = """
import sys
from pathlib import Path
from tests.impl.launcher.test_local import ScriptedLauncher
sys.exit(ScriptedLauncher(Path(sys.argv[1]), dict(zip(sys.argv[2::2], sys.argv[3::2]))).run())
"""

UNTIL_TERM = """
import signal, sys, threading
signal.signal(signal.SIGTERM, lambda *_: stop.set())
stop = threading.Event()
print("ready", flush=True)
stop.wait(60)
"""
IGNORES_TERM = """
import signal, threading
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
threading.Event().wait(60)
"""


class ScriptedLauncher(LocalLauncher):
    """Each role runs a little script in place of the real one."""

    def __init__(
        self, root: Path, scripts: dict[str, str], *, drain_s: float = 20.0, restarts: int = 0
    ) -> None:
        config = ExperimentConfig(
            experiment_name="e",
            trial_name="t",
            cluster=ClusterConfig(name_root=str(root / "names"), run_root=str(root)),
            trainer=TrainerConfig(ppo=PPOConfig(total_steps=1)),
            launcher=LauncherConfig(
                local=LocalLauncherConfig(
                    trainer_ranks=2, drain_timeout_s=drain_s, max_restarts=restarts
                )
            ),
        )
        super().__init__(config)
        os.environ["METRICS"] = str(self.paths.metrics)
        self.paths.logs.mkdir(parents=True, exist_ok=True)
        self.scripts = scripts

    def command(self, role: str, index: int) -> list[str]:
        return [sys.executable, "-c", self.scripts[role]]


def run(
    root: Path, *, drain_s: float = 20.0, restarts: int = 0, **scripts: str
) -> tuple[int, str, LocalLauncher]:
    launcher = ScriptedLauncher(root, scripts, drain_s=drain_s, restarts=restarts)
    shown: list[str] = []
    launcher.progress.say = shown.append  # type: ignore[method-assign]
    code = launcher.run()
    return code, "\n".join(shown), launcher


def assert_nothing_survives(launcher: LocalLauncher) -> None:
    assert len(launcher.children) == 4
    for child in launcher.children:
        assert child.process.returncode is not None
        assert not psutil.pid_exists(child.process.pid)


def trains(step: int) -> str:
    """Write the metrics of a step."""
    return f"""
import json, os, time
line = {{"step": {step}, "time": time.time(), "reward/mean": 0.0}}
with open(os.environ["METRICS"], "a") as file: file.write(json.dumps(line) + "\\n")
"""


def after(file: Path) -> str:
    return f"import os, time\nwhile not os.path.exists({str(file)!r}): time.sleep(0.01)"


def test_a_run_ends_well_when_everybody_has_left(tmp_path: Path):
    done = tmp_path / "done"
    waits = after(done) + "\ntime.sleep(0.3)"
    trainer = f"print('trained'); open({str(done)!r}, 'w')"
    code, shown, launcher = run(tmp_path, datapipe=waits, rollout=waits, trainer=trainer)
    assert code == 0, shown
    assert_nothing_survives(launcher)
    assert (launcher.paths.logs / "trainer-0.log").read_text() == "trained\n"
    assert str(launcher.paths.root) in shown


def test_a_role_that_does_not_leave_is_named(tmp_path: Path):
    done = tmp_path / "done"
    trainer = f"open({str(done)!r}, 'w')"
    code, shown, launcher = run(
        tmp_path, drain_s=1.0, datapipe=UNTIL_TERM, rollout=after(done), trainer=trainer
    )
    assert code == 1
    assert "datapipe-0" in shown
    assert "did not end within 1 s" in shown
    assert_nothing_survives(launcher)


def test_a_dead_child_is_named_with_its_code_and_last_lines(tmp_path: Path):
    dying = "import sys; print('the last words'); sys.exit(7)"
    code, shown, launcher = run(tmp_path, datapipe=UNTIL_TERM, rollout=dying, trainer=UNTIL_TERM)
    assert code == 7
    assert "rollout-0 died (exit code 7)" in shown
    assert "the last words" in shown
    assert_nothing_survives(launcher)


def test_a_last_line_that_says_it_all_is_shown_alone(tmp_path: Path):
    dying = "import sys; print('Traceback [x]'); print('error: no such [/thing]'); sys.exit(2)"
    code, shown, _ = run(tmp_path, datapipe=UNTIL_TERM, rollout=dying, trainer=UNTIL_TERM)
    assert code == 2
    assert "error: no such [/thing]" in shown
    assert "Traceback" not in shown


def test_a_child_without_a_word_and_a_run_without_a_ledger(tmp_path: Path):
    dying = "import sys; sys.exit(3)"
    code, shown, _ = run(tmp_path, datapipe=dying, rollout=UNTIL_TERM, trainer=UNTIL_TERM)
    assert code == 3
    assert "is the disk full?" in shown
    assert "no audit: " in shown


def test_a_killed_child_is_named_with_its_signal(tmp_path: Path):
    dying = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    code, shown, launcher = run(tmp_path, datapipe=dying, rollout=UNTIL_TERM, trainer=UNTIL_TERM)
    assert code == 1
    assert "datapipe-0 died (killed by SIGKILL)" in shown
    assert_nothing_survives(launcher)


@pytest.mark.parametrize("late", [UNTIL_TERM, "import threading; threading.Event().wait(60)"])
def test_a_worker_that_came_too_late_to_be_let_go_is_ended(tmp_path: Path, late: str):
    trainer = "import time; time.sleep(0.5)"
    code, shown, launcher = run(tmp_path, datapipe="pass", rollout=late, trainer=trainer)
    assert code == 0, shown
    assert "died" not in shown
    assert_nothing_survives(launcher)


def test_roles_that_stay_when_the_datapipe_has_left_are_named(tmp_path: Path):
    scripts = {"datapipe": trains(0), "rollout": UNTIL_TERM, "trainer": UNTIL_TERM}
    code, shown, launcher = run(tmp_path, drain_s=1.0, **scripts)
    assert code == 1
    assert "trainer-0, trainer-1 did not end within 1 s" in shown
    assert_nothing_survives(launcher)


def test_a_datapipe_that_leaves_in_the_middle_has_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(supervisor, "EARLY_S", 0.2)
    code, shown, _ = run(tmp_path, datapipe="pass", rollout=UNTIL_TERM, trainer=UNTIL_TERM)
    assert code == 1
    assert "datapipe-0 died (left too early)" in shown


@contextlib.contextmanager
def started(root: Path, **scripts: str) -> Iterator[tuple[subprocess.Popen[str], list[Any]]]:
    """Run a scripted launcher as a process; yield it and its children, all of them ready."""
    words = [word for pair in scripts.items() for word in pair]
    command = [sys.executable, "-c", textwrap.dedent(RUN), str(root), *words]
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    logs = [
        root / f"e/t/logs/{n}.log" for n in ("datapipe-0", "rollout-0", "trainer-0", "trainer-1")
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        ready = lambda: all(log.exists() and log.read_text() for log in logs)  # noqa: E731
        until(ready, what="the children to be ready")
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) == 4
        yield process, children
        assert process.poll() is not None
        assert not psutil.wait_procs(children, timeout=10)[1]


def test_ctrl_c_once_lets_the_trainer_finish(tmp_path: Path):
    done = tmp_path / "done"
    trainer = UNTIL_TERM + f"print('checkpoint'); open({str(done)!r}, 'w')"
    others = "print('ready', flush=True)\n" + after(done)
    with started(tmp_path, datapipe=others, rollout=others, trainer=trainer) as (run, _):
        run.send_signal(signal.SIGINT)
        assert run.wait(20) == 130
    assert "checkpoint" in (tmp_path / "e/t/logs/trainer-0.log").read_text()


def test_ctrl_c_twice_kills_what_does_not_listen(tmp_path: Path):
    scripts = {"datapipe": IGNORES_TERM, "rollout": IGNORES_TERM, "trainer": IGNORES_TERM}
    with started(tmp_path, **scripts) as (run, _):
        run.send_signal(signal.SIGINT)
        assert run.stdout is not None
        assert "stopping" in run.stdout.readline()
        run.send_signal(signal.SIGINT)
        assert run.wait(20) == 130


def test_roles_die_with_a_killed_launcher(tmp_path: Path):
    dying = "from arealite.cli.role import die_with_parent\ndie_with_parent()\n" + IGNORES_TERM
    with started(tmp_path, datapipe=dying, rollout=dying, trainer=dying) as (run, _):
        run.kill()
        run.wait(10)


def test_free_port_can_be_bound():
    assert 1024 <= free_port() < 65536
