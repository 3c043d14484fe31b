"""Agents reach the gateway although the environment names a proxy, which refuses all requests."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.ext.harness.harnesses import AGENTS, failed, in_a_workers_loop, play

VARIABLES = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
BYPASS = ("NO_PROXY", "no_proxy")


class Refusing(BaseHTTPRequestHandler):
    """Refuses every request of a client that takes this server for its proxy."""

    def do_POST(self) -> None:
        self.send_error(403, "refused by the proxy")

    do_GET = do_CONNECT = do_POST

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing."""


@pytest.fixture
def proxy() -> Iterator[str]:
    """Yield the URL of a proxy that refuses every request."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Remove all variables of proxies, and restore them at the end of the test."""
    for name in (*VARIABLES, *BYPASS):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize("variables", [*((name,) for name in VARIABLES), VARIABLES], ids="-".join)
@pytest.mark.parametrize("users_hosts", [None, "example.org"])
@pytest.mark.parametrize("client", ["blocking", "trusting", "with_sdk"])
async def test_function_reaches_the_gateway_past_a_proxy(
    environment: pytest.MonkeyPatch,
    proxy: str,
    variables: tuple[str, ...],
    users_hosts: str | None,
    client: str,
) -> None:
    for name in variables:
        environment.setenv(name, proxy)
    if users_hosts:
        environment.setenv("NO_PROXY", users_hosts)
    episode = await play(run=client)
    assert [header.reward for header in episode.headers] == [0.5], episode.failure
    assert {os.environ[name] for name in variables} == {proxy}
    for name in BYPASS:
        assert os.environ[name].startswith(users_hosts or "localhost")


@pytest.mark.processes
@in_a_workers_loop
async def test_program_reaches_the_gateway_past_a_proxy(
    environment: pytest.MonkeyPatch, proxy: str
) -> None:
    environment.setenv("http_proxy", proxy)
    command = [sys.executable, str(AGENTS), "open('reward.json', 'w').write('0.5')"]
    for users_hosts in ({}, {"NO_PROXY": "example.org"}):
        variables = {"http_proxy": "$http_proxy", **users_hosts}
        episode = await play(command=command, environment=variables)
        assert [header.reward for header in episode.headers] == [0.5], episode.failure


@pytest.mark.parametrize("run", ["proxied", "silent"])
async def test_failure_without_a_request_names_the_proxy(
    environment: pytest.MonkeyPatch, proxy: str, run: str
) -> None:
    environment.setenv("HTTP_PROXY", proxy)
    detail = await failed("harness_failed", run=run)
    assert "no request reached the gateway, and HTTP_PROXY is set" in detail
    assert "NO_PROXY" in detail and proxy not in detail
    environment.delenv("HTTP_PROXY")
    assert "PROXY" not in await failed("harness_failed", run="silent")


@pytest.mark.processes
@in_a_workers_loop
async def test_failure_of_a_program_names_its_own_proxy(
    environment: pytest.MonkeyPatch, proxy: str
) -> None:
    environment.setenv("http_proxy", proxy)
    options: dict[str, Any] = {"command": [sys.executable, "-c", "pass"]}
    assert "http_proxy" not in await failed("harness_failed", **options)
    options["environment"] = {"http_proxy": proxy}
    assert "and http_proxy is set" in await failed("harness_failed", **options)


async def test_failure_after_a_request_does_not_name_the_proxy(
    environment: pytest.MonkeyPatch, proxy: str
) -> None:
    environment.setenv("http_proxy", proxy)
    assert "http_proxy" not in await failed("harness_failed", run="raising")
