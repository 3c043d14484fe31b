"""`arealite info` shows versions of installed packages and install commands of missing ones."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from arealite import __version__
from arealite.cli import main as cli
from arealite.ext.machine import info


def table(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, str]:
    assert cli.main(["info", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    return {line[2:18].rstrip(): line[19:] for line in lines if line.startswith("  ")}


def test_info_lists_versions_and_imports_no_heavy_module() -> None:
    code = (
        "import sys; from arealite.cli.main import main; main(['info']); "
        "heavy = ('torch', 'transformers', 'aiohttp', 'zmq', 'ray'); "
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[-1] == "[]"
    titles = [line for line in lines[:-1] if not line.startswith(" ")]
    assert titles == ["versions", "devices", "back ends", "extras", "sandbox"]


def test_missing_packages_are_shown_with_their_install_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    there = metadata.version
    gone = {"peft", "sglang", "vllm", "ray"}

    def version(name: str) -> str:
        if name in gone:
            raise metadata.PackageNotFoundError(name)
        return there(name)

    monkeypatch.setattr(metadata, "version", version)
    shown = table(capsys)
    assert shown["arealite"] == __version__
    assert shown["transformers"] == there("transformers")
    for server in ("sglang", "vllm"):
        assert shown[server].startswith(
            f"missing: pip install -e '.[{server}]', or set llm_server.{server}.python=PATH"
        )
    assert shown["slurm"] == "missing: apt-get install slurm-wlm"
    assert shown["bubblewrap"] == "missing: apt-get install bubblewrap"
    assert shown["lora"] == "missing peft: pip install -e '.[lora]'"
    assert shown["CPU cores"] == str(os.cpu_count())
    assert "fsdp" in shown["train_engine"] and "embedded" in shown["llm_server"]


def test_info_shows_the_output_of_external_tools(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(info, "ANSWER_S", 120.0)
    said = {
        "sinfo": "echo no configuration >&2; exit 1",
        "nvidia-smi": "echo 'NVIDIA H100, 81559 MiB, 570.1'; echo 'NVIDIA H100, 81559 MiB, 570.1'",
        "python-with-sglang": "echo 0.5.9",
        "python-with-vllm": "echo 0.32.0",
    }
    for name, words in said.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{words}\n")
        (tmp_path / name).chmod(0o755)
    python = tmp_path / "python-with-sglang"
    vllm_python = tmp_path / "python-with-vllm"
    shown = table(
        capsys, f"llm_server.sglang.python={python}", f"llm_server.vllm.python={vllm_python}"
    )
    assert shown["slurm"] == "installed, but `sinfo --version` fails"
    assert shown["GPU 1"].startswith("NVIDIA H100, 81559 MiB, 570.1")
    assert shown["sglang"] == f"0.5.9 ({python})"
    assert shown["vllm"] == f"0.32.0 ({vllm_python})"


def test_cuda_version_of_torch_is_read_without_importing_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError('a broken driver')")
    version = tmp_path / "torch" / "version.py"
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    version.write_text("cuda: Optional[str] = '12.8'\n")
    assert info.cuda() == "12.8"
    version.write_text("cuda: Optional[str] = None\n")
    assert info.cuda() == ""
