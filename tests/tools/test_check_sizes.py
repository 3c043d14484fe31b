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


def test_tuple_assignments_are_a_breach(root: Path) -> None:
    counts = Counts(tokens=10, lines=10, names=2, tuple_assignments=1)
    (breach,) = check_sizes.density({root / "arealite/x.py": counts})
    assert breach == "arealite: 100 tuple assignments per 1,000 lines, limit 3"
