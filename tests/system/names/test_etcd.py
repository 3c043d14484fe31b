"""What an etcd must be to be used, and what is said where it is not; see also tests/clusters."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from arealite.api.config import ClusterConfig, ServerConfig
from arealite.base.errors import RoleError, UserError
from arealite.system.names import etcd as name_etcd
from arealite.system.names.registry import NameRegistry
from tests.e2e.conftest import ENVIRONMENT


def names_in(addresses: str) -> NameRegistry:
    cluster = ClusterConfig(name_store="etcd", etcd=addresses, user="u")
    return NameRegistry.of(ServerConfig(cluster=cluster))


class Answers(BaseHTTPRequestHandler):
    """Gives the same answer to all."""

    given: tuple[int, Any] = (200, {})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        body = json.dumps(self.given[1]).encode()
        self.send_response(self.given[0])
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def answering() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    "given",
    [
        (503, {"error": "no leader", "code": 14}),
        (200, {"error": {"message": "no leader"}}),  # how a stream says it
        (404, "no leader"),
    ],
)
def test_who_answers_with_an_error_is_away(
    answering: str, monkeypatch: pytest.MonkeyPatch, given: tuple[int, Any]
) -> None:
    monkeypatch.setattr(name_etcd, "ANSWER_S", 60.0)
    names = names_in(answering)
    monkeypatch.setattr(Answers, "given", (200, {"ID": "1", "result": {"TTL": "5"}}))
    names.put("llm_server", "a", {})
    assert names.list("llm_server") == []
    monkeypatch.setattr(Answers, "given", given)
    with pytest.raises(RoleError, match=f"no etcd answers .* {answering}: .*no leader"):
        names.put("llm_server", "a", {})
    assert names.list("llm_server") == []
    names.remove("llm_server", "a")
    with pytest.raises(UserError, match="no leader"):
        names.check()


@pytest.mark.parametrize("command", ["train.py", "arealite/launch_llm_server.py"])
def test_an_etcd_that_is_not_there_is_one_line(tmp_path: Path, command: str) -> None:
    root = Path(__file__).resolve().parents[3]
    words = ["cluster.name_store=etcd", "cluster.etcd=127.0.0.1:9", f"cluster.name_root={tmp_path}"]
    done = subprocess.run(
        [sys.executable, str(root / command), *words, f"cluster.run_root={tmp_path}"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr == (
        "error: cluster.etcd=127.0.0.1:9: no etcd answers as one (3.4 or newer) would: 127.0.0.1:9:"
        " [Errno 111] Connection refused. Start it, correct cluster.etcd, or use "
        "cluster.name_store=file.\n"
    )


@pytest.mark.parametrize("addresses", ["", "here", "http://10.0.0.7:2379", "a:1,,b:2"])
def test_what_is_no_address_is_refused(addresses: str) -> None:
    with pytest.raises(UserError, match="host:port"):
        names_in(addresses)


def test_who_says_nothing_is_no_etcd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(name_etcd, "ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as other:
        names = names_in(f"127.0.0.1:{other.getsockname()[1]}")
        with pytest.raises(UserError, match="timed out"):
            names.check()
