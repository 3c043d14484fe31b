"""One real SGLang server for all tests of a session, reset between them.

A start takes 20 seconds and a reset 0.1.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.models import tiny_model
from tests.sglang.real import Real, real_sglang
from tests.waiting import until

Answer = tuple[int, Any]


def call(
    address: str,
    path: str,
    body: dict[str, Any] | None = None,
    *,
    seconds: float = 30.0,
    token: str = "",
) -> Answer:
    """GET, or POST a JSON body; return (status, decoded answer, text if it is no JSON)."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    request = urllib.request.Request(f"{address}{path}", data=data, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=seconds) as response:
            status, raw = response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            status, raw = error.code, error.read()
    try:
        return status, json.loads(raw or b"null")
    except json.JSONDecodeError:
        return status, raw.decode(errors="replace")


class SharedServer:
    """The session's server. Tests use `address`, `folders`, `get`, `post`; it starts at first
    use."""

    def __init__(self, root: Path) -> None:
        self.folders = [str(tiny_model(root / f"m{seed}", seed=seed)) for seed in range(3)]
        """Three models of one shape (tests.models.tiny_model); the server starts with the first."""
        self._root = root
        self._stack = ExitStack()
        self.real: Real | None = None

    @property
    def address(self) -> str:
        """http://host:port"""
        assert self.real is not None
        return self.real.address

    @property
    def alive(self) -> bool:
        return self.real is not None and self.real.process.poll() is None

    def get(self, path: str, *, seconds: float = 30.0) -> Answer:
        return call(self.address, path, seconds=seconds)

    def post(self, path: str, *, seconds: float = 30.0, **body: Any) -> Answer:
        return call(self.address, path, body, seconds=seconds)

    def idle(self) -> bool:
        """Return whether no request runs or waits."""
        loads = self.get("/v1/loads")[1]["loads"]
        return not any(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)

    def reset(self) -> None:
        """Start the server, or reset a running server to its initial state."""
        if not self.alive:
            self._stack.close()
            self.real = self._stack.enter_context(real_sglang(self.folders[0], self._root))
            return
        self.post("/continue_generation")
        self.post("/end_weight_update")
        self.post("/abort_request", abort_all=True)
        until(self.idle, what="an idle SGLang server")
        until(self._flushed, what="an empty cache")  # it may still count a finished request
        first = {"model_path": self.folders[0], "weight_version": "default"}
        status, answer = self.post("/update_weights_from_disk", **first)
        assert status == 200, answer
        assert self._flushed()

    def _flushed(self) -> bool:
        return self.post("/flush_cache")[0] == 200

    def close(self) -> None:
        self._stack.close()


@contextmanager
def shared_server(root: Path) -> Iterator[SharedServer]:
    """Provide the server for a session; the first `reset` starts it."""
    server = SharedServer(root)
    try:
        yield server
    finally:
        server.close()
