"""The page on long contexts has the table that the tool prints."""

from __future__ import annotations

from pathlib import Path

from tools.context_table import MODELS, bytes_of, cell, sizes, table

PAGE = Path(__file__).parents[2] / "docs/long_contexts.md"


def test_page_has_the_table_that_the_tool_prints() -> None:
    assert table(80.0) in PAGE.read_text()


def test_sizes_divide_heads_and_ranks() -> None:
    assert list(sizes(MODELS["7.6 B"], 16)) == [1, 2, 4]
    assert list(sizes(MODELS["72.7 B"], 16)) == [1, 2, 4, 8, 16]


def test_more_ranks_for_a_row_need_less_memory_each() -> None:
    one, four = (bytes_of(MODELS["7.6 B"], 8, size, 1 << 17) for size in (1, 4))
    tokens, hidden, inner = 1 << 17, 3584, 18944
    saved = 0.75 * tokens * 2 * (28 * hidden + 8 * hidden + 4 * inner)
    assert abs(one - four - saved) < 1e-6 * one
    assert cell(MODELS["7.6 B"], 8, four + 1.0) == f"128k (4; {four / 1e9:.0f} GB)"
