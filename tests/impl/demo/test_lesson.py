"""The data of the lessons and their rewards."""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from arealite.base.errors import InvariantError, UserError
from arealite.base.registry import import_function
from arealite.impl.demo.lesson import find_lesson, names_of_lessons, write_data
from arealite.impl.demo.lessons import sums


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("name", names_of_lessons())
def test_no_held_out_task_is_trained_or_shown(name: str, tmp_path: Path) -> None:
    lesson = find_lesson(name)
    hashes = write_data(lesson, tmp_path / "1", 1)
    again = write_data(lesson, tmp_path / "again", 1)
    other = write_data(lesson, tmp_path / "2", 2)
    assert hashes == again
    assert other["eval.jsonl"] == hashes["eval.jsonl"]
    assert other["train.jsonl"] != hashes["train.jsonl"]
    rows = {file.stem: read(file) for file in (tmp_path / "1").iterdir()}
    assert len(rows["eval"]) == lesson.eval_rows
    assert len(rows["train"]) == lesson.train_rows
    assert len(rows.get("demonstrations", ())) == lesson.demonstrations
    questions = [row["prompt"][-1]["content"] for part in rows.values() for row in part]
    assert len(questions) == len(set(questions))


@pytest.mark.parametrize("name", names_of_lessons())
def test_right_answer_gets_the_reward_1_and_others_get_less(name: str, tmp_path: Path) -> None:
    lesson = find_lesson(name)
    reward = import_function(lesson.reward, "reward")
    names = reward.__code__.co_varnames[: reward.__code__.co_argcount]
    write_data(lesson, tmp_path, 1)
    for row in read(tmp_path / "train.jsonl")[:50]:
        columns = {key: row[key] for key in names if key in row}
        assert reward(completion=f" {row['ground_truth']}\n", **columns) == 1.0
        assert reward(completion=f"It is {row['ground_truth']}.", **columns) < 1.0
        assert reward(completion="", **columns) == 0.0
    for row in read(tmp_path / "demonstrations.jsonl")[:50] if lesson.demonstrate else ():
        assert row["completion"][0]["content"]


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
    monkeypatch.setattr("arealite.impl.demo.lesson.MAX_DRAWS_IN_VAIN", 500)
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


def test_unknown_lesson_is_refused_with_the_known_names() -> None:
    with pytest.raises(UserError, match=r"no such lesson\. Known lessons: alphabet_sort, "):
        find_lesson("nothing")


def test_modules_of_lessons_import_no_torch() -> None:
    for name in names_of_lessons():
        module = importlib.import_module(f"arealite.impl.demo.lessons.{name}")
        assert not hasattr(module, "torch")
