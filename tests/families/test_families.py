"""Every family of models is exact or refused by one line: no silent difference.

`make test-models` runs all families and writes out/models.json; with WRITE=1 also the table of
docs/models.md. `make test` runs the families that stand for the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arealite.base.errors import UserError
from arealite.impl.engine.fsdp import FSDPEngine
from tests.families import table
from tests.families.checks import Case, prove, quiet, run
from tests.families.configs import CONFIGS
from tests.impl.engine.conftest import group as group

pytestmark = pytest.mark.usefixtures("group")
COMMON = "llama, tied", "mistral, window", "gemma3_text", "deepseek_v3", "lfm2"
"""Families for `make test`: a tied head, a window, two kinds of layers, experts, a hybrid."""
NUM_FAMILIES = 36


@pytest.fixture(scope="module")
def found() -> Iterator[table.Rows]:
    """Collect rows; write them if all families were run."""
    rows: table.Rows = []
    yield rows
    if {row["family"] for row in rows} == CONFIGS.keys():
        table.write_json(rows)
        if os.environ.get("MODELS_WRITE"):
            table.write_page(rows)


def check(rows: table.Rows) -> None:
    faults = [row for row in rows if row["outcome"] not in ("exact", "refused")]
    assert not faults, "\n".join(f"{r['folder']}, {r['check']}: {r['why']}" for r in faults)
    long = [row["why"] for row in rows if "\n" in row["why"].strip()]
    assert not long, "a refusal is one line"


@pytest.mark.models
@pytest.mark.parametrize("name", CONFIGS)
def test_family_is_exact_or_refused(name: str, found: table.Rows) -> None:
    rows = prove(name)
    found += rows
    check(rows)


@pytest.mark.models
def test_table_of_the_docs_is_current(found: table.Rows) -> None:
    """Runs after all families."""
    if {row["family"] for row in found} != CONFIGS.keys():
        pytest.skip("not all families were run")
    counts = table.summary(found)
    assert counts["families"] >= NUM_FAMILIES and counts["silent"] == counts["crashed"] == 0
    if not os.environ.get("MODELS_WRITE"):
        assert table.shown() == table.table(found), "run make test-models WRITE=1"


@pytest.mark.parametrize("name", COMMON)
def test_common_family_is_exact_or_refused(name: str) -> None:
    rows = prove(name)
    check(rows)
    line = next(line for line in table.shown().splitlines() if line.startswith(f"| {name} |"))
    for column, cell in zip(table.COLUMNS.values(), line.split("|")[2:], strict=False):
        outcomes = {row["outcome"] for row in rows if row["check"] in column}
        assert (cell.strip() == "exact") == (outcomes == {"exact"}), (name, column)


def test_table_of_the_docs_lists_all_families() -> None:
    listed = [line.split("|")[1].strip() for line in table.shown().splitlines() if "|" in line]
    assert listed[2:] == list(CONFIGS)


def test_planted_outcomes_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("llama, tied", tmp_path, original=True)

    def planted(change: Callable[[np.ndarray], np.ndarray]) -> str:
        def forward(*args: Any) -> dict[str, list[np.ndarray]]:
            return {"logprobs": [change(values) for values in whole(*args)["logprobs"]]}

        whole = FSDPEngine.forward
        with monkeypatch.context() as patch, quiet():
            patch.setattr(FSDPEngine, "forward", forward)
            return run(case, "hub", "padded").outcome

    def refuse(values: np.ndarray) -> np.ndarray:
        raise UserError("no")

    def crash(values: np.ndarray) -> np.ndarray:
        raise RuntimeError("oh")

    assert planted(lambda values: values) == "exact"
    assert planted(lambda values: values + np.float32(1e-3)) == "silent"
    assert planted(lambda values: values * np.float32(np.nan)) == "silent"
    assert planted(refuse) == "refused"
    assert planted(crash) == "crashed"


def test_lost_buffer_makes_an_export_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, stream = Case("deepseek_v3", tmp_path, original=True), FSDPEngine.stream_weights

    def without_bias(self: FSDPEngine, **options: Any) -> Iterator[tuple[str, Any]]:
        return (pair for pair in stream(self, **options) if "e_score_correction" not in pair[0])

    with quiet():
        monkeypatch.setattr(FSDPEngine, "stream_weights", without_bias)
        row = run(case, "hub", "export")
    assert row.outcome == "silent" and "e_score_correction_bias" in row.why
