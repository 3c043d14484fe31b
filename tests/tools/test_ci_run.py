"""`.ci/run`: its targets, their order and their PATH."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = [
    *(".ci/run", "tools/setup_envs.sh", "tools/without.sh", "tools/skips.py"),
]
HIDDEN = "bwrap", "chromium-headless-shell"
USED = [
    *("awk", "bash", "chmod", "dirname", "env", "find", "git", "ln", "mkdir", "mktemp", "readlink"),
    *("rm", "sh", "tar"),
]
"""The programs of .ci/run and its scripts. A PATH of all programs of this machine would be linked
twice in each run, in CPU seconds."""
BARE = ["demo", "test"]
FULL = ["check", "test-extras", "test-docs", "test-faults", "test-sglang-short", "test-tinker"]
FULL += ["test-parts", "test-vllm-short"]
FAKE_MAKE = f"""#!/bin/sh
found=
for name in {" ".join(HIDDEN)}; do command -v $name >/dev/null && found="$found $name"; done
echo "$*:$found" >>"$RECORD"
mkdir -p .venv/bin out
[ -e .venv/bin/python ] || ln -s '{sys.executable}' .venv/bin/python
[ "$1" != test ] || printf "$SKIPPED" >out/skips.txt
[ "$1" != test-extras ] || printf "$STILL_SKIPPED" >out/skips-extras.txt
[ "$1" != "$FAILS" ]
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a checkout with a space in its path, on a machine with USED, HIDDEN and make."""
    made = tmp_path / "a checkout"
    for name in FILES:
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, made / name)
    (made / "tests").mkdir()
    (made / "tests/skips.toml").write_text(
        "[extras]\n'no zsh' = ['tests/test_x.py']\n[always]\nnone = ['tests/test_n.py']\n"
    )
    programs = tmp_path / "some programs"
    programs.mkdir()
    for name in (*HIDDEN, "make"):
        (programs / name).write_text(FAKE_MAKE if name == "make" else "#!/bin/sh\n")
        (programs / name).chmod(0o755)
    for name in USED:
        (programs / name).symlink_to(shutil.which(name) or f"/no/{name}")
    return made


NEVER = r"tests/test_n.py\tnone\n"
SKIPPED = r"tests/test_x.py\tno zsh\n" + NEVER


def run(checkout: Path, *, skipped: str = SKIPPED, still: str = NEVER, fails: str = "") -> int:
    own = {"RECORD": str(checkout.parent / "record"), "FAILS": fails}
    own |= {"SKIPPED": skipped, "STILL_SKIPPED": still}
    own["PATH"] = f"{checkout.parent}/some programs"
    command = ["bash", ".ci/run"]
    done = subprocess.run(command, cwd=checkout, env=os.environ | own)
    return done.returncode


def recorded(checkout: Path) -> list[tuple[str, str]]:
    """Return the targets that ran, each with the programs on its PATH."""
    lines = (checkout.parent / "record").read_text().splitlines()
    return [(line.partition(":")[0], line.partition(":")[2].strip()) for line in lines]


def test_commands_of_the_readme_run_first_without_extra_programs(checkout: Path) -> None:
    assert run(checkout) == 0
    everything = " ".join(HIDDEN)
    assert recorded(checkout) == [(name, "") for name in BARE] + [(n, everything) for n in FULL]


def test_times_are_without_installations(checkout: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make = checkout.parent / "some programs/make"
    make.write_text(FAKE_MAKE.replace("mkdir", 'echo 1000 >>"$INSTALL_SECONDS"\nmkdir', 1))
    assert run(checkout) == 0
    lines = capfd.readouterr().out.splitlines()[-len(BARE + FULL) :]
    assert [line.split()[-1] for line in lines] == BARE + FULL
    assert all(int(line.split()[0]) < -900 for line in lines)


LIMITS = {
    "test-sglang-short": 2900,
    "test-tinker": 2800,
    "test-parts": 2900,
    "test-vllm-short": 2000,
}
"""Seconds since the start after which a part is left out."""


@pytest.mark.parametrize("seconds", sorted({*LIMITS.values()}))
def test_slow_machine_leaves_out_the_last_parts_and_says_so(
    seconds: int,
    checkout: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SECONDS", str(seconds))  # bash counts on from this number
    assert run(checkout) == 0
    left_out = [name for name, limit in LIMITS.items() if seconds >= limit]
    assert [name for name, _ in recorded(checkout)] == [
        name for name in BARE + FULL if name not in left_out
    ]
    shown = capfd.readouterr().out
    names = re.findall(r"left out, because this machine needed \d+ s so far: make (\S+)", shown)
    assert names == left_out


def test_readme_has_the_commands_that_run_first() -> None:
    lines = (ROOT / "README.md").read_text("utf-8").splitlines()
    commands = [line.partition("#")[0].strip() for line in lines if line.startswith("    make ")]
    assert commands == [f"make {name}" for name in BARE]


def test_failed_target_ends_the_run(checkout: Path) -> None:
    assert run(checkout, fails="test") != 0
    assert [name for name, _ in recorded(checkout)] == BARE


@pytest.mark.parametrize("skipped", [NEVER, SKIPPED + r"tests/test_y.py\tno zsh\n"])
def test_unlisted_skip_ends_the_run(checkout: Path, skipped: str) -> None:
    assert run(checkout, skipped=skipped) != 0
    assert [name for name, _ in recorded(checkout)] == BARE


def test_skip_with_extras_installed_ends_the_run(checkout: Path) -> None:
    assert run(checkout, still=SKIPPED) != 0
    assert [name for name, _ in recorded(checkout)] == [*BARE, "check", "test-extras"]


def test_checkout_with_a_virtual_environment_is_copied(checkout: Path) -> None:
    """Installed extras would hide missing ones. Uncommitted files are copied, too."""
    subprocess.run(["git", "init", "-q"], cwd=checkout, check=True)
    (checkout / ".gitignore").write_text(".venv\nout/\n")
    (checkout / ".venv/bin").mkdir(parents=True)
    assert run(checkout) == 0
    assert [name for name, _ in recorded(checkout)] == BARE + FULL
    assert not (checkout / ".venv/bin/python").exists()
    assert (checkout / "out/ci/checkout/.venv/bin/python").exists()


def test_hidden_programs_are_those_of_the_extras() -> None:
    listed = subprocess.run(
        [ROOT / "tools/setup_envs.sh", "--list"], capture_output=True, text=True, check=True
    )
    assert sorted(listed.stdout.split()) == sorted(HIDDEN)


def test_without_hides_programs_and_keeps_the_others(tmp_path: Path) -> None:
    """Virtual environments created by the visible Python outlive the temporary folder."""
    path = f"{checkout_programs(tmp_path)}:{os.environ['PATH']}"
    code = "command -v one; command -v two; python3 -m venv --without-pip venv; exit 7"
    done = subprocess.run(
        [ROOT / "tools/without.sh", "one", "sh", "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 7
    (two,) = done.stdout.splitlines()
    assert two.endswith("/two")
    assert not Path(two).parent.exists(), "the temporary folder is removed"
    subprocess.run([tmp_path / "venv/bin/python", "-c", "import venv"], check=True)


def checkout_programs(folder: Path) -> Path:
    """Create a folder with two programs."""
    made = folder / "two programs"
    made.mkdir()
    for name in ("one", "two"):
        (made / name).write_text("#!/bin/sh\n")
        (made / name).chmod(0o755)
    return made
