"""A program that replaces `python -m sglang.launch_server`: a real process, without a model.

Its behaviour is read from a JSON file beside it at each request, so that a test can change
it. `Program(folder)` writes it; a test passes its path as `llm_server.sglang.python`.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from arealite.api.experiment_config import ModelConfig, ServerConfig
from arealite.api.llm_server import LLMServerConfig
from arealite.api.trial import ClusterConfig
from arealite.ext.sglang.config import SGLangServerConfig

OPTIONS = {field.name for field in dataclasses.fields(SGLangServerConfig)}

SOURCE = """#!{python} -S
import hmac, json, os, pathlib, signal, socketserver, subprocess, sys, threading, time
from http.server import BaseHTTPRequestHandler

FOLDER = pathlib.Path(__file__).parent
BEGIN = time.monotonic()


def orders():
    return json.loads((FOLDER / "orders.json").read_text())


boot = sys.argv[1] == "-c" and "launch_server" in sys.argv[2]
if sys.argv[1] == "-c" and not boot:
    if not orders()["sglang"]:
        sys.exit("it has no sglang")
    print(0 if sys.argv[4] == "cpu" else orders()["gpus"], "0.5.23")
    sys.exit()
words, token = sys.argv[3:], ""
if boot:
    key = bytes.fromhex(pathlib.Path(words.pop(0)).read_text())
    token = hmac.digest(key, b"http", "sha256").hex()
port = int(words[words.index("--port") + 1])
seed = words[words.index("--random-seed") + 1]
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
        if path in now["hangs"]:
            time.sleep(600)
        body = now["answers"].get(path)
        if seed in now["sick"]:
            body = None
        sent = self.headers.get("Authorization", "")
        known = path == "/health" or sent == ("Bearer " + token if token else "")
        self.send_response((503 if body is None else 200) if known else 401)
        self.end_headers()
        self.wfile.write(b"" if body is None else json.dumps(body).encode())


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True


signal.signal(signal.SIGTERM, on_term)
(FOLDER / f"started-{{seed}}.tmp").write_text(json.dumps(about))
(FOLDER / f"started-{{seed}}.tmp").replace(FOLDER / f"started-{{seed}}.json")
Server(("127.0.0.1", port), Handler).serve_forever()
"""


class Program:
    """The program in `folder`, and its orders."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "python"
        self.orders: dict[str, Any] = {
            "sglang": True,
            "gpus": 0,
            "says": "hello from the stand-in",
            "exits": {},
            "sick": [],
            "hangs": [],
            "grandchild": False,
            "ignores_term": False,
            "answers": {
                "/health": {},
                "/generate": {"output_ids": [3]},
                "/model_info": {"weight_version": "default", "model_path": "m"},
                "/v1/models": {"data": [{"id": "m", "max_model_len": 77}]},
                "/server_info": {"max_req_input_len": 71},
            },
        }
        self.load(0, 0)
        self.path.write_text(SOURCE.format(python=sys.executable))
        self.path.chmod(0o755)

    def load(self, running: int, waiting: int) -> None:
        """Set the reported load, as two data-parallel replicas report it."""
        room = {"max_running_requests": 16}
        first = {"num_running_reqs": running, "num_waiting_reqs": 0, **room}
        second = {"num_running_reqs": 0, "num_waiting_reqs": waiting, **room}
        self.configure(answers=self.orders["answers"] | {"/v1/loads": {"loads": [first, second]}})

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


def wrapper_config(
    program: Program,
    model: Path | str,
    *,
    dtype: str = "float32",
    heartbeat_s: float = 1.0,
    **server: Any,
) -> ServerConfig:
    """Return a config that runs `program`; options of type=sglang are set in their section."""
    own = {name: server.pop(name) for name in list(server) if name in OPTIONS}
    own = {"python": str(program.path), "device": "cpu"} | own
    return ServerConfig(
        trial_name="t",
        cluster=ClusterConfig(
            name_root=str(program.folder / "names"),
            run_root=str(program.folder / "runs"),
            user="u",
            heartbeat_s=heartbeat_s,
        ),
        model=ModelConfig(path=str(model), dtype=dtype),
        llm_server=LLMServerConfig(type="sglang", sglang=SGLangServerConfig(**own), **server),
    )
