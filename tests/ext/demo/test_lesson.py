"""The data of the lessons and their rewards."""

from __future__ import annotations

import dataclasses
import importlib
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from arealite.base.errors import InvariantError, UserError
from arealite.ext.demo.lesson import Lesson, find_lesson, names_of_lessons, write_data
from arealite.ext.demo.lessons import gsm_symbolic, sums, tool_call
from arealite.ext.gateway.families import HERMES
from arealite.ext.gateway.parser import read_calls
from arealite.ext.rewards.user_functions import import_function
from arealite.ext.tools.calculator import CalculatorTool, evaluate

ANY_FORM_LESSONS = {"gsm_symbolic"}
"""Lessons whose reward is 1 for the right answer in any form."""


def lesson_of(name: str) -> Lesson:
    """Return a lesson, small if its tasks are slow; skip if a package is not installed."""
    if name != "gsm_symbolic":
        return find_lesson(name)
    pytest.importorskip("reasoning_gym", reason="needs the extra envs", exc_type=ImportError)
    counts = {"train_rows": 64, "eval_rows": 32, "demonstrations": 64}
    return dataclasses.replace(find_lesson(name), **counts)


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("name", names_of_lessons())
def test_no_held_out_task_is_trained_or_shown(name: str, tmp_path: Path) -> None:
    lesson = lesson_of(name)
    hashes = write_data(lesson, tmp_path / "1", 1)
    again = write_data(lesson, tmp_path / "again", 1)
    other = write_data(lesson, tmp_path / "2", 2)
    assert hashes == again
    assert other["eval.jsonl"] == hashes["eval.jsonl"]
    assert other["train.jsonl"] != hashes["train.jsonl"]
    rows = {file.stem: read(file) for file in (tmp_path / "1").iterdir()}
    assert len(rows["eval"]) == lesson.eval_rows
    assert len(rows["train"]) == lesson.train_rows
    shown, most = len(rows.get("demonstrations", ())), lesson.demonstrations
    assert most // 2 <= shown <= most
    questions = [row["prompt"][-1]["content"] for part in rows.values() for row in part]
    assert len(questions) == len(set(questions))


@pytest.mark.parametrize("name", names_of_lessons())
def test_right_answer_gets_the_reward_1_and_others_get_less(name: str, tmp_path: Path) -> None:
    lesson = lesson_of(name)
    reward = import_function(lesson.reward, "reward")
    names = reward.__code__.co_varnames[: reward.__code__.co_argcount]
    write_data(lesson, tmp_path, 1)
    for row in read(tmp_path / "train.jsonl")[:50]:
        columns = {key: row[key] for key in names if key in row}
        assert reward(completion=f" {row['ground_truth']}\n", **columns) == 1.0
        in_a_text = reward(completion=f"It is {row['ground_truth']}.", **columns)
        assert in_a_text == 1.0 if name in ANY_FORM_LESSONS else in_a_text < 1.0
        assert reward(completion=f"{row['ground_truth']}7", **columns) < 1.0
        assert reward(completion="", **columns) == 0.0


@pytest.mark.parametrize("name", ["alphabet_sort", "gsm_symbolic", "tool_call"])
def test_demonstrated_answers_get_the_reward_1(name: str, tmp_path: Path) -> None:
    lesson = lesson_of(name)
    assert lesson.demonstrate
    reward = import_function(lesson.reward, "reward")
    rng = random.Random(0)
    rewards = [
        reward(completion=messages[-1]["content"], ground_truth=row["ground_truth"])
        for row in (lesson.draw(rng) for _ in range(100))
        if (messages := lesson.demonstrate(row))
    ]
    assert len(rewards) > 50
    assert set(rewards) == {1.0}


def test_solution_has_the_equations_that_lead_to_the_answer() -> None:
    sentences = "He sells 25% of 1,200: 25% × 1,200 = 300. So €300 + 5 = 305, and 2 + 2 = 5."
    right = "25/100*1200=300 300+5=305 #### 305"
    assert gsm_symbolic.short_solution(sentences, "305") == right
    assert gsm_symbolic.short_solution(sentences, "306") == ""
    units = "40 apples / 4 apples/minute = 10 minutes. 3 x 10 large boxes = 30"
    assert gsm_symbolic.short_solution(units, "30") == "40/4=10 3*10=30 #### 30"
    assert gsm_symbolic.short_solution("There are 305.", "305") == ""


