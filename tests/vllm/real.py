"""A real vLLM server on this machine's CPU, for tests marked `vllm`.

The Python that has vllm is `.venv-vllm/bin/python` (made by tools/setup_vllm_cpu.sh), or
$VLLM_PYTHON. The server loads the modules of arealite/ext/vllm/inside.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from arealite.impl.launcher.processes import free_port
from tests.models import tiny_model
from tests.sglang.real import Real, answers
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("VLLM_PYTHON", str(ROOT / ".venv-vllm" / "bin" / "python"))
INSIDE = ROOT / "arealite" / "ext" / "vllm" / "inside"
START_S = 600.0
"""Time limit for work of 40 s on an idle machine; see tests/waiting.py."""
MODEL_NAME = "policy"
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # else vLLM has no routes for weights and pauses
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "PYTHONPATH": str(INSIDE),
}
ARGUMENTS = [
    "--host=127.0.0.1",
    f"--served-model-name={MODEL_NAME}",
    "--dtype=float32",
    "--max-model-len=512",
    "--enforce-eager",
    "--enable-scale-out",
    "--api-server-count=1",
    "--logprobs-mode=processed_logprobs",
    "--generation-config=vllm",
    "--middleware=arealite_vllm_guard.Guard",
    "--worker-extension-cls=arealite_vllm_weights.Extension",
    '--weight-transfer-config={"backend": "arealite"}',
]


HELD = Path(__file__).parent / "held"
"""Folder of the module that stops updates and generations inside vLLM."""


def hold_environment(hold_folder: Path, import_folder: Path) -> dict[str, str]:
    """Return the variables with which vLLM waits while `hold_folder` has a file; see HELD."""
    return {
        "AREALITE_TEST_HOLD_FOLDER": str(hold_folder),
        "PYTHONPATH": f"{HELD}{os.pathsep}{import_folder}",
    }


@contextmanager
def generations_held(hold_folder: Path) -> Iterator[None]:
    """Let the generations of a vLLM server wait while the body runs."""
    hold_file = hold_folder / "generate"
    hold_file.touch()
    try:
        yield
    finally:
        hold_file.unlink()


def vllm_model(path: Path, *, seed: int = 0, **overrides: object) -> Path:
    """Write a tiny model (see tests.models) with heads of 32 numbers, which vLLM has on CPUs."""
    return tiny_model(path, seed=seed, hidden_size=128, **overrides)


@contextmanager
def real_vllm(
    model: Path,
    folder: Path,
    *extra: str,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Real]:
    """Run a server of `model` (log and caches in `folder`) until the body ends."""
    port = free_port()
    log = folder / f"vllm-{port}.log"
    command = [PYTHON, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    caches = {name: str(folder / "vllm") for name in ("VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT")}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *ARGUMENTS, f"--port={port}", *extra],
            stdout=output,
            stderr=output,
            env=os.environ | ENVIRONMENT | caches | (environment or {}),
            start_new_session=True,
        )
    server = Real(f"http://127.0.0.1:{port}", process, log)
    try:
        ready = lambda: process.poll() is not None or answers(server.address)  # noqa: E731
        until(ready, what="a healthy vLLM server", seconds=START_S)
        assert process.poll() is None, server.tail()
        yield server
    finally:
        server.stop()
