"""Each line of tests/long.txt names a test that exists."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import long_tests

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("line", long_tests())
def test_line_names_a_file_and_a_test_of_it(line: str) -> None:
    file, _, test = line.partition("::")
    name = test.partition("*")[0].partition("[")[0]
    test_code = (ROOT / file).read_text()
    assert not name or f"def {name}" in test_code
