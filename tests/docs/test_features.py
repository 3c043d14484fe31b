"""Type every command of the page "Five projects in one", and look for the text that it shows.

The rows of a section run in order in one shell, as the commands of a tutorial (tutorial.py).
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.docs import tables, tutorial
from tests.docs.tables import Row

PAGE = tutorial.ROOT / "docs/features.md"
SETUP, *PROJECTS = re.split(r"^(?=## )", PAGE.read_text(), flags=re.MULTILINE)[1:]
PYTHON = ">>> "
PROMPT = "import sys, arealite; from arealite import *; exec(compile(sys.argv[1], 'row', 'single'))"
"""Program that runs a line as Python's prompt does."""


def title(section: str) -> str:
    return section.partition("\n")[0].removeprefix("## ")


def is_run(row: Row) -> bool:
    return not row.cells[2].startswith("run by ")


def steps(row: Row) -> str:
    """Return the blocks of a tutorial for a row: its command, and the text that it shows."""
    (command,) = tables.codes(row.cells[1])
    if command.startswith(PYTHON):
        command = shlex.join(["python3", "-c", PROMPT, command.removeprefix(PYTHON)])
    shown = tables.codes(row.cells[2])
    text = "".join(f"…{each}…\n" for each in shown)
    if shown[:1] == ["error:"]:
        text = "…".join(shown) + "…\n"
    return f"```bash\n{command}\n```\n" + (f"```text\n{text}```\n" if text else "")


def as_tutorial(section: str) -> str:
    """Return a section with a tutorial's blocks instead of the rows of its table."""
    found = {row.line: row for row in tables.rows(section)}
    lines = section.splitlines()
    kept = [
        (steps(found[n]) if is_run(found[n]) else "") if n in found else line
        for n, line in enumerate(lines, 1)
        if n in found or not line.startswith("|")
    ]
    return "\n".join(kept) + "\n"


@pytest.mark.docs
@pytest.mark.timeout(600)
@pytest.mark.parametrize("section", PROJECTS, ids=title)
def test_every_command_shows_its_text(section: str, tmp_path: Path, kit: Path):
    page = tmp_path / f"{title(section)}.md"
    page.write_text(SETUP + as_tutorial(section))
    folder = tmp_path / "reader"
    folder.mkdir()
    tutorial.run(page, folder, kit)


ROWS = [row for section in PROJECTS for row in tables.rows(section)]


def test_all_five_projects_have_features():
    assert [title(section) for section in PROJECTS] == [
        "AReaLite",
        "GyLLM",
        "MRLM",
        "EasyRL",
        "Brawl",
    ]
    assert len(ROWS) > 80
    assert all(len(row.cells) == 3 and len(tables.codes(row.cells[1])) == 1 for row in ROWS)


@pytest.mark.parametrize("row", [row for row in ROWS if not is_run(row)], ids=lambda r: r.cells[1])
def test_command_that_is_not_run_is_a_make_target(row: Row):
    (command,) = tables.codes(row.cells[1])
    target = command.removeprefix("make ")
    assert re.search(rf"^{target}[ :]", (tutorial.ROOT / "Makefile").read_text(), re.MULTILINE)
