"""Skipped tests are compared with a list and run again; the list has only existing tests."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tools import skips

ROOT = Path(__file__).resolve().parents[2]
LISTED = tomllib.loads((ROOT / "tests/skips.toml").read_text("utf-8"))
SKIPPED = {
    "tests/test_a.py": "no zsh",
    "tests/test_b.py::test_x[1]": "no zsh",
    "tests/test_b.py::test_x[2]": "no zsh",
    "tests/test_b.py::test_y": "no fish",
}
LIST = """
[extras]
"no zsh" = ["tests/test_a.py", "tests/test_b.py::test_x[1]", "tests/test_b.py::test_x[2]"]
[always]
"no fish" = ["tests/test_b.py::test_y"]
"""


@pytest.mark.parametrize(
    ("listed", "tables", "told"),
    [
        (LIST, ["extras", "always"], ["4 tests were skipped, as"]),
        (
            LIST,
            ["extras"],
            ["skipped, and not listed: tests/test_b.py::test_y (no fish)", "error: 1 differences"],
        ),
        (
            LIST + '"no shell" = ["tests/test_c.py"]',
            ["extras", "always"],
            ["listed, and not skipped: tests/test_c.py (no shell)", "error: 1 differences"],
        ),
        (
            LIST.replace("no fish", "no shell"),
            ["extras", "always"],
            [
                "skipped, and not listed: tests/test_b.py::test_y (no fish)",
                "listed, and not skipped: tests/test_b.py::test_y (no shell)",
                "error: 2 differences",
            ],
        ),
    ],
    ids=["exact", "unlisted", "missing", "another reason"],
)
def test_unlisted_and_missing_skips_fail(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    listed: str,
    tables: list[str],
    told: list[str],
) -> None:
    (tmp_path / "list").write_text(listed)
    report = "".join(f"{name}\t{why}\n" for name, why in SKIPPED.items())
    (tmp_path / "report").write_text(report)
    words = ["check", str(tmp_path / "list"), str(tmp_path / "report"), *tables]
    assert skips.main(words) == (0 if len(told) == 1 and "error" not in told[-1] else 1)
    shown = capsys.readouterr().out.splitlines()
    assert [line.startswith(start) for line, start in zip(shown, told, strict=True)] == [
        True
    ] * len(told)


def test_error_of_a_missing_report_has_the_fix(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="run `make test` first"):
        skips.main(["rerun", str(tmp_path / "none"), "true"])


def test_rerun_without_skips_runs_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "report").write_text("")
    assert skips.main(["rerun", str(tmp_path / "report"), "echo", "all tests"]) == 0
    assert capfd.readouterr().out.endswith("nothing to run\n")


@pytest.mark.processes
def test_skipped_tests_of_a_report_are_run_again(tmp_path: Path) -> None:
    """A module, a test and a parametrized test, in several processes as with `make test`."""
    folder = tmp_path / "with a space"
    folder.mkdir()
    (folder / "conftest.py").write_text("from tests.skip_report import pytest_terminal_summary\n")
    (folder / "test_module.py").write_text(
        "import os, pytest\n"
        "if not os.environ.get('EXTRA'): pytest.skip('no\\n extra', allow_module_level=True)\n"
        "def test_one(): pass\n"
        "def test_two(): pass\n"
    )
    (folder / "test_own.py").write_text(
        "import os, pytest\n"
        "missing = pytest.mark.skipif(not os.environ.get('EXTRA'), reason='no extra')\n"
        "@missing\n"
        "@pytest.mark.parametrize('word', ['a b[c]::d', 'é'])\n"
        "def test_odd(word): pass\n"
        "def test_always(): pass\n"
    )
    report, again = folder / "out/skips.txt", folder / "again.txt"
    pytest_ = [sys.executable, "-m", "pytest", "-q", "-p", "xdist", "-n2", "--rootdir=."]
    pytest_ += ["-o", "addopts="]
    own = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # six processes would import all plugins
    }

    def run(command: list[str], **more: str) -> str:
        done = subprocess.run(
            command, cwd=folder, env={**own, **more}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "1 passed, 3 skipped" in run(pytest_, SKIPS=str(report))
    assert set(skips.read(report).values()) == {"no extra"}
    assert len(skips.read(report)) == 3
    rerun = [sys.executable, str(ROOT / "tools/skips.py"), "rerun", str(report)]
    assert "4 passed" in run([*rerun, *pytest_], EXTRA="1", SKIPS=str(again))
    assert again.read_text() == ""


def test_list_of_skips_has_only_existing_tests() -> None:
    for name in [each for table in LISTED.values() for names in table.values() for each in names]:
        file, _, function = name.partition("::")
        assert (ROOT / file).is_file(), name
        function = function.partition("[")[0].rpartition("::")[2]
        assert f"def {function}" in (ROOT / file).read_text(), name
