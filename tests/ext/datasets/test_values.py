"""Values of every type become plain values, which are equal in every process, or are refused.

docs/data.md says what each type becomes. The test reads its table, so the page cannot be wrong.
"""

from __future__ import annotations

import enum
import json
import re
import uuid
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path, PurePosixPath
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet as parquet_files

from arealite.api.env import Env, EnvConfig, envs
from arealite.api.task import Task
from arealite.base.errors import UserError
from arealite.ext.notebook.objects import data_path
from arealite.system.data.dataset import load_tasks, read_rows
from arealite.system.data.tasks import generate

DOCS = Path(__file__).parents[3] / "docs/data.md"
REFUSED, NO_TRUTH = "refused", "no ground truth"


class Level(enum.StrEnum):
    EASY = "a"


class Size(enum.Enum):
    BIG = "a"


NOON = datetime(2024, 5, 1, 12, 30)
BERLIN = NOON.replace(tzinfo=timezone(timedelta(hours=2)))
UUID5 = uuid.UUID(int=5)

ARROW: dict[str, list[Any]] = {
    "text, categorical, enum, path": [
        pa.array(["a"]),
        pa.array(["a"], pa.large_string()),
        pa.array(["a"], pa.string_view()),
        pa.array(["a"]).dictionary_encode(),
    ],
    "bool": [pa.array([True])],
    "integer of at most 64 bits": [pa.array([2**64 - 1], pa.uint64())],
    "float64": [pa.array([72.0])],
    "float32, float16: the shortest number that rounds to it": [
        pa.array([0.1], pa.float32()),
        pa.array([np.float16(0.1)], pa.float16()),
        pa.array([0.1], pa.float32()).dictionary_encode(),
    ],
    "decimal: a text with all its digits": [
        pa.array([Decimal("1.50")], kind)
        for kind in (
            pa.decimal32(4, 2),
            pa.decimal64(4, 2),
            pa.decimal128(4, 2),
            pa.decimal256(4, 2),
        )
    ],
    "date": [pa.array([date(2024, 5, 1)], kind) for kind in (pa.date32(), pa.date64())],
    "time": [
        pa.array([time(12, 30)], kind)
        for kind in (pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns"))
    ],
    "timestamp without a zone": [
        pa.array([NOON], pa.timestamp(unit)) for unit in ("s", "ms", "us", "ns")
    ],
    "timestamp with a zone": [
        pa.array(
            [NOON.replace(tzinfo=ZoneInfo("Europe/Berlin"))], pa.timestamp("us", "Europe/Berlin")
        ),
        pa.array([BERLIN], pa.timestamp("ns", "+02:00")),
    ],
    "duration: seconds": [
        pa.array([timedelta(seconds=90.5)], pa.duration(unit)) for unit in ("ms", "us", "ns")
    ],
    "binary, fixed-size binary, bytes: text in UTF-8": [
        pa.array(["é".encode()]),
        pa.array(["é".encode()], pa.large_binary()),
        pa.array(["é".encode()], pa.binary(2)),
    ],
    "UUID": [pa.array([UUID5.bytes], pa.uuid())],
    "list, tuple, array, tensor": [
        pa.array([["a", None]], kind)
        for kind in (
            pa.list_(pa.string()),
            pa.large_list(pa.string()),
            pa.list_(pa.string(), 2),
        )
    ],
    "struct, dict": [pa.array([{"a": Decimal("1.50")}])],
    "map: its keys become texts": [
        pa.array([[(1, 0.1)]], pa.map_(pa.int32(), pa.float32())),
        pa.array([[("1", 0.1)]], pa.map_(pa.string(), pa.float64())),
    ],
    "null, NaN, pandas' NA and NaT": [
        pa.nulls(1),
        pa.array([None], pa.float32()),
        pa.array([None], pa.map_(pa.string(), pa.int8())),
        pa.array([float("nan")]),
        pa.array([float("nan")], pa.float32()),
    ],
    "infinity": [pa.array([float("inf")]), pa.array([float("-inf")], pa.float32())],
    "timestamp or duration with nanoseconds": [
        pa.array([1], pa.timestamp("ns")),
        pa.array([1], pa.timestamp("ns", "UTC")),
        pa.array([1], pa.duration("ns")),
    ],
    "binary that is not UTF-8": [pa.array([b"\xff"]), pa.array([b"\xff"], pa.binary(1))],
}
"""Columns of one value by the first cell of the table."""

PYTHON: dict[str, list[Any]] = {
    "text, categorical, enum, path": ["a", np.str_("a"), Level.EASY, Size.BIG, PurePosixPath("a")],
    "bool": [True, np.True_, torch.tensor(True)],
    "integer of at most 64 bits": [2**64 - 1, np.uint64(2**64 - 1)],
    "float64": [72.0, np.float64(72), np.array(72.0), torch.tensor(72.0)],
    "float32, float16: the shortest number that rounds to it": [
        np.float32(0.1),
        np.float16(0.1),
        torch.tensor(0.1),
    ],
    "decimal: a text with all its digits": [Decimal("1.50")],
    "date": [date(2024, 5, 1)],
    "time": [time(12, 30)],
    "timestamp without a zone": [NOON],
    "timestamp with a zone": [BERLIN],
    "duration: seconds": [timedelta(seconds=90.5), np.timedelta64(90500, "ms")],
    "binary, fixed-size binary, bytes: text in UTF-8": ["é".encode(), bytearray("é".encode())],
    "UUID": [UUID5],
    "list, tuple, array, tensor": [["a", None], ("a", None), np.array(["a", None], object)],
    "struct, dict": [{"a": Decimal("1.50")}],
    "map: its keys become texts": [{1: np.float32(0.1)}, {np.int64(1): 0.1}],
    "null, NaN, pandas' NA and NaT": [None, float("nan"), np.float32("nan"), Decimal("nan")],
    "infinity": [float("inf"), np.float32("-inf"), Decimal("inf"), np.array([1, np.inf])],
    "integer of more than 64 bits": [2**64, -(2**63) - 1],
    "binary that is not UTF-8": [b"\xff"],
    "set, complex number, other object": [
        {1},
        1j,
        object(),
        np.datetime64("2024-05-01"),
        {None: 1},
    ],
}
"""Values in memory by the first cell of the table."""


def table() -> dict[str, tuple[str, str]]:
    """Return the last two cells of each line of docs/data.md's table of types, by the first."""
    section = DOCS.read_text().partition("## Types of columns")[2].partition("\n## ")[0]
    lines = re.findall(r"^\| (.*) \| (.*) \| (.*) \|$", section, re.M)
    return {name: (value.strip("`"), truth.strip("`")) for name, value, truth in lines[1:]}


def rows_around(column: pa.Array) -> pa.Table:
    """Return rows with a value as a column, in a list, and in `extra_info`."""
    in_list = pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), column)
    extra_info = pa.StructArray.from_arrays([column, in_list], ["inner", "list"])
    columns = {"prompt": pa.array(["q"]), "x": column, "list": in_list, "extra_info": extra_info}
    return pa.table(columns)


