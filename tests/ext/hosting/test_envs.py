"""`arealite envs` lists every environment, even if packages are missing, and imports little."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from arealite.api.env import envs
from arealite.cli import main as cli
from arealite.ext.hosting import envs as command


def test_every_environment_is_listed() -> None:
    lines = {line[0]: line for line in command.rows()}
    assert list(lines) == envs.names()
    assert lines["tic_tac_toe"][1:4] == ("x, o", "generated, or a file's", "")
    assert lines["debate"][1] == "pro, con, judge"
    assert lines["textarena"][1] == lines["gyllm"][1] == "by config"
    assert lines["math"][4].startswith("Scores an agent's answer")


def test_envs_imports_no_heavy_module() -> None:
    code = (
        "import sys; from arealite.cli.main import main; main(['envs']); "
        "heavy = ('torch', 'transformers', 'playwright', 'gymnasium', 'textarena', 'mcp'); "
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    head, *lines, imported = done.stdout.splitlines()
    assert imported == "[]"
    assert head.split() == ["name", "seats", "tasks", "needs", "description"]
    assert {"math", "tic_tac_toe"} <= {line.split()[0] for line in lines} <= {*envs.names()}


def test_missing_package_is_listed_with_its_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command, "package", lambda name: "")
    needs = {line[0]: line[3] for line in command.rows()}
    assert needs["textarena"] == "textarena: pip install -e '.[envs]'"
    assert needs["math"] == ""
    monkeypatch.setattr(command, "package", lambda name: "1.0")
    assert {line[0]: line[3] for line in command.rows()}["textarena"] == "textarena"


def cells(line: str, head: str) -> list[str]:
    """Split a line at the columns of the head; empty cells differ in width."""
    begins = [head.index(name) for name in command.HEAD]
    return [line[a:b].strip() for a, b in zip(begins, [*begins[1:], None], strict=True)]


def test_custom_environment_is_listed_and_a_broken_one_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "listed_env.py").write_text(
        "from arealite.api.env import Env, envs\n"
        "@envs.register('listed')\n"
        "class Listed(Env):\n"
        "    'Of my own.'\n"
        "    seats = ('a', 'b')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setattr(envs, "_table", {**envs._table, "broken": "no_such_module:Env"})
    for version in ("", "1.0"):  # without and with extras
        monkeypatch.setattr(command, "package", lambda name, version=version: version)
        assert cli.main(["envs", "imports=[listed_env]"]) == 0
        head, *lines = capsys.readouterr().out.splitlines()
        (own,) = [line for line in lines if line.startswith("listed ")]
        assert cells(own, head) == ["listed", "a, b", "a file's", "", "Of my own."]
        (broken,) = [line for line in lines if line.startswith("broken ")]
        assert cells(broken, head)[-1] == "cannot be imported: No module named 'no_such_module'"
