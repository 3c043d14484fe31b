"""The stand-ins that let SGLang start without a GPU, and the script's short ways out; a whole
installation is what `make test-sglang` needs and so tries."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "setup_sglang_cpu.sh"


def python(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a Python that has the stand-ins, and nothing that is installed."""
    command = [sys.executable, "-S", "-c", f"import sglang_cpu_stubs\n{code}"]
    return subprocess.run(
        command, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT / "tools")}
    )


def test_stand_ins_can_be_imported_named_and_subclassed():
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


def test_calling_a_stand_in_says_what_is_missing():
    done = python("import sgl_kernel; sgl_kernel.rmsnorm(1)")
    assert "RuntimeError: sgl_kernel.rmsnorm was called, but only a stand-in" in done.stderr


def test_the_rest_of_a_package_stays_missing_and_so_does_all_to_those_who_ask():
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


def test_a_finished_environment_is_left_as_it_is(tmp_path: Path):
    venv = tmp_path / "venv"
    program(venv / "bin/python", "exit 9")
    (venv / ".sglang-cpu").write_text("sglang==1.2 torch==3\n")
    done = setup(venv, SGLANG="1.2", TORCH="torch==3")
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert f"llm_server.sglang.python={venv}/bin/python llm_server.sglang.device=cpu" in last
    other = setup(venv, SGLANG="1.3", TORCH="torch==3")
    assert other.returncode != 0, "another version is not there"


def test_a_failing_pip_is_shown_with_its_last_lines(tmp_path: Path):
    venv = tmp_path / "venv"
    fails = 'case "$*" in *pip*) echo no such version; exit 1;; *"-W ignore"*) exit 1;; esac'
    program(venv / "bin/python", fails)
    done = setup(venv)
    assert done.returncode == 1
    assert "no such version" in done.stderr
    assert f"failed; its whole output is in {venv}/sglang-cpu.log" in done.stderr
    assert not (venv / ".sglang-cpu").exists()
