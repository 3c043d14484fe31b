"""The entry points of pyproject.toml are those of the tables."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from arealite.base import entries
from tools import entry_points


def test_entry_points_are_those_of_the_tables():
    assert entry_points.main(["--check"]) == 0
    project = tomllib.loads(entry_points.PROJECT.read_text())["project"]
    groups = {
        group.removeprefix(entries.PREFIX): targets
        for group, targets in project["entry-points"].items()
    }
    assert {group: dict(entries.own(group)) for group in groups} == groups
    tables = [
        tomllib.loads((entry_points.ROOT / table).read_text()) for table in entry_points.TABLES
    ]
    assert {group for table in tables for group in table} == groups.keys()


def test_difference_is_shown_and_then_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    whole = entry_points.PROJECT.read_text()
    project = tmp_path / "pyproject.toml"
    project.write_text(whole.replace('local = "arealite.impl.launcher.local:LocalLauncher"\n', ""))
    monkeypatch.setattr(entry_points, "PROJECT", project)
    assert entry_points.main(["--check"]) == 1
    assert "run tools/entry_points.py" in capsys.readouterr().out
    assert entry_points.main([]) == 0
    assert project.read_text() == whole
    assert entry_points.main(["--check"]) == 0
