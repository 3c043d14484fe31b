"""Finds AReaLite's columns in the rows of other libraries: HumanEval, verl, GSM8K, MATH."""

from typing import Any, cast

from arealite.system.data.forms import DatasetRow, as_text

HUMANEVAL = ("prompt", "entry_point", "canonical_solution", "test")
"""Columns of HumanEval's rows. `task_id` is not required."""
BESIDE_QUESTION = {"choices", "options", "context", "passage"}
"""Columns that belong into the prompt: a row with a question and one of them is not recognised."""


def task_form(row: DatasetRow) -> tuple[str, DatasetRow] | None:
    """Return the name of a form and the row with AReaLite's columns; None: no known form.

    It is a hook `task_form`.
    """
    has_humaneval = all(row.get(name) is not None for name in HUMANEVAL)
    if has_humaneval and row.get("extra_info") is None:
        return "HumanEval rows", _from_humaneval(row)
    if "prompt" in row:
        has_model = isinstance(row.get("reward_model"), dict)
        if has_model and row.get("ground_truth") is None:
            return "verl rows: reward_model.ground_truth", _from_verl(row)
        return None
    has_question = {"question", "answer"} <= row.keys()
    if has_question and not BESIDE_QUESTION & row.keys():
        return _from_question(row)
    if "problem" in row and {"answer", "solution"} & row.keys():
        return _from_problem(row)
    return None


def _from_humaneval(row: DatasetRow) -> DatasetRow:
    extra_info = {
        "data_source": "humaneval",
        "entry_point": row["entry_point"],
        "test": row["test"],
    }
    return {
        **row,
        "ground_truth": as_text(row["canonical_solution"]),
        "extra_info": extra_info,
    }


def _from_verl(row: DatasetRow) -> DatasetRow:
    truth = cast(DatasetRow, row["reward_model"]).get("ground_truth")
    extra_info = row.get("extra_info") or DatasetRow()
    if isinstance(extra_info, dict) and "data_source" in row:
        extra_info = {"data_source": row["data_source"], **cast(DatasetRow, extra_info)}
    return {**row, "ground_truth": as_text(truth), "extra_info": extra_info}


def _from_question(row: DatasetRow) -> tuple[str, DatasetRow]:
    """Return the form of a row with question and answer, and the row with AReaLite's columns."""
    form = "rows: question/answer"
    truth = row["answer"]
    if isinstance(truth, str) and "####" in truth:
        form = "GSM8K rows: question/answer, `####` answers"
        _, _, after_mark = truth.rpartition("####")
        truth = after_mark.strip().replace(",", "")
    return form, _with_task(row, prompt=row["question"], truth=truth)


def _from_problem(row: DatasetRow) -> tuple[str, DatasetRow]:
    """Return the form of a row with problem and answer, and the row with AReaLite's columns."""
    form = "rows: problem/answer"
    truth = row.get("answer")
    if truth is None:
        form = "MATH rows: problem/solution, \\boxed answers"
        truth = row.get("solution")
        if isinstance(truth, str):
            truth = boxed(truth) or truth
    return form, _with_task(row, prompt=row["problem"], truth=truth)


def _with_task(row: DatasetRow, *, prompt: Any, truth: Any) -> DatasetRow:
    """Return a row with a prompt and a ground truth; an existing `ground_truth` is kept."""
    existing_truth = row.get("ground_truth")
    if existing_truth is not None:
        truth = existing_truth
    return {**row, "prompt": prompt, "ground_truth": as_text(truth)}


def boxed(solution: str) -> str | None:
    r"""Return the content of the last \boxed{…} of a text; None without one."""
    _, mark, after_mark = solution.rpartition("\\boxed{")
    if not mark:
        return None
    depth = 1
    for end, letter in enumerate(after_mark):
        if letter == "{":
            depth += 1
        elif letter == "}":
            depth -= 1
        if depth == 0:
            return after_mark[:end]
    return None
