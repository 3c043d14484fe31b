"""The stub modules that let SGLang start without a GPU, and early exits of the script;
`make test-sglang` tests a complete installation."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools import try_sglang

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "setup_sglang_cpu.sh"


def python(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a Python with the stub modules and without installed packages."""
    command = [sys.executable, "-S", "-c", f"import sglang_cpu_stubs\n{code}"]
    return subprocess.run(
        command, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT / "tools")}
    )


def test_stub_modules_can_be_imported_and_subclassed():
    done = python(
        """
from __future__ import annotations
import sgl_kernel, torchvision.transforms.v2.functional as f
from sgl_kernel.kvcacheio import transfer
from torchvision.transforms import InterpolationMode
class Mine(f.Resize): size: f.Other | None
assert not isinstance(3, InterpolationMode)
assert InterpolationMode.BICUBIC.__name__ == "torchvision.transforms.InterpolationMode.BICUBIC"
assert not hasattr(sgl_kernel, "__version__") and not hasattr(f.Resize, "__wrapped__")
""".replace("from __future__ import annotations\n", "")
    )
    assert done.returncode == 0, done.stderr


def test_calling_a_stub_raises_an_error_with_its_name():
    done = python("import sgl_kernel; sgl_kernel.rmsnorm(1)")
    assert "RuntimeError: sgl_kernel.rmsnorm was called, but only a stand-in" in done.stderr


def test_stubs_are_hidden_from_find_spec_and_other_submodules_stay_missing():
    done = python("""
import importlib.util
assert importlib.util.find_spec("torchvision") is None
assert importlib.util.find_spec("sgl_kernel") is None
assert importlib.util.find_spec("json") is not None
try:
    import sgl_kernel.quantization
except ModuleNotFoundError:
    print("missing")
""")
    assert done.stdout == "missing\n", done.stderr


def test_transformers_image_class_is_patched_to_need_no_torchvision(tmp_path: Path):
    """SGLang imports the class in this way; requirements of other classes stay unchanged."""
    package = tmp_path / "transformers" / "utils"
    package.mkdir(parents=True)
    (package / "import_utils.py").write_text(
        "BASE_FILE_REQUIREMENTS = {lambda name, content: 'image_' in name: ('torchvision',)}\n"
    )
    done = python(f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from transformers.utils.import_utils import BASE_FILE_REQUIREMENTS as known
def first(name):
    return next(needs for is_it, needs in known.items() if is_it(name, "TorchvisionBackend"))
assert first("image_processing_auto.py") == first("image_processing_auto") == ("vision",)
assert first("image_processing_clip.py") == ("torchvision",)
""")
    assert done.returncode == 0, done.stderr


def test_unknown_transformers_version_is_not_patched(tmp_path: Path):
    package = tmp_path / "transformers" / "utils"
    package.mkdir(parents=True)
    (package / "import_utils.py").write_text("MEANS = 'another way'\n")
    done = python(f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import transformers.utils.import_utils as module
assert [name for name in vars(module) if name.isupper()] == ["MEANS"]
""")
    assert done.returncode == 0, done.stderr


def setup(venv: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT), str(venv)],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", **environment},
    )


def program(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return file


def test_finished_environment_is_not_changed(tmp_path: Path):
    venv = tmp_path / "venv"
    program(venv / "bin/python", "exit 9")
    (venv / ".sglang-cpu").write_text("sglang==0.5.9 torch==3\n")
    done = setup(venv, SGLANG="0.5.9", TORCH="torch==3")
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert f"llm_server.sglang.python={venv}/bin/python llm_server.sglang.device=cpu" in last
    other = setup(venv, SGLANG="0.5.16", TORCH="torch==3")
    assert other.returncode != 0, "another version is not there"


def test_failed_pip_shows_its_last_lines(tmp_path: Path):
    venv = tmp_path / "venv"
    fails = 'case "$*" in *pip*) echo no such version; exit 1;; *"-W ignore"*) exit 1;; esac'
    program(venv / "bin/python", fails)
    done = setup(venv)
    assert done.returncode == 1
    assert "no such version" in done.stderr
    assert f"failed; its whole output is in {venv}/sglang-cpu.log" in done.stderr
    assert not (venv / ".sglang-cpu").exists()


@pytest.mark.parametrize("version", ["0.5.8", "0.5.24", "0.5.1", "0.5.12.post"])
def test_untested_version_is_refused_before_the_download(tmp_path: Path, version: str):
    done = setup(tmp_path / "venv", SGLANG=version, PYTHON="/bin/false")
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: SGLANG={version} ") and done.stderr.count("\n") == 1
    assert " 0.5.9 " in done.stderr and "0.5.23" in done.stderr
    assert not (tmp_path / "venv").exists()
    asked = setup(tmp_path / "venv", SGLANG=version, PYTHON="/bin/false", SGLANG_UNTRIED="1")
    assert "never tried" not in asked.stderr and asked.returncode == 1


def test_accepted_versions_are_those_of_the_docs():
    """tools/try_sglang.py produced the table in docs/servers.md."""
    table = (ROOT / "docs" / "servers.md").read_text()
    rows = re.findall(r"^\| (0\.5\.\d+(?:\.post\d)?) \|", table, re.MULTILINE)
    assert rows == try_sglang.accepted()
