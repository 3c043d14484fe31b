"""docs/architecture.md lists the facades that the contract of lint-imports lists."""

from __future__ import annotations

import tomllib
from typing import Any

from tests.docs import tables, tutorial

EVERY_EXTENSION = "arealite.ext.** -> arealite."
PAGE = (tutorial.ROOT / "docs/architecture.md").read_text()
PROJECT: dict[str, Any] = tomllib.loads((tutorial.ROOT / "pyproject.toml").read_text())


def test_facades_of_the_page_are_those_of_the_contract() -> None:
    contracts = PROJECT["tool"]["importlinter"]["contracts"]
    (contract,) = (contract for contract in contracts if contract["type"] == "protected")
    facades = [
        line.removeprefix(EVERY_EXTENSION)
        for line in contract["ignore_imports"]
        if line.startswith(EVERY_EXTENSION)
    ]
    rows = [row for row in tables.rows(PAGE) if row.header[0].startswith("facade")]
    assert [row.cells[0].strip("`") for row in rows] == facades
    assert facades == sorted(facades)