def parquet(rows: pa.Table, folder: Path) -> str:
    parquet_files.write_table(rows, folder / "rows.parquet")
    return str(folder / "rows.parquet")


def saved(rows: pa.Table, folder: Path) -> str:
    """Write the files of `save_to_disk`."""
    with pa.ipc.new_stream(folder / "data.arrow", rows.schema) as out:
        out.write_table(rows)
    state = {"_data_files": [{"filename": "data.arrow"}], "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    return str(folder)


def in_memory(rows: Any, folder: Path) -> str:
    return data_path(rows, folder, "dataset.train")


def check(name: str, path: Callable[[], str]) -> None:
    """Compare a row around a value with the line of the table; also after a trip to a process."""
    value, truth = table()[name]
    if value == REFUSED:
        with pytest.raises(UserError, match=r"row 0: column `.*` has .*\. [A-Z].*\.$") as caught:
            load_tasks(path(), "train", {"ground_truth": "x"}, keep=True)
        assert "\n" not in str(caught.value)
        return
    (task,) = load_tasks(path(), "train", {"ground_truth": "x"}, keep=True)
    expected = json.loads(value)
    # repr tells 1 from 1.0 and from True
    assert repr(task.columns) == repr({"x": expected, "list": [expected]})
    assert repr(task.extra_info) == repr({"inner": expected, "list": [expected]})
    assert task.ground_truth == (None if truth == NO_TRUTH else truth)
    for wire in (msgspec.msgpack, msgspec.json):
        assert repr(wire.decode(wire.encode(task), type=Task)) == repr(task)


@pytest.mark.parametrize("write", [parquet, saved, in_memory])
@pytest.mark.parametrize(("name", "column"), [(n, each) for n in ARROW for each in ARROW[n]])
def test_column_of_arrow_becomes_what_the_docs_say(
    tmp_path: Path, name: str, column: pa.Array, write: Any
) -> None:
    check(name, lambda: write(rows_around(column), tmp_path))


@pytest.mark.parametrize(("name", "value"), [(n, each) for n in PYTHON for each in PYTHON[n]])
def test_value_in_memory_becomes_what_the_docs_say(tmp_path: Path, name: str, value: Any) -> None:
    inner = {"inner": value, "list": [value]}
    row = {"prompt": "q", "x": value, "list": [value], "extra_info": inner}
    check(name, lambda: in_memory([row], tmp_path))


def test_every_type_of_the_docs_is_tested() -> None:
    assert {*ARROW, *PYTHON} == {*table()}


def installed(module: str) -> Any:
    return pytest.importorskip(
        module, reason="pandas, polars, datasets are not installed: make test-extras"
    )


def frames() -> dict[str, tuple[Any, str, str | None]]:
    """Return one-column DataFrames with the expected value and ground truth."""
    pandas = installed("pandas")
    polars = installed("polars")
    two = {
        "category": (pandas.Categorical(["a"]), '"a"', "a"),
        "float32": (np.array([0.1], "float32"), "0.1", "0.1"),
        "NA": (pandas.array([None], "Int64"), "null", None),
        "Int64": (pandas.array([2**62 + 1], "Int64"), str(2**62 + 1), str(2**62 + 1)),
        "NaT": (pandas.to_datetime([None]), "null", None),
        "NaN": (pandas.array([None], "str"), "null", None),
        "timestamp": (pandas.to_datetime([NOON]), f'"{NOON.isoformat()}"', NOON.isoformat()),
        "zone": (pandas.to_datetime([BERLIN]), f'"{BERLIN.isoformat()}"', BERLIN.isoformat()),
        "timedelta": (pandas.to_timedelta([90.5], unit="s"), "90.5", "90.5"),
        "object": (pandas.array([Decimal("1.50")], object), '"1.50"', "1.50"),
    }
    made = {
        f"pandas {name}": (pandas.DataFrame({"prompt": ["q"], "x": column}), value, truth)
        for name, (column, value, truth) in two.items()
    }
    for name, series, value, truth in [
        ("decimal", polars.Series([Decimal("1.50")]), '"1.50"', "1.50"),
        ("float32", polars.Series([0.1], dtype=polars.Float32), "0.1", "0.1"),
        ("enum", polars.Series(["a"], dtype=polars.Enum(["a"])), '"a"', "a"),
        ("time", polars.Series([time(12, 30)]), '"12:30:00"', "12:30:00"),
    ]:
        frame = polars.DataFrame({"prompt": ["q"], "x": series})
        made[f"polars {name}"] = frame, value, truth
    return made


def test_columns_of_dataframes_become_what_the_docs_say(tmp_path: Path) -> None:
    for name, (frame, value, truth) in frames().items():
        path = in_memory(frame, tmp_path / name)
        (task,) = load_tasks(path, "train", {"ground_truth": "x"}, keep=True)
        assert repr(task.columns["x"]) == repr(json.loads(value)), name
        assert task.ground_truth == truth, name


def test_nanoseconds_of_pandas_are_refused(tmp_path: Path) -> None:
    pandas = installed("pandas")
    frame = pandas.DataFrame({"prompt": ["q"], "x": [pandas.Timestamp(1)]})
    with pytest.raises(
        UserError, match=r"row 0: column `x` has the type Timestamp: .* nanoseconds"
    ):
        in_memory(frame, tmp_path)


def test_dataset_of_the_datasets_library_becomes_what_the_docs_say(tmp_path: Path) -> None:
    datasets = installed("datasets")
    columns = {"prompt": ["p", "q"], "x": [0.2, 0.1], "date": [date(2024, 5, 1)] * 2}
    rows = datasets.Dataset.from_dict(columns).cast_column("x", datasets.Value("float32"))
    (task,) = load_tasks(in_memory(rows.select([1]), tmp_path), "train", keep=True)
    assert (task.prompt, task.columns) == ("q", {"x": 0.1, "date": "2024-05-01"})


# ---------------------------------------------------------------- JSON and CSV


def test_values_of_json_are_read_as_they_are(tmp_path: Path) -> None:
    row = {"prompt": "q", "n": 2**64 - 1, "x": 72.0, "t": True, "z": None, "d": {"a": [1, "é"]}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    (tmp_path / "rows.json").write_text(json.dumps([row]))
    for name in ("rows.jsonl", "rows.json"):
        ((_, read),) = read_rows(str(tmp_path / name), "train")
        assert repr(read) == repr(row)


def test_values_of_csv_are_texts(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("prompt,n,x,t,z\nq,1,72.0,true,\n")
    ((_, row),) = read_rows(str(tmp_path / "rows.csv"), "train")
    assert row == {"prompt": "q", "n": "1", "x": "72.0", "t": "true", "z": ""}


def test_large_integer_of_json_is_refused_by_column(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "q", "extra_info": {"n": [2**64]}}))
    with pytest.raises(UserError) as caught:
        load_tasks(str(file), "train")
    expected = f"{file}, line 1: column `extra_info.n[0]` has the type int: {2**64} has more than"
    assert str(caught.value).startswith(expected)
    assert str(caught.value).endswith("Write it as a text.")


CONTENT = {
    "rows.jsonl": '{"prompt": "é"}\n{"prompt": "b"}\n',
    "rows.json": '[{"prompt": "é"}, {"prompt": "b"}]',
    "rows.csv": "prompt\né\nb\n",
}


@pytest.mark.parametrize("name", CONTENT)
def test_byte_order_mark_of_utf_8_is_skipped(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(CONTENT[name], encoding="utf-8-sig")
    assert [task.prompt for task in load_tasks(str(tmp_path / name), "train")] == ["é", "b"]


def test_byte_order_marks_of_concatenated_files_are_skipped(tmp_path: Path) -> None:
    lines = '{"prompt": "a"}\n'.encode("utf-8-sig") * 2
    (tmp_path / "rows.jsonl").write_bytes(lines)
    (tmp_path / "rows.json").write_bytes(lines)
    for name in ("rows.jsonl", "rows.json"):
        assert len(load_tasks(str(tmp_path / name), "train")) == 2


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("name", CONTENT)
def test_utf_16_is_refused_with_the_fix(tmp_path: Path, name: str, encoding: str) -> None:
    file = tmp_path / name
    file.write_text(CONTENT[name], encoding=encoding)
    with pytest.raises(UserError) as caught:
        load_tasks(str(file), "train")
    expected = f"{file} is in UTF-16 or UTF-32, and must be in UTF-8. Convert it: iconv"
    assert str(caught.value).startswith(expected)


# ---------------------------------------------------------------- other sources


def test_generated_rows_have_plain_values(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dated(Env):
        @classmethod
        def rows(cls, config: object, *, split: str, seed: int) -> Any:
            yield {"prompt": "q", "extra_info": {"x": np.float32(0.1), "day": date(2024, 5, 1)}}
            yield {"prompt": "q", "extra_info": {"x": float("inf")}}

    monkeypatch.setattr(envs, "get", lambda name: Dated)
    tasks = generate(EnvConfig(type="math"), "train", 0)
    assert next(tasks).extra_info == {"x": 0.1, "day": "2024-05-01"}
    with pytest.raises(UserError, match=r"row 1 made by .*: column `extra_info\.x` has the type"):
        next(tasks)


def test_binary_prompt_is_read_as_text(tmp_path: Path) -> None:
    """Some writers of Parquet do not mark texts as texts."""
    rows = pa.table({"prompt": [b"q"], "ground_truth": [b"1"]})
    (task,) = load_tasks(parquet(rows, tmp_path), "train")
    assert (task.prompt, task.ground_truth) == ("q", "1")


def test_table_with_equal_names_in_a_struct_is_refused(tmp_path: Path) -> None:
    column = pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], ["a", "a"])
    with pytest.raises(UserError, match=r"train, row 0: column `x` has the type struct"):
        in_memory(pa.table({"prompt": ["q"], "x": column}), tmp_path)
