"""`arealite why` while a role starts or crashes repeatedly, and after it was given up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from arealite.cli.main import main
from arealite.ext.diagnosis import explain
from tests.impl.launcher.test_local import UNTIL_TERM
from tests.waiting import spawned, until

LAUNCHER = """
import sys
from pathlib import Path
from arealite.base import config as base_config
from arealite.impl.launcher import supervisor
from arealite.system.health import vitals
from tests.impl.launcher.test_local import ScriptedLauncher
supervisor.PAUSES_S = (0.0, float(sys.argv[2]))
scripts = dict(zip(sys.argv[4::2], sys.argv[5::2]))
launcher = ScriptedLauncher(Path(sys.argv[1]), scripts, restarts=int(sys.argv[3]))
launcher.vitals.mkdir(parents=True, exist_ok=True)
base_config.save(launcher.config, launcher.paths.config)
vitals.start("launcher-0", launcher.vitals)
sys.exit(launcher.run())
"""
SHOWS = """
import os, sys
from pathlib import Path
from arealite.system.health import vitals
for folder in Path(os.environ["NAMES"]).glob("*/e/t/vitals"):
    vitals.start(f"{ROLE}-{os.environ.get('RANK', 0)}", folder)
"""
DIES = "raise ExceptionGroup('in a TaskGroup', [ValueError('no such card')])\n"
REASON = "ValueError: no such card"
SERVER = """
import os, sys
from arealite.api.experiment_config import ServerConfig
from arealite.api.trial import ClusterConfig
from arealite.ext.embedded import server_supervisor
from arealite.impl.launcher import supervisor
supervisor.PAUSES_S = (0.0, 600.0)
names = {"name_root": os.environ["NAMES"]}
config = ServerConfig(experiment_name="e", trial_name="t", cluster=ClusterConfig(**names))
sys.exit(server_supervisor.supervise(config, [sys.executable, "-c", CHILD]))
"""
KINDS = ("datapipe", "rollout", "trainer")
LONG_S = 600.0
"""A restart delay that no test waits for."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Request no stacks, because scripted roles do not write them."""
    monkeypatch.setattr(explain, "ANSWER_S", 0.0)
    monkeypatch.setattr(explain, "SIGNAL_S", 0.0)


def showing(kind: str, script: str) -> str:
    """Return a role that writes vitals and then runs `script`."""
    return f"ROLE = {kind!r}\n{SHOWS}\n{script}"


@contextmanager
def launched(
    root: Path, *, pause_s: float = 0.02, restarts: int = 100, **changed: str
) -> Iterator[subprocess.Popen[str]]:
    """Run a launcher whose roles run until SIGTERM, except those `changed`."""
    scripts = {kind: showing(kind, UNTIL_TERM) for kind in KINDS} | changed
    words = [word for pair in scripts.items() for word in pair]
    command = [sys.executable, "-c", LAUNCHER, str(root), str(pause_s), str(restarts), *words]
    own = {"PYTHONPATH": os.getcwd(), "NAMES": str(root / "names")}
    with spawned(command, os.environ | own) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGSTOP)  # otherwise the launcher starts other roles
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()


