"""Output of an installation is written to a log, and to the terminal only if it fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WARNINGS = [f"WARNING: Location '{number}' is ignored" for number in range(100)]
FAKE_PYTHON = """#!/bin/sh
# Makes virtual environments of itself; its pip says much, and fails where FAILS says so.
case "$*" in
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip --version" | "tools/demo.py "*) echo "the command's own line" ;;
    "-m pip "*)
        i=0
        while [ $i -lt 100 ]; do echo "WARNING: Location '$i' is ignored" >&2; i=$((i + 1)); done
        case "$*" in *"$FAILS"*) echo "ERROR: no such package" >&2; exit 7 ;; esac ;;
    *) exit 1 ;;
esac
"""


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """Return the path of the virtual environment that a fake Python creates."""
    (tmp_path / "python").write_text(FAKE_PYTHON)
    (tmp_path / "python").chmod(0o755)
    return tmp_path / "venv"


def make(target: str, venv: Path, fails: str = "no word") -> subprocess.CompletedProcess[str]:
    """Run make as a user does, also if make started this test."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(
        ["make", target, f"VENV={venv}", f"PYTHON={venv.parent}/python", "TORCH=torch==1"],
        cwd=ROOT,
        env={**own, "FAILS": fails},
        capture_output=True,
        text=True,
    )


def test_warnings_of_pip_do_not_reach_the_terminal(venv: Path) -> None:
    done = make("demo", venv)
    assert (done.returncode, done.stderr) == (0, "")
    log = f"(log: {venv}/install.log)"
    assert done.stdout.splitlines() == [
        f"installing pip into {venv} {log}",
        f"installing torch (once: some minutes) into {venv} {log}",
        f"installing AReaLite into {venv} {log}",
        f"{venv}/bin/python tools/demo.py --seed 1 --backend embedded",
        "the command's own line",
    ]
    assert (venv / "install.log").read_text().splitlines() == WARNINGS * 2
    again = make("demo", venv)
    assert len(again.stdout.splitlines()) == 2, "nothing is installed twice"


def test_output_is_shown_when_an_installation_fails(venv: Path) -> None:
    done = make("demo", venv, fails="-e .[demo]")
    assert done.returncode == 2
    assert "tools/demo.py" not in done.stdout
    *shown, error, made = done.stderr.splitlines()
    assert shown == [*WARNINGS, "ERROR: no such package"], "of the step that failed, and no other"
    assert error.startswith(f"error: installing AReaLite into {venv} failed with code 7: ")
    assert error.endswith(f"the output above is also in {venv}/install.log")
    assert made.startswith("make: ***")
    assert make("demo", venv).returncode == 0, "the next try begins where this one failed"


def test_pip_is_installed_into_a_venv_without_pip(venv: Path) -> None:
    """Debian without python3-venv creates a virtual environment without pip."""
    (venv / "bin").mkdir(parents=True)
    (venv / "bin/python").write_text("#!/bin/sh\nexit 1\n")
    (venv / "bin/python").chmod(0o755)
    assert make("demo", venv).returncode == 0


def test_every_installation_of_the_makefile_has_a_log() -> None:
    recipes = [line for line in (ROOT / "Makefile").read_text().splitlines() if line[:1] == "\t"]
    assert [
        line for line in recipes if "-m pip" in line or "(PIP)" in line or "-m venv" in line
    ] == []
    assert len([line for line in recipes if "$(call install," in line]) >= 7


@pytest.mark.parametrize("fails", [False, True])
def test_debian_packages_are_installed_as_root_or_listed(tmp_path: Path, fails: bool) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, does in {
        "apt-get": f'echo "what apt-get says" >&2; [ "$1" = update ] || exit {int(fails)}',
        "id": "echo 0",
        "bwrap": "",
    }.items():
        (programs / name).write_text(f"#!/bin/sh\n{does}\n")
        (programs / name).chmod(0o755)
    for name in ("bash", "dirname", "mkdir", "wc", "tail", "sh"):
        (programs / name).symlink_to(f"/usr/bin/{name}")
    log = tmp_path / "log"
    done = subprocess.run(
        [ROOT / "tools/setup_envs.sh", log],
        env={"PATH": str(programs)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    lists, packages, *more = done.stdout.splitlines()
    assert lists == f"installing Debian's lists of packages (log: {log})"
    assert packages.split()[1] == "chromium-headless-shell"
    assert "bubblewrap" not in packages
    assert ("what apt-get says" in done.stderr) == fails
    assert ["not installed" in line for line in more] == [True] * fails


def test_pip_accepts_the_options_of_the_makefile() -> None:
    lines = (ROOT / "Makefile").read_text().splitlines()
    (words,) = [line.removeprefix("PIP := ").split() for line in lines if line[:6] == "PIP :="]
    done = subprocess.run([sys.executable, *words, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
