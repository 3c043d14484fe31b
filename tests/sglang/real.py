"""A real SGLang server on this machine's CPU, for tests marked `sglang`.

The server starts without our wrapper, so that the protocol is tested independently. The Python
that has sglang is `.venv-sglang/bin/python` (made by tools/setup_sglang_cpu.sh), or $SGLANG_PYTHON.
"""

from __future__ import annotations

import os
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from arealite.impl.launcher.processes import free_port
from tests.waiting import until, until_exited

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("SGLANG_PYTHON", str(ROOT / ".venv-sglang" / "bin" / "python"))
START_S = 400.0
"""Time limit for work of 20 s on an idle machine; see tests/waiting.py."""
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
ARGUMENTS = [
    "--device=cpu",
    "--dtype=float32",
    "--attention-backend=torch_native",
    "--sampling-backend=pytorch",
    "--grammar-backend=none",
    "--max-total-tokens=65536",
    "--max-running-requests=128",
    "--disable-cuda-graph",
    "--disable-overlap-schedule",
    "--skip-server-warmup",
]


@dataclass
class Real:
    """A running server."""

    address: str
    process: subprocess.Popen[bytes]
    log: Path

    def stop(self) -> None:
        """Terminate the process group; wait until it has exited."""
        for number, seconds in ((signal.SIGTERM, 8.0), (signal.SIGKILL, 10.0)):
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)

    def kill(self) -> None:
        """Kill the process group; return when the server has exited."""
        os.killpg(self.process.pid, signal.SIGKILL)
        until_exited(self.process.pid)

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])


def answers(address: str) -> bool:
    """Return whether the server is healthy."""
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5) as response:
            return response.status == 200
    except OSError:
        return False


@contextmanager
def real_sglang(
    model: Path | str, folder: Path, *extra: str, context: int = 512, port: int | None = None
) -> Iterator[Real]:
    """Run a server of `model` (log in `folder`) until the body ends; leave no process."""
    port = port or free_port()
    command = [PYTHON, "-m", "sglang.launch_server", "--model-path", str(model), *ARGUMENTS]
    command += ["--context-length", str(context), "--host", "127.0.0.1", "--port", str(port)]
    log = folder / f"sglang-{port}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *extra],
            stdout=output,
            stderr=output,
            env=os.environ | ENVIRONMENT,
            start_new_session=True,
        )
    server = Real(f"http://127.0.0.1:{port}", process, log)
    try:
        ready = lambda: process.poll() is not None or answers(server.address)  # noqa: E731
        until(ready, what="a healthy SGLang server", seconds=START_S)
        assert process.poll() is None, server.tail()
        yield server
    finally:
        server.stop()
