"""Recognise the rows of benchmarks by their columns."""

from __future__ import annotations

from arealite.api.task import Row

HUMANEVAL = ("prompt", "entry_point", "canonical_solution", "test")
"""Columns of HumanEval's rows. `task_id` is not required."""


def humaneval(row: Row) -> Row:
    """Convert a row with HumanEval's columns to a row of the code environment; keep other rows."""
    if any(row.get(name) is None for name in HUMANEVAL) or row.get("extra_info") is not None:
        return row
    prompt, entry_point, truth, test = (row[name] for name in HUMANEVAL)
    info = {"entry_point": entry_point, "test": test, "data_source": "humaneval"}
    return {"prompt": prompt, "ground_truth": truth, "extra_info": info}
