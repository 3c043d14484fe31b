"""The code on the page "How it works" is the code of the example."""

from __future__ import annotations

import re

from tests.e2e.conftest import ROOT


def test_every_code_block_is_in_the_example() -> None:
    page = (ROOT / "docs/how_it_works.md").read_text()
    example = (ROOT / "examples/rl_loop.py").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) >= 7
    assert [block for block in blocks if block not in example] == []