@pytest.mark.parametrize(
    ("completion", "reward", "strict"),
    [
        ("5*7=35 #### 35", 1.0, 1.0),
        ("The total is $1,035.00, I think", 0.0, 0.0),
        ("So there are 35 birds.", 1.0, 0.0),
        ("#### 35 birds", 1.0, 0.0),
        ("35, or 36", 0.0, 0.0),
        ("70-35", 1.0, 0.0),
        ("#### -35", 0.0, 0.0),
    ],
)
def test_strict_answer_has_the_asked_form(completion: str, reward: float, strict: float) -> None:
    score = gsm_symbolic.right_number(completion, "35")
    assert float(score) == reward
    assert score.parts == {"strict": strict}


def test_demonstrated_call_is_one_that_the_agent_reads() -> None:
    row = tool_call.draw(random.Random(0))
    call, result, _ = tool_call.demonstrate(row)
    _, calls = read_calls(call["content"], HERMES, [CalculatorTool.schema], ids="{}")
    assert [each.arguments for each in calls] == [{"expression": row["expression"]}]
    assert result["content"] == evaluate(row["expression"])


@pytest.mark.parametrize(
    ("name", "completion", "columns", "expected"),
    [
        ("alphabet_sort", "Ann, Bob, Tim, Zoe", {"ground_truth": "Ann, Bob, Tim, Zoe"}, 1.0),
        ("alphabet_sort", "Ann, Tim, Bob, Zoe", {"ground_truth": "Ann, Bob, Tim, Zoe"}, 0.25),
        ("alphabet_sort", "Ann, Bob", {"ground_truth": "Ann, Bob, Tim, Zoe"}, 0.25),
        ("alphabet_sort", "Ann, Bob, Tim, Zoe, Ann", {"ground_truth": "Ann, Bob, Tim, Zoe"}, 0.64),
        ("alphabet_sort", "Ann Bob Tim Zoe", {"ground_truth": "Ann, Bob, Tim, Zoe"}, 0.0),
        ("sums", "12", {"ground_truth": "12"}, 1.0),
        ("sums", "5 + 7 = 12", {"ground_truth": "12"}, 0.5),
        ("sums", "13", {"ground_truth": "12"}, 0.2),
        ("sums", "112 apples", {"ground_truth": "12"}, 0.0),
        ("answer_form", "[sea]", {"ground_truth": "[sea]", "word": "sea"}, 1.0),
        ("answer_form", "Sure: [sea]", {"ground_truth": "[sea]", "word": "sea"}, 0.5),
        ("answer_form", "the sea", {"ground_truth": "[sea]", "word": "sea"}, 0.1),
        ("tool_call", "12", {"ground_truth": "12"}, 1.0),
        ("tool_call", "The result is 12.", {"ground_truth": "12"}, 0.5),
        ("tool_call", "112", {"ground_truth": "12"}, 0.0),
        ("answer_form", "[lake]", {"ground_truth": "[sea]", "word": "sea"}, 0.0),
    ],
)
def test_reward_of_an_answer(
    name: str, completion: str, columns: dict[str, str], expected: float
) -> None:
    reward = import_function(find_lesson(name).reward, "reward")
    assert reward(completion=completion, **columns) == pytest.approx(expected)


def test_lesson_with_too_few_tasks_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("arealite.ext.demo.lesson.MAX_DRAWS_IN_VAIN", 500)
    lesson = dataclasses.replace(find_lesson("sums"), train_rows=171)
    with pytest.raises(InvariantError, match="has only 210 different tasks"):
        write_data(lesson, tmp_path, 1)


def test_no_swapped_sum_is_held_out(tmp_path: Path) -> None:
    write_data(find_lesson("sums"), tmp_path, 1)
    train, held_out = (
        {frozenset(sums.numbers_of(row)) for row in read(tmp_path / name)}
        for name in ("train.jsonl", "eval.jsonl")
    )
    assert len(train) == 170
    assert not train & held_out


def test_lesson_without_its_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"--lesson gsm_symbolic.*envs"):
        find_lesson("gsm_symbolic")


def test_unknown_lesson_is_refused_with_the_known_names() -> None:
    with pytest.raises(UserError, match=r"no such lesson\. Known lessons: alphabet_sort, "):
        find_lesson("nothing")


def test_modules_of_lessons_import_no_torch() -> None:
    for name in names_of_lessons():
        module = importlib.import_module(f"arealite.ext.demo.lessons.{name}")
        assert not hasattr(module, "torch")
