"""Rules of all examples: short, listed in the table, and documented."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from arealite.cli import main
from tests.examples.conftest import EXAMPLES
from tests.ext.web.browser.sites import LACKING
from tests.models import tiny_model

LOOPS = {"rl_loop": 100, "async_loop": 40}
"""Examples without options, with their maximum number of lines."""
FILES = sorted(EXAMPLES.glob("[a-z]*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_example_is_short_and_documented(file: Path, tmp_path: Path) -> None:
    assert len(file.read_text().splitlines()) <= LOOPS.get(file.stem, 100)
    assert file.stem not in sys.stdlib_module_names, "it would hide that module"
    assert f"[`{file.stem}`]({file.name})" in (EXAMPLES / "README.md").read_text()
    assert f"python3 examples/{file.name}\n" in file.read_text(), "how it is run on a laptop"
    command = [sys.executable, str(file), "--help"]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert shown.returncode == 0 and not list(tmp_path.iterdir())
    if file.stem in LOOPS:
        return
    assert "Watch" in shown.stdout or file.stem == "quickstart"
    assert "\n    trainer." in shown.stdout and "train.py --help" in shown.stdout


@pytest.mark.examples
@pytest.mark.parametrize("file", [f for f in FILES if f.stem not in LOOPS], ids=lambda f: f.stem)
def test_options_for_a_real_model_pass_preflight(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if file.stem == "browser" and LACKING:
        pytest.skip(f"needs {', '.join(LACKING)}")
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.chdir(tmp_path)
    options = runpy.run_path(str(file))["OPTIONS"]
    row = {"prompt": "a", "completion": "b", "chosen": "b", "rejected": "c", "ground_truth": "b"}
    Path("rows.jsonl").write_text(json.dumps(row))
    model = tiny_model("model", max_position_embeddings=8192)
    own = [f"model.path={model}", "cluster.name_root=names", "--dry-run"]
    if file.stem.startswith("external_"):
        own += ["llm_server.addresses=[]", "launcher.llm_servers=1"]  # no server is running
    if not any(word.startswith("dataset.train=") or ".envs." in word for word in options):
        own.append("dataset.train=rows.jsonl")
    assert main.run("arealite.cli.train", [*options, *own]) == 0


def test_invalid_argument_of_an_example_is_a_one_line_error(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "grpo_math.py"), "model.path=nowhere"]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert shown.returncode == 2
    assert shown.stderr.startswith("error: ") and shown.stderr.count("\n") == 1
