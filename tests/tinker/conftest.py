"""A service as its user starts it, and clients in the SDK's virtual environment."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.models import tiny_model
from tests.smollm2 import smollm2

HERE = Path(__file__).parent
HUB_NAME = "Qwen/Qwen3-4B-Instruct-2507"
"""A name that the recipes know; the service has a tiny random model under it."""
STOP_S = 60.0


def sdk_python() -> str:
    """Return the interpreter that has the SDK (`make test-tinker` sets it)."""
    return os.environ.get("TINKER_PYTHON", ".venv-tinker/bin/python")


@dataclass(kw_only=True)
class RunningService:
    """A running `arealite serve-tinker`."""

    address: str
    key: str = field(repr=False)
    folder: Path
    """Folder of its trial and of its checkpoints."""
    process: subprocess.Popen[str]
    environment: dict[str, str] = field(default_factory=dict[str, str])

    def run(self, *words: str, timeout_s: float = 300.0) -> str:
        """Run a program of the SDK's environment as a client; return what it prints."""
        environment = {
            **os.environ,
            **self.environment,
            "TINKER_BASE_URL": self.address,
            "TINKER_API_KEY": self.key,
            "TINKER_TELEMETRY": "0",
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(
            [sdk_python(), *words],
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
        return done.stdout

    def client(self, name: str, *words: str) -> Any:
        """Run a script of clients/; return the JSON of its last line."""
        return json.loads(self.run(str(HERE / "clients" / f"{name}.py"), *words).splitlines()[-1])


StartService = Callable[..., Any]


@contextmanager
def serving(
    model: Path, folder: Path, *words: str, name: str = "org/tiny"
) -> Iterator[RunningService]:
    """Start a service on a model; end it by SIGTERM."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    trial = f"tinker-{folder.name}"[:60]
    options = [
        f"cluster.name_root={folder}/names",
        f"cluster.run_root={folder}/runs",
        f"trial_name={trial}",
    ]
    command = [
        sys.executable,
        "-m",
        "arealite.cli.main",
        "serve-tinker",
        f"model.path={model}",
        f"tinker.base_model={name}",
        "tinker.port=0",
        *options,
        *words,
    ]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline().strip() for _ in range(2)]
            assert lines[0].startswith("export TINKER_BASE_URL="), lines
            key_file = re.search(r"\$\(cat (.*)\)", lines[1])
            yield RunningService(
                address=lines[0].partition("=")[2],
                key=Path(key_file[1]).read_text() if key_file else "",
                folder=folder,
                process=process,
            )
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                assert process.wait(STOP_S) == 0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"), init_std=0.1)


@pytest.fixture(scope="module")
def service(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningService]:
    """A service on a tiny random model."""
    with serving(tiny, tmp_path_factory.mktemp("service")) as running:
        yield running


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningService]:
    """A service on a tiny random model with SmolLM2's tokenizer, and a cache of the Hub."""
    folder = tmp_path_factory.mktemp("recipes")
    source = smollm2()
    model = tiny_model(folder / "model", vocab=49152, init_std=0.02, max_position_embeddings=4096)
    for file in source.iterdir():
        if file.suffix in (".json", ".txt", ".jinja") and file.name != "config.json":
            (model / file.name).write_bytes(file.read_bytes())
    cache = folder / "cache"
    subprocess.run(
        [sdk_python(), str(HERE / "hub_cache.py"), str(cache), str(source), HUB_NAME], check=True
    )
    with serving(model, folder / "trial", name=HUB_NAME) as running:
        running.environment = {"HF_HOME": str(cache), "HF_HUB_OFFLINE": "1"}
        yield running
