"""The first page leads to the page of each first task with one click, and a test runs that page."""

from __future__ import annotations

import re

import pytest

from tests.docs import tables, tutorial

DOCS = tutorial.ROOT / "docs"
TASKS = [row for row in tables.rows((DOCS / "index.md").read_text()) if row.header[0] == "you have"]
RUN_PAGES = {"from_trl.md"}
"""Pages outside of tutorials/ that a test runs."""


def anchor(heading: str) -> str:
    """Return the anchor of a heading."""
    return re.sub(r"[^\w-]", "", heading.lower().replace(" ", "-"))


def test_first_page_has_the_six_tasks() -> None:
    wanted = "reward function", "column names", "notebook", "Jupyter", "instruct model", "Docker"
    assert [w for w in wanted if not any(w in row.cells[0] for row in TASKS)] == []


@pytest.mark.parametrize("row", TASKS, ids=lambda row: row.cells[0])
def test_page_of_a_first_task_exists_and_is_run(row: tables.Row) -> None:
    (target,) = re.findall(r"\]\(([^)]+)\)", row.cells[1])
    page, _, part = target.partition("#")
    headings = re.findall(r"^#+ (.*)", (DOCS / page).read_text(), re.MULTILINE)
    assert not part or part in map(anchor, headings)
    assert page.startswith("tutorials/") or page in RUN_PAGES
