"""A target of a marker collects only the folders with marked tests, because collecting all tests
is slow."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MARKED = re.compile(r'(?:-m pytest|PYTEST\)) -m ("[^"]+"|\w+)')
TARGETS = [
    pytest.param(marker, line.split(), id=marker)
    for line in (ROOT / "Makefile").read_text().splitlines()
    for marker in re.findall(r"\w+", "".join(MARKED.findall(line)))
    if marker not in ("and", "or", "not", "long")  # long: conftest.py marks them
]


def test_makefile_has_marker_targets() -> None:
    assert len(TARGETS) >= 7


@pytest.mark.parametrize(("marker", "words"), TARGETS)
def test_target_of_a_marker_reads_all_marked_tests(marker: str, words: list[str]) -> None:
    folders = [ROOT / word for word in words if word.startswith("tests/")]
    marked = re.compile(rf"pytest\.mark\.{marker}\b")
    files = [f for f in (ROOT / "tests").rglob("test_*.py") if marked.search(f.read_text())]
    assert files
    assert [f for f in files if not any(f.is_relative_to(folder) for folder in folders)] == []


def test_short_part_on_real_sglang_has_contract_client_and_publish() -> None:
    """CI runs only these, on one server; `make test-sglang` runs all."""
    (line,) = re.findall(r'-m "sglang and sglang_short" (.+)', (ROOT / "Makefile").read_text())
    files = [f for folder in line.split() for f in (ROOT / folder).glob("test_*.py")]
    assert {f.name for f in files if "mark.sglang_short" in f.read_text()} == {
        "test_llm_server.py",
        "test_llm_server_weights.py",
        "test_server_kinds.py",
        "test_client.py",
        "test_publishers.py",
    }
