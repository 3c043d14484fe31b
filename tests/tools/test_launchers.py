"""The files in launchers/ that restart a launcher, and the exit codes they restart after."""

from __future__ import annotations

import configparser
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from arealite.api.config import ExperimentConfig
from arealite.cli import configs, options
from tests.waiting import spawned, until

FOLDER = Path(__file__).resolve().parents[2] / "launchers"
SCRIPT, UNIT = FOLDER / "relaunch.sh", FOLDER / "arealite.service"
QUICK = os.environ | {"PAUSE_S": "0"}


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, comment_prefixes="#")
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNIT)
    return parser


def relaunched(tmp_path: Path, ends: str, **environment: str) -> tuple[int, int]:
    """Run the script with the command `ends`; return its exit code and the number of runs."""
    runs = tmp_path / "runs"
    command = ["sh", "-c", f"echo x >> {runs}; {ends}"]
    done = subprocess.run([SCRIPT, *command], env=QUICK | environment, timeout=60, check=False)
    return done.returncode, len(runs.read_text().split())


@pytest.mark.parametrize("code", [0, 2, 3, 130])
def test_script_does_not_restart_after_a_final_exit_code(tmp_path: Path, code: int) -> None:
    assert relaunched(tmp_path, f"exit {code}") == (code, 1)


@pytest.mark.parametrize(
    ("ends", "code"), [("exit 1", 1), ("exit 4", 4), ("kill -9 $$", 137), ("kill -SEGV $$", 139)]
)
def test_script_restarts_a_failed_command_at_most_relaunches_times(
    tmp_path: Path, ends: str, code: int
) -> None:
    assert relaunched(tmp_path, ends, RELAUNCHES="3") == (code, 4)


def test_script_exits_when_the_command_exits_with_0(tmp_path: Path) -> None:
    third = f'[ "$(wc -l < {tmp_path}/runs)" -eq 3 ] || kill -9 $$'
    assert relaunched(tmp_path, third) == (0, 3)


def test_script_forwards_sigterm_and_does_not_restart(
    tmp_path: Path,
) -> None:
    ready = tmp_path / "ready"
    gently = f"trap 'echo checkpoint; exit 1' TERM; echo > {ready}; while :; do sleep 0.01; done"
    with spawned([str(SCRIPT), "sh", "-c", gently], QUICK) as script:
        until(ready.exists, what="the command")
        script.send_signal(signal.SIGTERM)
        assert script.communicate(timeout=60)[0] == "checkpoint\n"
        assert script.returncode == 1


def test_unit_restarts_after_the_same_exit_codes_as_the_script() -> None:
    service, start = unit()["Service"], unit()["Unit"]
    assert service["Restart"] == "on-failure"
    assert service["RestartPreventExitStatus"].split() == ["2", "3"]
    assert service["SuccessExitStatus"] == "130"
    assert start["StartLimitBurst"] == "10" and int(start["StartLimitIntervalSec"]) > 0


def test_stop_timeout_of_the_unit_exceeds_the_drain_timeout() -> None:
    service, config = unit()["Service"], ExperimentConfig()
    assert service["KillMode"] == "mixed" and "KillSignal" not in service
    assert int(service["TimeoutStopSec"]) > config.launcher.drain_timeout_s + 30


def test_command_line_of_the_unit_is_valid() -> None:
    python, script, *words = unit()["Service"]["ExecStart"].split()
    assert python.endswith("/.venv/bin/python") and (FOLDER.parent / script).is_file()
    default = configs.CONFIG_DIR / "async_ppo.yaml"
    layers = options.parse(
        words, command="x", description="", schema=ExperimentConfig, default=default
    )
    config = configs.load(ExperimentConfig, layers.files, layers.overrides)
    assert (config.trial_name, config.launcher.llm_servers) == ("unattended", 1)


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="this machine has no systemd")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    text = UNIT.read_text().replace("%h/arealite/.venv/bin/python", shutil.which("true") or "")
    file = tmp_path / UNIT.name
    file.write_text(text.replace("%h/arealite", str(tmp_path)))
    command = ["systemd-analyze", "verify", "--man=no", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    said = [line for line in done.stderr.splitlines() if UNIT.name in line]
    assert not said, "\n".join(said)


def test_docs_show_the_unit_file() -> None:
    page = (FOLDER.parent / "docs" / "unattended.md").read_text()
    shown = page.split("```ini\n")[1].split("```")[0]
    assert shown == UNIT.read_text()
