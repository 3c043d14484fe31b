"""Rows become tasks; an error names file, row and fix."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from arealite.base.errors import UserError
from arealite.system.data.dataset import load_tasks

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]


def jsonl(path: Path, rows: list[Any]) -> str:
    file = path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    import pyarrow
    import pyarrow.parquet

    file = path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return str(file)


@pytest.mark.parametrize("write", [jsonl, parquet])
def test_rows_become_tasks_in_order(tmp_path, write):
    rows = [
        {"prompt": "2+2?", "ground_truth": "4", "extra_info": {"source": "a", "n": 1}, "other": 7},
        {"prompt": "3+3?", "ground_truth": None, "extra_info": None, "other": 8},
    ]
    first, second = load_tasks(write(tmp_path, rows), "train")
    assert (first.task_id, first.prompt, first.ground_truth) == ("train-0", "2+2?", "4")
    assert first.extra_info == {"source": "a", "n": 1}
    assert (second.task_id, second.ground_truth, second.extra_info) == ("train-1", None, {})


@pytest.mark.parametrize("write", [jsonl, parquet])
def test_prompt_may_be_messages_and_optional_columns_may_be_absent(tmp_path, write):
    (task,) = load_tasks(write(tmp_path, [{"prompt": CHAT}]), "eval")
    assert task.prompt == CHAT
    assert task.task_id == "eval-0"
    assert task.ground_truth is None
    assert task.extra_info == {}


def test_blank_lines_and_crlf_are_skipped(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"prompt": "a"}\r\n\n{"prompt": "\xc3\xa9"}\n\n')
    assert [(task.task_id, task.prompt) for task in load_tasks(str(file), "train")] == [
        ("train-0", "a"),
        ("train-1", "é"),
    ]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": ""}, "`prompt` must be a text that is not empty"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}]},
            "Images are not supported: write the content as one text",
        ),
        ({"prompt": []}, "`prompt` must be"),
        ({"prompt": 3}, "`prompt` must be"),
        ({"prompt": [{"role": "user"}]}, "`prompt` must be"),
        ({"prompt": [{"role": "user", "content": None}]}, "`prompt` must be"),
        ({"prompt": "a", "ground_truth": 42}, 'Write it as "42"'),
        ({"prompt": "a", "extra_info": "x"}, "`extra_info` is str"),
        ({"promt": "a"}, "Did you mean 'promt'? Rename it"),
        ({"question": "a"}, "no column `prompt`, only question. Did you mean"),
        ({}, "no column `prompt`, only none."),
        ([1], "not a JSON object"),
    ],
)
def test_bad_jsonl_row_is_refused_with_its_line(tmp_path, row, says):
    path = jsonl(tmp_path, [{"prompt": "fine"}, row])
    with pytest.raises(UserError) as caught:
        load_tasks(path, "train")
    message = str(caught.value)
    assert f"{path}, line 2" in message
    assert says in message
    assert "\n" not in message


@pytest.mark.parametrize("line", [b'{"prompt": "a"', b'{"prompt": "\xff"}', b"prompt"])
def test_line_that_is_not_json_is_refused(tmp_path, line):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(line)
    with pytest.raises(UserError, match=r"line 1: not a JSON object"):
        load_tasks(str(file), "train")


def test_bad_parquet_is_refused(tmp_path):
    with pytest.raises(UserError, match="row 1: `prompt` must be"):
        load_tasks(parquet(tmp_path, [{"prompt": "a"}, {"prompt": None}]), "train")
    with pytest.raises(UserError, match="Did you mean 'prompts'"):
        load_tasks(parquet(tmp_path, [{"prompts": "a"}]), "train")
    with pytest.raises(UserError, match="row 0: `ground_truth` is int"):
        load_tasks(parquet(tmp_path, [{"prompt": "a", "ground_truth": 4}]), "train")
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1 no")
    with pytest.raises(UserError, match="not readable Parquet"):
        load_tasks(str(broken), "train")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("", r"Set dataset\.train="),
        ("absent.jsonl", "does not exist"),
        ("rows.jsn", r"Unknown dataset suffix '\.jsn'\. Did you mean '\.json'"),
        ("rows", "Unknown dataset suffix ''"),
    ],
)
def test_unusable_file_is_refused(tmp_path, name, says):
    (tmp_path / "rows.jsn").write_text("{}")
    with pytest.raises(UserError, match=says):
        load_tasks(str(tmp_path / name) if name else "", "train")


@pytest.mark.parametrize("write", [jsonl, parquet])
def test_file_without_rows_is_refused(tmp_path, write):
    if write is jsonl:
        path = jsonl(tmp_path, [])
    else:
        import pyarrow
        import pyarrow.parquet

        path = str(tmp_path / "rows.parquet")
        empty = pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())})
        pyarrow.parquet.write_table(empty, path)
    with pytest.raises(UserError, match="has no rows"):
        load_tasks(path, "train")


def test_ten_thousand_rows_load_quickly(tmp_path):
    path = jsonl(tmp_path, [{"prompt": f"{n}+1?", "ground_truth": str(n)} for n in range(10_000)])
    took_s = list[float]()
    for _ in range(5):
        begin = time.thread_time()  # CPU time, independent of the load of the machine
        assert len(load_tasks(path, "train")) == 10_000
        took_s.append(time.thread_time() - begin)
    # Steal time may count as CPU time, but not in five attempts.
    assert min(took_s) < 2.0, "it takes 0.02 s"


def test_reading_jsonl_imports_no_heavy_module(tmp_path):
    path = jsonl(tmp_path, [{"prompt": "a"}])
    code = (
        "import sys; from arealite.system.data.dataset import load_tasks; "
        f"load_tasks({path!r}, 'train'); "
        "sys.exit(bool({'torch', 'transformers', 'pyarrow'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=240).returncode == 0
