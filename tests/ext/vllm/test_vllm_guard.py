"""The guard and the gate of a vLLM server, called as ASGI applications."""

from __future__ import annotations

import hmac
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import arealite_vllm_guard
import pytest
from arealite_vllm_guard import MAX_BODY, Guard, read_token

from arealite.system.names.name_registry import create_secret

INSIDE = Path(arealite_vllm_guard.__file__).parent
Headers = dict[str, str]


class FakeEngine:
    """vLLM's engine client: whether it is paused, and the states of its workers."""

    def __init__(self) -> None:
        self.paused = False
        self.obstacles = ["", ""]

    async def is_paused(self) -> bool:
        return self.paused

    async def collective_rpc(self, method: str) -> list[dict[str, str]]:
        assert method == "arealite_state"
        return [{"obstacle": obstacle} for obstacle in self.obstacles]


class Server:
    """An application behind a guard."""

    def __init__(self, token: str) -> None:
        self.guard = Guard(self.application, token)
        self.engine = FakeEngine()
        self.calls = list[str]()
        self.last_error = ""

    async def application(self, scope: Any, receive: Any, send: Any) -> None:
        self.calls.append(scope["type"])
        if scope["type"] != "http":
            return
        message = await receive()
        while message.get("more_body"):
            message = await receive()
        status = 499 if message["type"] == "http.disconnect" else 200
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def request(
        self,
        path: str,
        headers: Headers | None = None,
        *,
        method: str = "POST",
        kind: str = "http",
        parts: list[bytes] | None = None,
    ) -> int:
        """Send one request; return the status, or the code that closes a WebSocket."""
        scope: dict[str, Any] = {
            "type": kind,
            "path": path,
            "headers": [
                (name.lower().encode(), value.encode())
                for name, value in ({"Host": "localhost:1"} | (headers or {})).items()
            ],
            "app": SimpleNamespace(state=SimpleNamespace(engine_client=self.engine)),
        }
        if kind == "http":
            scope["method"] = method
        waiting = parts or [b""]
        answers = list[dict[str, Any]]()

        async def receive() -> dict[str, Any]:
            body = waiting.pop(0)
            return {"type": "http.request", "body": body, "more_body": bool(waiting)}

        async def send(message: dict[str, Any]) -> None:
            answers.append(message)

        await self.guard(scope, receive, send)
        if not answers:
            return 0
        first = answers[0]
        if first["type"] == "websocket.close":
            return first["code"]
        body = json.loads(answers[1]["body"])
        self.last_error = body.get("error", {}).get("message", "")
        if first["status"] != 200 and self.last_error:
            assert body["error"]["code"] == first["status"]
        return first["status"]


@pytest.fixture
def locked() -> Server:
    return Server("s3cret")


@pytest.fixture
def unlocked() -> Server:
    return Server("")


BEARER = {"Authorization": "Bearer s3cret"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (BEARER, 200),
        ({}, 401),
        ({"Authorization": "Bearer s3cre"}, 401),
        ({"Authorization": "Bearer s3crets"}, 401),
        ({"Authorization": "Bearer \u00e9"}, 401),
        ({"Authorization": "Basic s3cret"}, 401),
        (BEARER | {"Origin": "http://evil.example"}, 403),
        (BEARER | {"Origin": "null"}, 403),
        (BEARER | {"Host": "gpu-7.example"}, 200),
        (BEARER | {"Content-Length": str(MAX_BODY)}, 200),
        (BEARER | {"Content-Length": str(MAX_BODY + 1)}, 413),
        (BEARER | {"Content-Length": "-1"}, 413),
    ],
)
async def test_request_needs_token_and_is_not_of_a_page(
    locked: Server, headers: Headers, status: int
) -> None:
    assert await locked.request("/pause", headers) == status
    assert locked.calls == (["http"] if status == 200 else [])


@pytest.mark.parametrize("path", ["/health/", "//health", "/v1/models", "/metrics", "/docs", "/"])
@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "OPTIONS"])
async def test_every_other_path_needs_token(locked: Server, path: str, method: str) -> None:
    assert await locked.request(path, method=method) == 401
    assert locked.last_error == "the bearer token is missing, or is not this server's"


async def test_only_get_health_needs_no_token(locked: Server) -> None:
    assert await locked.request("/health", method="GET") == 200
    assert await locked.request("/health", method="POST") == 401


