"""Command lines in docstrings and pages are valid; nothing is run.

Tutorials, the README's commands and the examples on a laptop are run as well (make test-docs).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from arealite.base.errors import UserError
from tests.docs import commands
from tests.docs.commands import ROOT, Command

FILES = [
    *sorted((ROOT / "examples").glob("[a-z]*.py")),
    *sorted((ROOT / "tools").rglob("*.py")),
    *sorted((ROOT / "tools").glob("*.sh")),
    *sorted((ROOT / "arealite").rglob("*.py")),
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md", "train.py")),
]
COMMANDS = [command for file in FILES for command in commands.found(file)]


def test_every_example_shows_its_command() -> None:
    shown = {c.where.partition(":")[0] for c in COMMANDS if "python3 examples/" in c.line}
    assert {f"examples/{f.name}" for f in (ROOT / "examples").glob("[a-z]*.py")} <= shown


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.where)
def test_shown_command_is_valid(command: Command) -> None:
    commands.check(command)


@pytest.mark.parametrize(
    "line",
    [
        "make test-everything",
        "python3 tools/none.py",
        "python3 tools/soak.py --murders 3",
        "python3 examples/sft.py trainer.offline.lrr=1e-5",
        "arealite trian model.path=M",
        "arealite train config/none.yaml",
        "arealite eval samples=8",
    ],
)
def test_invalid_command_is_detected(line: str) -> None:
    with pytest.raises((AssertionError, UserError)):
        commands.check(Command("here", line, ""))


def test_continued_lines_are_joined_and_comments_removed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(commands, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    indented, fenced = "    make a \\\n        B=1\n", "```bash\narealite audit R  # why\nls\n```\n"
    page.write_text(f"Type\n\n{indented}\nor\n\n{fenced}")
    assert [c.line.split() for c in commands.found(page)] == [
        ["arealite", "audit", "R", "#", "why"],
        ["make", "a", "B=1"],
    ]
