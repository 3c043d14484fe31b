"""Rows of other libraries become tasks and chats; `dataset.columns` names other columns."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from arealite.api.experiment_config import ExperimentConfig
from arealite.api.task import Task
from arealite.base.errors import UserError
from arealite.ext.datasets.task_forms import boxed, task_form
from arealite.ext.offline import rows as chats
from arealite.ext.offline.chat_rows import chat_form, chat_row
from arealite.system.data.dataset import identity, load_tasks, read_rows
from tests.system.data.test_dataset import jsonl, parquet

USER = {"role": "user", "content": "1+1?"}
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [USER],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train", "index": 7},
}


def csv_file(path: Path, rows: list[dict[str, Any]]) -> str:
    import csv

    file = path / "rows.csv"
    with file.open("w", newline="", encoding="utf-8-sig") as out:
        writer = csv.DictWriter(out, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return str(file)


def json_array(path: Path, rows: list[dict[str, Any]]) -> str:
    (path / "rows.json").write_text(json.dumps(rows, indent=2))
    return str(path / "rows.json")


def json_lines(path: Path, rows: list[dict[str, Any]]) -> str:
    return str(Path(jsonl(path, rows)).rename(path / "rows.json"))


def saved(path: Path, rows: list[dict[str, Any]]) -> str:
    """Write the files of `datasets.Dataset.save_to_disk`, version 5, in two shards."""
    import pyarrow

    (folder := path / "saved").mkdir(parents=True)
    names = [f"data-{n:05d}-of-00002.arrow" for n in range(2)]
    table = pyarrow.Table.from_pylist(rows)
    for name, part in zip(names, (table.slice(0, 1), table.slice(1)), strict=True):
        with pyarrow.ipc.new_stream(folder / name, table.schema) as out:
            out.write_table(part)
    state = {"_data_files": [{"filename": name} for name in names], "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return str(folder)


WRITERS = [jsonl, parquet, csv_file, json_array, json_lines, saved]


@pytest.mark.parametrize("write", WRITERS)
def test_every_kind_of_file_is_read(tmp_path: Path, write: Any) -> None:
    rows = [{"question": f"{n}+1?, \n{n}", "answer": f"so\n#### {n}"} for n in range(3)]
    tasks = load_tasks(write(tmp_path, rows), "train")
    assert [(t.prompt, t.ground_truth) for t in tasks] == [
        (row["question"], str(n)) for n, row in enumerate(rows)
    ]


@pytest.mark.parametrize(
    ("row", "form", "prompt", "truth", "extra"),
    [
        (
            VERL,
            "verl rows: reward_model.ground_truth",
            [USER],
            "2",
            {"data_source": "openai/gsm8k", "split": "train", "index": 7},
        ),
        (
            {"prompt": "count", "reward_model": {"ground_truth": {"target": 98, "n": [1, 2]}}},
            "verl rows: reward_model.ground_truth",
            "count",
            '{"target":98,"n":[1,2]}',
            {},
        ),
        (
            {"question": "q", "answer": "We add 1,000.\n#### 1,234"},
            "GSM8K rows: question/answer, `####` answers",
            "q",
            "1234",
            {},
        ),
        ({"question": "q", "answer": 4}, "rows: question/answer", "q", "4", {}),
        (
            {"problem": "p", "solution": "$\\boxed{1}$, so $\\boxed{\\frac{1}{2}}$.", "level": "5"},
            "MATH rows: problem/solution, \\boxed answers",
            "p",
            "\\frac{1}{2}",
            {},
        ),
        ({"problem": "p", "solution": "s", "answer": "7"}, "rows: problem/answer", "p", "7", {}),
        (
            {"question": "q", "answer": "#### 4", "ground_truth": "5"},
            "GSM8K rows: question/answer, `####` answers",
            "q",
            "5",
            {},
        ),
        ({"prompt": "a", "ground_truth": "b", "reward_model": {"x": 1}}, "", "a", "b", {}),
    ],
)
def test_forms_of_other_libraries_are_recognised(
    tmp_path: Path, row: dict[str, Any], form: str, prompt: Any, truth: str, extra: Any
) -> None:
    assert (task_form(row) or ("", row))[0] == form
    for write in (jsonl, parquet):
        (task,) = load_tasks(write(tmp_path, [row]), "train")
        assert (task.prompt, task.ground_truth, task.extra_info) == (prompt, truth, extra)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("\\boxed{1} then \\boxed{{2}}.", "{2}"),
        ("\\boxed{\\text{a {b}} c}", "\\text{a {b}} c"),
        ("\\boxed{1", None),
        ("1", None),
        ("", None),
    ],
)
def test_content_of_the_last_box_is_returned(text: str, content: str | None) -> None:
    assert boxed(text) == content


@pytest.mark.parametrize(
    ("row", "columns", "expected"),
    [
        (
            {"q": "1+1?", "a": 2, "topic": "sum"},
            {"prompt": "q", "ground_truth": "a", "data_source": "topic"},
            ("1+1?", "2", {"data_source": "sum"}),
        ),
        (  # an explicit name wins over a recognised one, and the value stays as it is
            {"question": "q", "answer": "#### 4", "other": "o"},
            {"ground_truth": "answer"},
            ("q", "#### 4", {}),
        ),
        (
            {"prompt": "p", "extra_info": {"a": 1}, "deep": {"truth": {"value": 0.5}}},
            {"ground_truth": "deep.truth.value", "level": "deep.truth.value"},
            ("p", "0.5", {"a": 1, "level": 0.5}),
        ),
        ({"a.b": "p"}, {"prompt": "a.b"}, ("p", None, {})),
    ],
)
def test_dataset_columns_name_the_columns(
    tmp_path: Path, row: dict[str, Any], columns: dict[str, str], expected: Any
) -> None:
    for write in (jsonl, parquet):
        (task,) = load_tasks(write(tmp_path, [row]), "train", columns)
        assert (task.prompt, task.ground_truth, task.extra_info) == expected


@pytest.mark.parametrize(
    ("row", "columns", "says"),
    [
        (
            {"question": "a", "reply": "b"},
            {"prompt": "questoin"},
            "no column `questoin` (dataset.columns.prompt), only question, reply. "
            "Did you mean 'question'?",
        ),
        ({"prompt": "a", "x": {"y": 1}}, {"ground_truth": "x.z"}, "no column `x.z`"),
        ({"q": "a"}, {"promt": "q"}, "Unknown key of dataset.columns 'promt'. Did you mean"),
        (
            {"instruction": "a", "output": "b"},
            {},
            "no column `prompt`, only instruction, output. Did you mean 'instruction'? Rename it "
            "to `prompt`, or set dataset.columns.prompt=instruction.",
        ),
        ({"a": "b"}, {}, "or set dataset.columns.prompt to the name of the column"),
    ],
)
def test_unknown_column_is_refused_with_the_columns_of_the_file(
    tmp_path: Path, row: dict[str, Any], columns: dict[str, str], says: str
) -> None:
    path = jsonl(tmp_path, [row])
    with pytest.raises(UserError) as caught:
        load_tasks(path, "train", columns)
    assert str(caught.value).startswith(f"{path}, line 1: ") or "Unknown key" in says
    assert says in str(caught.value)


def test_other_columns_are_kept_only_if_a_reward_reads_them(tmp_path: Path) -> None:
    row = {"question": "q", "answer": "#### 4", "difficulty": 3, "extra_info": {"x": 1}}
    for write in (jsonl, parquet):
        (task,) = load_tasks(write(tmp_path, [row]), "train", keep=True)
        assert task.columns == {"question": "q", "answer": "#### 4", "difficulty": 3}
        assert task.extra_info == {"x": 1}
        assert load_tasks(write(tmp_path, [row]), "train")[0].columns == {}


def test_digest_of_rows_with_own_columns_is_that_of_earlier_versions(tmp_path: Path) -> None:
    extra = {"data_source": "a", "n": 1}
    chat = [{"role": "user", "content": "3+3?", "name": None}]
    rows: list[Any] = [
        {"prompt": "2+2?", "ground_truth": "4", "extra_info": extra, "other": 7},
        {"prompt": chat, "data_source": "x"},
    ]
    config = ExperimentConfig()
    tasks = load_tasks(jsonl(tmp_path, rows), "train")
    assert identity(config, tasks)["dataset_digest"] == "b332a20a"
    answer = {"role": "assistant", "content": "2"}
    rows = [
        {"prompt": "1", "completion": "2", "x": 1},
        {"messages": [{"role": "user", "content": "1"}, answer]},
    ]
    read = chats.load_rows(jsonl(tmp_path, rows), "train")
    assert chats.identity_of_rows(config, read)["dataset_digest"] == "6ce1f8c9"
    kept = [
        Task(task_id="t", prompt="p", ground_truth=None, extra_info={}, columns={"a": 1}),
        Task(task_id="t", prompt="p", ground_truth=None, extra_info={}, columns={"a": 2}),
    ]
    assert identity(config, kept[:1]) != identity(config, kept[1:])


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.csv", b"prompt,ground_truth\n1,2\n3\n", "line 3: not as many cells"),
        ("a.csv", b"prompt,ground_truth\n1,2,3\n", "line 2: not as many cells"),
        ("a.csv", b"prompt\n\xff\n", "not readable CSV: .* Save it as UTF-8"),
        ("a.csv", b"prompt\n", "has no rows"),
        ("a.json", b'[{"prompt": "a"}, 1]', "row 1: not a JSON object"),
        ("a.json", b'[{"prompt": "a"', "a.json: not a JSON array"),
        ("a.json", b'{"data": []}', "line 1: no column `prompt`, only data"),
        ("a.json", b"[]", "has no rows"),
    ],
)
def test_unreadable_file_is_refused(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=says):
        load_tasks(str(tmp_path / name), "train")


def test_folder_with_splits_gives_the_split_of_the_option(tmp_path: Path) -> None:
    for split, text in (("train", "a"), ("test", "b"), ("extra", "c")):
        saved(tmp_path / split, [{"prompt": text}]), (tmp_path / split / "saved")
        for file in [*(tmp_path / split / "saved").iterdir()]:
            file.rename(tmp_path / split / file.name)
    listing = tmp_path / "dataset_dict.json"
    listing.write_text('{"splits": ["train", "test", "extra"]}')
    assert [load_tasks(str(tmp_path), s)[0].prompt for s in ("train", "eval")] == ["a", "b"]
    assert load_tasks(str(tmp_path / "extra"), "train")[0].prompt == "c"
    listing.write_text('{"splits": ["test", "extra"]}')
    says = f"has the splits test, extra. Set dataset.train={tmp_path}/NAME"
    with pytest.raises(UserError, match=says):
        load_tasks(str(tmp_path), "train")


@pytest.mark.parametrize("file", ["state.json", "data-00001-of-00002.arrow"])
def test_folder_with_a_broken_file_is_refused(tmp_path: Path, file: str) -> None:
    folder = saved(tmp_path, [{"prompt": "a"}, {"prompt": "b"}])
    (Path(folder) / file).write_text("{}")
    with pytest.raises(UserError, match=r"saved is not a readable dataset: .*Save it again"):
        list(read_rows(folder, "train"))


@pytest.mark.parametrize("column", ["choices", "context"])
def test_question_whose_prompt_needs_another_column_is_not_recognised(
    tmp_path: Path, column: str
) -> None:
    path = jsonl(tmp_path, [{"question": "q", "answer": "a", column: "c"}])
    with pytest.raises(UserError, match=r"no column `prompt`.*dataset.columns.prompt=question"):
        load_tasks(path, "train")


def test_folder_without_a_dataset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a folder without a dataset of save_to_disk. Name a file"):
        load_tasks(str(tmp_path), "train")
    Path(saved(tmp_path, [{"prompt": "a"}])).joinpath("data-00001-of-00002.arrow").unlink()
    with pytest.raises(UserError, match=r"is not a readable dataset: .*Save it again"):
        load_tasks(str(tmp_path / "saved"), "train")


def hub(monkeypatch: pytest.MonkeyPatch, answer: Any) -> list[Any]:
    asked = list[Any]()

    def load_dataset(*args: Any) -> Any:
        asked.append(args)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return asked


@pytest.mark.parametrize(
    ("name", "split", "arguments", "prompt"),
    [
        ("openai/gsm8k", "train", ("openai/gsm8k", None), "a"),
        ("openai/gsm8k:main", "eval", ("openai/gsm8k", "main"), "b"),
        ("openai/gsm8k::test", "train", ("openai/gsm8k", None), "b"),
        ("o/v-1.5:main:test", "train", ("o/v-1.5", "main"), "b"),
    ],
)
def test_hub_id_is_loaded_by_the_datasets_library(
    monkeypatch: pytest.MonkeyPatch, name: str, split: str, arguments: Any, prompt: str
) -> None:
    asked = hub(monkeypatch, {"train": [{"prompt": "a"}], "test": [{"prompt": "b"}]})
    assert [task.prompt for task in load_tasks(name, split)] == [prompt]
    assert asked == [arguments]


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (ConnectionError("Couldn't reach\nthe Hub"), "it failed: Couldn't reach the Hub. Correct"),
        ({"a": [], "b": []}, "has the splits a, b. Set dataset.train=o/n::NAME"),
        (None, "datasets is not installed: pip install datasets"),
    ],
)
def test_unavailable_hub_id_is_refused_with_the_fix(
    monkeypatch: pytest.MonkeyPatch, answer: Any, says: str
) -> None:
    hub(monkeypatch, answer)
    if answer is None:
        monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError) as caught:
        load_tasks("o/n", "train")
    told = str(caught.value)
    assert says in told and "\n" not in told
    assert "download the dataset and name a file or a folder" in told


SAID = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
ASKED = {"role": "user", "content": "a"}
ANSWERED = {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    ("row", "expected", "form"),
    [
        (
            {"conversations": [{"from": "system", "value": "s"}, *SAID]},
            {"messages": [{"role": "system", "content": "s"}, ASKED, ANSWERED]},
            "ShareGPT rows: messages",
        ),
        (
            {"conversations": SAID[:1], "chosen": SAID[1], "rejected": [SAID[1]]},
            {"prompt": [ASKED], "chosen": [ANSWERED], "rejected": [ANSWERED]},
            "ShareGPT rows: prompt/chosen/rejected",
        ),
        (
            {"conversations": SAID[:1], "chosen": "b", "rejected": "c"},
            {"prompt": [ASKED]},
            "ShareGPT rows: prompt/chosen/rejected",
        ),
        ({"conversations": [ASKED]}, {"messages": [ASKED]}, "ShareGPT rows: messages"),
        (
            {"conversations": SAID, "system": "s"},
            {"messages": [{"role": "system", "content": "s"}, ASKED, ANSWERED]},
            "ShareGPT rows: messages",
        ),
        (
            {
                "conversations": [
                    SAID[0],
                    {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
                    {"from": "observation", "value": "r"},
                    {**SAID[1], "weight": 0},
                ]
            },
            {
                "messages": [
                    ASKED,
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [
                            {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
                        ],
                    },
                    {"role": "tool", "content": "r"},
                    {**ANSWERED, "weight": 0},
                ]
            },
            "ShareGPT rows: messages",
        ),
        ({"prompt": "a", "completion": "b"}, {}, "rows: prompt/completion"),
        ({"messages": [ASKED], "x": 1}, {}, "rows: messages"),
    ],
)
def test_chats_of_other_libraries_are_recognised(
    row: dict[str, Any], expected: dict[str, Any], form: str
) -> None:
    assert chat_row(row) == {**row, **expected}
    assert chat_form(chat_row(row)) == form


def test_dataset_columns_name_the_columns_of_a_chat(tmp_path: Path) -> None:
    path = parquet(tmp_path, [{"q": "1", "a": "2", "x": 3}])
    columns = {"prompt": "q", "completion": "a"}
    ((_, row),) = chats.load_rows(path, "train", columns=columns)
    assert {name: row[name] for name in columns} == {"prompt": "1", "completion": "2"}
    with pytest.raises(UserError, match=r"Unknown key of dataset.columns 'answer'"):
        chats.load_rows(path, "train", columns={"answer": "a"})
    with pytest.raises(
        UserError, match=r"no column `b` .dataset.columns.completion., only q, a, x"
    ):
        chats.load_rows(path, "train", columns={"completion": "b"})
