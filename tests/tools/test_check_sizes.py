"""A module, a function or a folder above its limit is a breach that names both."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import check_sizes, code_tokens
from tools.code_tokens import Counts


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(check_sizes, "ROOT", tmp_path)
    monkeypatch.setattr(check_sizes, "PACKAGE", tmp_path / "arealite")
    (tmp_path / "arealite/api").mkdir(parents=True)
    return tmp_path


def test_long_function_and_module_are_named(root: Path) -> None:
    file = root / "arealite/big.py"
    body = "    size = 1\n" * 166  # 3 tokens a line
    file.write_text(f"def work():\n{body}")
    assert check_sizes.module(file) == ["arealite/big.py:1: work: 503 tokens, limit 500"]
    file.write_text("size = 1\n" * 1134)
    assert check_sizes.module(file) == ["arealite/big.py: 3402 tokens, limit 3400"]


def test_files_of_api_have_a_smaller_limit(root: Path) -> None:
    file = root / "arealite/api/big.py"
    file.write_text("size = 1\n" * 434)
    assert check_sizes.module(file) == ["arealite/api/big.py: 1302 tokens, limit 1300"]


def test_train_must_fit_on_a_screen(root: Path) -> None:
    file = root / "arealite/impl/trainer/ppo.py"
    file.parent.mkdir(parents=True)
    file.write_text("def train():\n" + "    step()\n" * 45)
    assert check_sizes.module(file) == ["arealite/impl/trainer/ppo.py:1: train: 46 lines, limit 45"]


def test_dense_folder_and_fillers_are_named(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense = code_tokens.count("size = [1, 2, 3, 4]\n")
    vague = code_tokens.count("what = 1\n")
    files = {root / "arealite/a/x.py": dense, root / "arealite/b/y.py": vague}
    assert check_sizes.density(files) == [
        "arealite/a: 11 tokens per line, limit 8.5",
        "arealite: 50 % filler names, limit 1",
    ]
    assert "11       11.0          0.0 %   arealite/a" in capsys.readouterr().out


def test_size_of_each_extension_is_printed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counts = {
        root / "arealite/impl/x.py": Counts(tokens=check_sizes.CORE_TOKENS + 1),
        root / "arealite/ext/math/env.py": Counts(tokens=3),
        root / "arealite/ext/math/deep/x.py": Counts(tokens=4),
        root / "arealite/ext/__init__.py": Counts(tokens=1),
    }
    limit = check_sizes.CORE_TOKENS
    (breach,) = check_sizes.totals(counts)
    assert breach == f"the core of arealite: {limit + 1:g} tokens, limit {limit:g}"
    assert "the extensions have 8 tokens: ext 1, math 7\n" in capsys.readouterr().out


def test_repeated_names_of_classes_and_modules_are_named(root: Path) -> None:
    sources = {
        "a/reader.py": "class Row:\n    pass\n",
        "b/reader.py": "Row = dict[str, int]\nLIMITS = [1][0]\n",
        "b/config.py": "class Other:\n    class Row:\n        pass\n",
        "config.py": "class Unique:\n    pass\nLIMITS = [1][0]\n",
    }
    files = [root / "arealite" / name for name in sources]
    for file, source in zip(files, sources.values(), strict=True):
        file.parent.mkdir(exist_ok=True)
        file.write_text(source)
    assert check_sizes.repeated_names(files) == [
        "class Row: 3 times, limit 1: "
        "arealite/a/reader.py:1, arealite/b/reader.py:1, arealite/b/config.py:2",
        "module reader: 2 times, limit 1: arealite/a/reader.py, arealite/b/reader.py",
    ]


def test_tuple_assignments_are_a_breach(root: Path) -> None:
    counts = Counts(tokens=10, lines=10, names=2, tuple_assignments=1)
    (breach,) = check_sizes.density({root / "arealite/x.py": counts})
    assert breach == "arealite: 100 tuple assignments per 1,000 lines, limit 3"
