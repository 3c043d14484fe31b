"""Objects travel to other processes by import path or by file, or are refused with the fix."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pyarrow
import pytest

from arealite.api.agent import agents
from arealite.api.env import envs
from arealite.base.errors import UserError
from arealite.ext.math.env import MathEnv
from arealite.ext.notebook.objects import data_path, import_path, registered, reward_options
from tests.ext.notebook import things

HERE = "tests.ext.notebook.things"


# ---------------------------------------------------------------- code


@pytest.mark.parametrize(
    ("value", "path"),
    [(things.length, f"{HERE}:length"), (things.Length, f"{HERE}:Length")],
)
def test_object_at_top_level_of_a_module_has_a_path(value: Any, path: str) -> None:
    assert import_path(value, "reward") == path


@pytest.mark.parametrize(
    "value",
    [
        things.shout,
        things.inner(),
        things.partial,
        things.Length(None),
        things.Length(None).method,
        things.Length.method,
        things.kept,  # its name is another function now
        len.__call__,
        3,
    ],
)
def test_object_that_no_process_can_import_is_refused_with_the_fix(value: Any) -> None:
    with pytest.raises(UserError, match=r"%%writefile my_reward\.py.*reward='my_reward\.py:NAME'"):
        import_path(value, "reward")


def main_module(monkeypatch: pytest.MonkeyPatch, **names: object) -> Any:
    """Replace the main module by one with a function `score`; return the function."""
    main = ModuleType("__main__")
    exec("def score(completion, ground_truth): return 0.0", vars(main))
    vars(main).update(names)
    monkeypatch.setitem(sys.modules, "__main__", main)
    return vars(main)["score"]


def test_function_of_the_main_script_has_the_path_of_its_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").touch()
    monkeypatch.chdir(tmp_path)
    score = main_module(monkeypatch, __file__="mine.py")
    assert import_path(score, "reward") == f"{tmp_path}/mine.py:score"


def test_function_of_a_module_run_by_name_has_that_name(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SimpleNamespace(name="package.mine")
    score = main_module(monkeypatch, __file__=__file__, __spec__=spec)
    assert import_path(score, "reward") == "package.mine:score"


@pytest.mark.parametrize("file", [None, "/nowhere/mine.py", "/tmp/notebook.ipynb"])
def test_function_of_a_notebook_is_refused(
    monkeypatch: pytest.MonkeyPatch, file: str | None
) -> None:
    score = main_module(monkeypatch, **({"__file__": file} if file else {}))
    with pytest.raises(UserError, match="notebook"):
        import_path(score, "reward")


def test_registered_part_is_passed_by_name_with_its_module() -> None:
    assert registered("math", envs) == ("math", [])
    assert registered(MathEnv, envs) == ("math", []), "built in: no import is needed"
    assert registered(things.Letters, envs) == ("python_letters", [HERE])
    assert registered(things.Quiet, agents) == ("python_agent", [HERE])


def test_part_that_is_not_registered_is_refused_with_the_fix() -> None:
    with pytest.raises(UserError, match=r"Unregistered is not registered. Write @arealite\.envs"):
        registered(things.Unregistered, envs)
    with pytest.raises(UserError, match="Did you mean 'math'"):
        registered("maths", envs)
    with pytest.raises(UserError, match="env=3 is not registered"):
        registered(3, envs)


@pytest.mark.parametrize(
    ("reward", "paths", "weights"),
    [
        (things.length, [f"{HERE}:length"], []),
        ("my_reward.py:score", ["my_reward.py:score"], []),
        ([things.length, "other:f"], [f"{HERE}:length", "other:f"], []),
        ({things.length: 1, things.Length: 0.5}, [f"{HERE}:length", f"{HERE}:Length"], [1, 0.5]),
    ],
)
def test_reward_becomes_paths_and_weights(reward: Any, paths: Any, weights: Any) -> None:
    expected = {"type": "function", "function": {"paths": paths, "weights": weights}}
    assert reward_options(reward) == expected


def test_reward_without_a_colon_is_a_registered_name() -> None:
    assert reward_options("exact_match") == {"type": "exact_match"}


# ---------------------------------------------------------------- rows


class Frame:
    """Has the methods of a pandas.DataFrame that are used; iteration gives names of columns."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows
        self.columns = [*rows[0]]

    def __iter__(self) -> Any:
        return iter(self.rows[0])

    def iterrows(self) -> Any:
        raise NotImplementedError

    def items(self) -> Any:
        for name in self.columns:
            yield name, SimpleNamespace(array=[row[name] for row in self.rows])


class Dataset:
    """Has the methods of a datasets.Dataset that are used."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.to_list = lambda: rows

    def with_format(self, name: str) -> Any:
        assert name == "arrow"
        return pyarrow.Table.from_pylist(self.to_list())


@pytest.mark.parametrize("kind", [list, tuple, iter, Frame, Dataset])
def test_rows_in_memory_are_written_once(kind: Any, tmp_path: Path) -> None:
    path = data_path(kind(things.ROWS), tmp_path / "new", "dataset.train")
    assert [json.loads(line) for line in Path(path).read_text().splitlines()] == things.ROWS
    before = Path(path).stat().st_mtime_ns
    assert data_path(things.ROWS, tmp_path / "new", "dataset.eval") == path, "the same content"
    assert Path(path).stat().st_mtime_ns == before
    assert data_path(things.ROWS[1:], tmp_path / "new", "dataset.train") != path
    assert len([*(tmp_path / "new").iterdir()]) == 2


def test_values_of_numpy_and_paths_are_converted(tmp_path: Path) -> None:
    row = {"prompt": "a", "extra_info": {"n": np.int64(3), "x": np.arange(2), "file": tmp_path}}
    path = data_path([row | {"y": np.float32(0.5), "gone": float("nan")}], tmp_path, "dataset")
    extra = {"n": 3, "x": [0, 1], "file": str(tmp_path)}
    expected = {"prompt": "a", "extra_info": extra, "y": 0.5, "gone": None}
    assert json.loads(Path(path).read_text()) == expected


@pytest.mark.parametrize("path", ["generated", "rows.parquet", Path("rows.csv")])
def test_path_of_a_dataset_is_unchanged(path: Any, tmp_path: Path) -> None:
    assert data_path(path, tmp_path, "dataset.train") == str(path)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "dataset.train has no rows"),
        (["a"], "row 0 is no dict of JSON values"),
        (
            [{"prompt": "a"}, {"prompt": object()}],
            "row 1: column `prompt` has the type object: no form in JSON",
        ),
        ({"train": [{"prompt": "a"}]}, r"one split, as in data\['train'\]"),
        (5, "row 0 is no dict of JSON values"),
    ],
)
def test_rows_that_are_no_rows_are_refused(rows: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        data_path(rows, tmp_path, "dataset.train")
    assert not [*tmp_path.iterdir()]
