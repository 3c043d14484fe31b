"""Programs that replace real server programs: real processes, without a model.

Their behaviour is read from a JSON file beside them at each request, so that a test can change it.
`sglang_program` and `vllm_program` have those of each kind; a test passes `Program(folder).path` as
option `python`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from arealite.api.experiment_config import ModelConfig, ServerConfig
from arealite.api.llm_server import LLMServerConfig, servers
from arealite.api.trial import ClusterConfig
from arealite.ext.server_processes import server_group, server_process
from arealite.impl.launcher.processes import take_ports
from arealite.system.names.name_registry import Entry, NameRegistry
from tests.waiting import eventually

PORTS = itertools.count(10_000 + os.getpid() % 900 * 10, 5)
"""Below the ephemeral range."""

SOURCE = """#!{python} -S
import hmac, json, os, pathlib, signal, socketserver, subprocess, sys, threading, time
from http.server import BaseHTTPRequestHandler

FOLDER = pathlib.Path(__file__).parent
BEGIN = time.monotonic()


def orders():
    return json.loads((FOLDER / "orders.json").read_text())


def derived_token(path):
    key = bytes.fromhex(pathlib.Path(path).read_text())
    return hmac.digest(key, b"http", "sha256").hex()


if sys.argv[1] == "-c" and "find_spec" in sys.argv[2]:
    if not orders()["installed"]:
        sys.exit("it has no " + sys.argv[3])
    print(0 if sys.argv[4] == "cpu" else orders()["gpus"], orders()["version"])
    sys.exit()
{start}
about = {{"arguments": words, "environment": dict(os.environ), "pids": [os.getpid()]}}
if orders()["grandchild"]:
    stay = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    about["pids"].append(subprocess.Popen([sys.executable, "-S", "-c", stay]).pid)
print(orders()["says"], flush=True)
if seed in orders()["exits"]:
    sys.exit(orders()["exits"][seed])


def on_term(*_):
    with (FOLDER / f"term-{{seed}}").open("a") as file:
        file.write("x")
    if not orders()["ignores_term"]:
        os._exit(0)


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def do_GET(self):
        path, now = self.path.partition("?")[0], orders()
        if now["closes"]:
            self.server.shutdown()
        if path in now["hangs"]:
            time.sleep(600)
        body = now["answers"].get(path)
        if seed in now["sick"]:
            body = None
        sent = self.headers.get("Authorization", "")
        known = path == "/health" or sent == ("Bearer " + token if token else "")
        self.send_response((503 if body is None else 200) if known else 401)
        self.end_headers()
        text = body if isinstance(body, str) else json.dumps(body)
        self.wfile.write(b"" if body is None else text.encode())


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True


signal.signal(signal.SIGTERM, on_term)
(FOLDER / f"started-{{seed}}.tmp").write_text(json.dumps(about))
(FOLDER / f"started-{{seed}}.tmp").replace(FOLDER / f"started-{{seed}}.json")
server = Server(("127.0.0.1", port), Handler)
server.serve_forever()  # until a request finds the order "closes"
server.server_close()
time.sleep(600)
"""


class FakeProgram:
    """The program in `folder`, and its orders."""

    start: ClassVar[str]
    """Code that sets `words`, the arguments, `port`, `seed`, a text, and `token`."""
    version: ClassVar[str]
    answers: ClassVar[dict[str, Any]]
    """JSON or text by path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "python"
        self.orders: dict[str, Any] = {
            "installed": True,
            "version": self.version,
            "gpus": 0,
            "says": "hello from the stand-in",
            "exits": {},
            "sick": [],
            "hangs": [],
            "closes": False,
            "grandchild": False,
            "ignores_term": False,
            "answers": {"/health": {}} | self.answers,
        }
        self.load(0, 0)
        self.path.write_text(SOURCE.format(python=sys.executable, start=self.start))
        self.path.chmod(0o755)

    def load(self, running: int, waiting: int) -> None:
        """Set the reported load, as two data-parallel replicas report it."""
        raise NotImplementedError

    def answer(self, path: str, body: Any) -> None:
        """Change one answer from the next request on."""
        self.configure(answers=self.orders["answers"] | {path: body})

    def configure(self, **orders: Any) -> None:
        """Change the behaviour from the next request or start on."""
        self.orders |= orders
        temporary = self.folder / "orders.tmp"
        temporary.write_text(json.dumps(self.orders))
        temporary.replace(self.folder / "orders.json")

    def started(self, seed: int = 1) -> dict[str, Any]:
        """Return the arguments of the newest start of the server with that seed."""
        return json.loads((self.folder / f"started-{seed}.json").read_text())

    def terms(self, seed: int = 1) -> int:
        """Return the number of SIGTERMs that the program received."""
        file = self.folder / f"term-{seed}"
        return len(file.read_text()) if file.exists() else 0


def program_config(
    program: FakeProgram,
    model: Path | str,
    *,
    dtype: str = "float32",
    heartbeat_s: float = 1.0,
    server: LLMServerConfig,
) -> ServerConfig:
    """Return a config of a trial in the program's folder."""
    return ServerConfig(
        trial_name="t",
        cluster=ClusterConfig(
            name_root=str(program.folder / "names"),
            run_root=str(program.folder / "runs"),
            user="u",
            heartbeat_s=heartbeat_s,
        ),
        model=ModelConfig(path=str(model), dtype=dtype),
        llm_server=server,
    )


def make_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten restart delays, lengthen answer deadlines, and use ports no other process gets."""
    monkeypatch.setattr(server_process, "PAUSES_S", (0.1, 0.2, 0.4))
    monkeypatch.setattr(server_process, "TERMINATE_S", 60.0)
    monkeypatch.setattr(server_process, "LOAD_S", 60.0)
    for module in (server_group, server_process):
        monkeypatch.setattr(module, "take_ports", take_own_ports)


def take_own_ports(host: str, port: int, count: int) -> list[int]:
    """Like `take_ports`, but choose ports outside the ephemeral range."""
    while True:
        try:
            return take_ports(host, port or next(PORTS), count)
        except OSError:
            if port:
                raise


def names(config: ServerConfig) -> list[Entry]:
    return NameRegistry.of(config, ttl_s=600.0).list("llm_server")


@asynccontextmanager
async def serving(config: ServerConfig, count: int = 1) -> AsyncIterator[asyncio.Task[None]]:
    """Run the wrapper in this loop; yield when `count` servers have a name."""
    task = asyncio.ensure_future(servers.get(config.llm_server.type)(config).serve())
    try:
        await eventually(lambda: task.done() or len(names(config)) == count, "names")
        if task.done():
            task.result()
        yield task
    finally:
        task.cancel()
        await asyncio.wait((task,))
        assert not names(config)
