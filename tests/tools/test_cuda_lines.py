"""Each condition about GPUs has a row of `arealite check --machine`, or the reason for none."""

from __future__ import annotations

import ast
from pathlib import Path

from arealite.base.files import read_toml
from arealite.ext.machine import command
from tools import cuda_lines


def test_every_file_with_a_condition_about_gpus_has_a_row() -> None:
    assert cuda_lines.unlisted() == []
    known = read_toml(command.__file__, "rows.toml")
    reasons = ("command: ", "report: ", "none: ", "every row")
    rows = {row for row in cuda_lines.ROWS.values() if not row.startswith(reasons)}
    assert rows <= known.keys()


def test_condition_is_listed_with_the_functions_that_it_calls(tmp_path: Path) -> None:
    file = tmp_path / "code.py"
    file.write_text(
        "def fast(x):\n    return x\n\n\ndef run(x):\n    if x.is_cuda:\n        return fast(x)\n"
    )
    assert ast.parse(file.read_text())
    assert [*cuda_lines.conditions(file)] == [(6, "x.is_cuda", [7, 2])]