def told(root: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the output of `arealite why`, once a line of it has all `words`."""
    said = [""]

    def found() -> bool:
        if not (root / "e/t/config.yaml").exists():
            return False
        assert main(["why", str(root / "e/t")]) in (0, 1)
        said.append(capsys.readouterr().out)
        return any(all(word in line for word in words) for line in said[-1].splitlines())

    until(found, what=lambda: f"{words} in:\n{said[-1]}")
    return said[-1]


@pytest.mark.parametrize("kind", KINDS)
def test_role_without_vitals_is_starting(tmp_path: Path, capsys, kind: str) -> None:
    with launched(tmp_path, **{kind: UNTIL_TERM}):
        text = told(
            tmp_path, capsys, f"* {kind}-0 is STARTING", "start: the process is not ready yet"
        )
        assert "No role blocks the run" not in text
        assert main(["top", "--once", str(tmp_path / "e/t")]) == 0
        assert f"{kind}-0 is starting" in capsys.readouterr().out


def test_role_stopped_before_its_first_vitals_is_stopped(tmp_path: Path, capsys) -> None:
    with launched(tmp_path, rollout="import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"):
        told(tmp_path, capsys, "* rollout-0 is STOPPED", "SIGSTOP or a debugger stopped pid ")


@pytest.mark.parametrize("kind", KINDS)
def test_role_that_waits_for_its_next_attempt_is_crashing(
    tmp_path: Path, capsys, kind: str
) -> None:
    with launched(tmp_path, pause_s=LONG_S, **{kind: showing(kind, DIES)}):
        text = told(tmp_path, capsys, "-0 is CRASHING", "restart 2 of 100", "died (exit code 1: ")
        assert REASON in text and f"* {kind}-0 is CRASHING" in text
        assert "No role blocks the run" not in text


@pytest.mark.parametrize("kind", KINDS)
def test_live_role_in_a_crash_loop_is_crashing(tmp_path: Path, capsys, kind: str) -> None:
    lives = tmp_path / "lives"
    dies_twice = f"""
with open({str(lives)!r}, "a") as file:
    file.write("x")
if os.path.getsize({str(lives)!r}) <= 2:
    {DIES}
{UNTIL_TERM}
"""
    alone = "if os.environ.get('RANK', '0') == '0':\n" if kind == "trainer" else "if True:\n"
    script = alone + dies_twice.replace("\n", "\n    ") + f"\nelse:\n{'    '}exec({UNTIL_TERM!r})\n"
    with launched(tmp_path, **{kind: showing(kind, script)}):
        until(lambda: lives.exists() and len(lives.read_text()) == 3, what="the third life")
        text = told(tmp_path, capsys, f"* {kind}-0 is CRASHING", "restart 2 of 100", REASON)
        line = next(line for line in text.splitlines() if line.startswith(f"{kind}-0 "))
        assert line.split()[2] == "crashing", "its table row, too"


def test_role_that_died_once_is_ok_after_its_restart(tmp_path: Path, capsys) -> None:
    lives = tmp_path / "lives"
    script = f"""
if not os.path.exists({str(lives)!r}):
    open({str(lives)!r}, "w").close()
    {DIES}
{UNTIL_TERM}
"""
    with launched(tmp_path, rollout=showing("rollout", script)):
        until(lives.exists, what="its first life")
        told(tmp_path, capsys, "No role blocks the run")


def test_crashing_server_is_reported_by_its_parent(tmp_path: Path, capsys) -> None:
    server = f"CHILD = {DIES!r}\n{SERVER}"
    with launched(tmp_path, llm_server=server):
        text = told(tmp_path, capsys, "* llm_server-0 is CRASHING", "restart 2 of 5")
        assert "llm_server died (exit code 1)" in text
        assert REASON in text, "its log has the reason"


def test_server_without_a_name_is_starting(tmp_path: Path, capsys) -> None:
    server = f"CHILD = {UNTIL_TERM!r}\n{SERVER}"
    with launched(tmp_path, llm_server=server):
        until(lambda: list((tmp_path / "names").rglob("llm_server-0.json")), what="its parent")
        told(tmp_path, capsys, "* llm_server-0 is STARTING")


def test_role_that_was_given_up_is_reported_after_the_run(tmp_path: Path, capsys) -> None:
    with launched(tmp_path, restarts=2, rollout=showing("rollout", DIES)) as launcher:
        launcher.communicate(timeout=120)
        assert launcher.returncode == 1
    text = told(tmp_path, capsys, "the launcher ended: exit code 1. rollout-0 died")
    assert "3 times without a further trained step" in text and REASON in text
    assert "is not running" in text
    assert not [*(tmp_path / "names").rglob("*.json")]


def test_restarted_run_has_not_ended(tmp_path: Path, capsys) -> None:
    end = tmp_path / "e/t/end.txt"
    end.parent.mkdir(parents=True)
    end.write_text("exit code 1. of an earlier launcher\n")
    with launched(tmp_path, rollout=UNTIL_TERM):
        text = told(tmp_path, capsys, "* rollout-0 is STARTING")
    assert "ended" not in text and not end.exists()