async def test_web_socket_without_token_is_closed(locked: Server) -> None:
    assert await locked.request("/v1/realtime", kind="websocket") == 1008
    assert await locked.request("/health", kind="websocket") == 1008
    assert locked.calls == []
    await locked.request("/v1/realtime", BEARER, kind="websocket")
    assert locked.calls == ["websocket"]


async def test_start_of_the_server_passes_the_guard(locked: Server) -> None:
    await locked.request("", kind="lifespan")
    assert locked.calls == ["lifespan"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "127.0.0.1:80"}, 200),
        ({"Host": "[::1]:80"}, 200),
        ({"Host": socket.gethostname()}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": ""}, 403),
        ({"Host": "[::1"}, 403),
        ({"Host": "\u00e9"}, 403),
        ({"Origin": "http://localhost"}, 403),
    ],
)
async def test_server_without_token_refuses_pages_only(
    unlocked: Server, headers: Headers, status: int
) -> None:
    assert await unlocked.request("/pause", headers) == status


async def test_body_without_length_ends_at_the_limit(locked: Server) -> None:
    half = bytes(MAX_BODY // 2)
    assert await locked.request("/pause", BEARER, parts=[half, half]) == 200
    assert await locked.request("/pause", BEARER, parts=[half, half, b"1"]) == 499


@pytest.mark.parametrize("path", ["/resume", "/wake_up"])
async def test_server_with_incomplete_weights_is_not_resumed(unlocked: Server, path: str) -> None:
    unlocked.engine.obstacles = ["", "a weight update is not finished"]
    assert await unlocked.request(path) == 409
    assert unlocked.last_error == "a weight update is not finished"
    unlocked.engine.obstacles = ["", ""]
    assert await unlocked.request(path) == 200


@pytest.mark.parametrize("path", ["/start_weight_update", "/start_draft_weight_update"])
async def test_update_needs_a_pause(unlocked: Server, path: str) -> None:
    assert await unlocked.request(path) == 409
    assert unlocked.last_error == "pause the server before a weight update"
    unlocked.engine.paused = True
    assert await unlocked.request(path) == 200


def test_token_is_that_of_the_trial(tmp_path: Path) -> None:
    secret = create_secret(tmp_path)
    assert read_token(str(tmp_path / "secret")) == secret.token
    assert read_token("") == ""


def no_file(path: Path) -> None:
    path.unlink()


def readable_by_others(path: Path) -> None:
    path.chmod(0o644)


def too_short(path: Path) -> None:
    path.write_text("ab" * 31)


def not_ascii(path: Path) -> None:
    path.write_bytes(b"\xff" * 64)


def link(path: Path) -> None:
    path.rename(path.with_name("other"))
    path.symlink_to("other")


@pytest.mark.parametrize("spoil", [no_file, readable_by_others, too_short, not_ascii, link])
def test_import_ends_with_one_line_if_secret_is_unusable(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    create_secret(tmp_path)
    path = tmp_path / "secret"
    spoil(path)
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import arealite_vllm_guard"],
        env={"PYTHONPATH": str(INSIDE), "AREALITE_SECRET_FILE": str(path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"AREALITE_SECRET_FILE={path} ")


def test_guard_reads_the_file_of_the_environment(tmp_path: Path) -> None:
    token = create_secret(tmp_path).token
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import arealite_vllm_guard as g; print(g.Guard(1)._token)"],
        env={"PYTHONPATH": str(INSIDE), "AREALITE_SECRET_FILE": str(tmp_path / "secret")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(token.encode())
    key = bytes.fromhex((tmp_path / "secret").read_text().strip())
    assert token == hmac.digest(key, b"http", "sha256").hex()
    assert os.environ.get("AREALITE_SECRET_FILE") is None


def test_modules_import_nothing_that_the_server_lacks() -> None:
    """The Python of the server has vllm, and not AReaLite."""
    allowed = {*sys.stdlib_module_names, "torch", "safetensors", "starlette", "vllm"}
    files = sorted(INSIDE.glob("*.py"))
    allowed |= {file.stem for file in files}
    assert all(file.stem.startswith("arealite_vllm_") for file in files)
    for file in files:
        for name in re.findall(r"^\s*(?:from|import) (\w+)", file.read_text(), re.MULTILINE):
            assert name in allowed, f"{file.name} imports {name}"
