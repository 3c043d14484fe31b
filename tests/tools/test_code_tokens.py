"""Tokens, lines and names are counted alike on every version of Python."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools import code_tokens

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("source", "tokens", "lines"),
    [
        ("", 0, 0),
        ('"""A module."""\n\n# a comment\n', 0, 0),
        ("size = 1  # a comment\n", 3, 1),
        ("def size():\n    '''Return it.'''\n    return 1\n", 7, 2),
        ("SIZE = 1\n'''A constant.'''\n", 3, 1),
        ("name = f'{first} and {second!r:>{width}}'\n", 3, 1),
        ("name = f'{f\"{inner}\"}' 'more'\n", 4, 1),
        ("page = '''first\nsecond\nthird'''\n", 3, 3),
        ("page = f'''first\n{second}\nthird'''\n", 3, 3),
        ("call(\n    1,\n    2,\n)\n", 7, 4),
    ],
)
def test_tokens_outside_comments_and_docstrings_are_counted(
    source: str, tokens: int, lines: int
) -> None:
    counts = code_tokens.count(source)
    assert (counts.tokens, counts.lines) == (tokens, lines)


def test_fillers_are_counted_wherever_a_name_is_stored() -> None:
    source = """
def load(text, *, size):
    for each in size:
        what: int = each
    with open(text) as found, open(text) as file:
        rest = [known for known in file if (fix := known)]
    try:
        given.about = {}
    except OSError as why:
        pass
    match rest:
        case {"a": own, **told}: pass
        case [*said]: pass
"""
    counts = code_tokens.count(source)
    # `size` and `file`, and `load` and the attribute `about`, are no fillers or no names.
    # The rest of a mapping, `**told`, is not seen.
    assert (counts.fillers, counts.names) == (10, 12)


def test_tuples_on_both_sides_are_counted_and_swaps_are_not() -> None:
    source = "a, b = 1, 2\na, b = b, a\na, b = pair\nc = 1, 2\nx = a, b = 1, 2\na[0], b = b, a[0]\n"
    assert code_tokens.count(source).tuple_assignments == 2


def test_sums_of_counts_give_shares_of_the_whole() -> None:
    whole = code_tokens.count("what, size = 1, 2\n") + code_tokens.count("size = 1\n")
    assert whole.tokens_per_line == 5.0
    assert whole.filler_percent == pytest.approx(100 / 3)
    assert whole.tuple_assignments_per_1000 == 500.0
    assert code_tokens.Counts().tokens_per_line == 0.0


def test_a_plain_interpreter_prints_the_counts_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner/module.py").write_text("size = f'{1}'\n")
    script = str(ROOT / "tools/code_tokens.py")
    command = [sys.executable, "-I", "-S", script, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1].split() == ["3", "3.0", "0.0", "%", "0.0", str(tmp_path)]
