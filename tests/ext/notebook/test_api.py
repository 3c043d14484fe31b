"""The public names of `import arealite`: fast to import, and known to editors."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import arealite

ROOT = Path(arealite.__file__).parent


def test_import_loads_no_other_package() -> None:
    code = "import sys; before = {*sys.modules}; import arealite; print(*{*sys.modules} - before)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT.parent, capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert loaded - sys.stdlib_module_names == {"arealite"}


@pytest.mark.parametrize("name", sorted({*arealite.__all__} - {"make"}))
def test_public_name_exists_and_is_listed(name: str) -> None:
    assert getattr(arealite, name) is not None
    assert name in dir(arealite)


def test_stub_has_exactly_the_public_names() -> None:
    stub = ast.parse((ROOT / "__init__.pyi").read_text())
    homes = {
        alias.asname: (node.module or "").removeprefix("arealite.")
        for node in ast.walk(stub)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    }
    assert homes == arealite._HOMES


def test_unknown_name_raises_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = arealite.trian  # pyright: ignore
