"""The Python of docs/environments.md about Requests runs as it is written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs/environments.md"


def test_examples_of_the_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    section = PAGE.read_text().partition("## Play an environment from Python\n")[2]
    section = section.partition("\n## ")[0]
    blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(blocks) == 3
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)
    assert capsys.readouterr().out == "{'x': 1.0, 'o': -1.0}\n"
    with names["make"]("short_game", opening_moves=0) as env:  # type: ignore[operator]
        assert env.reset(seed=1)[0].actor == "x"
