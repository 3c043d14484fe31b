"""Addresses of a run join the hosts that need no proxy; the user's hosts stay."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest

from arealite.base.proxies import bypass_proxies
from arealite.cli import configs, resolved
from arealite.cli import main as cli
from arealite.ext.harness.env import proxy_variable

OURS = "localhost,127.0.0.1,::1"


@pytest.mark.parametrize(
    ("before", "upper", "lower"),
    [
        ({}, OURS, OURS),
        ({"NO_PROXY": "a.org"}, f"a.org,{OURS}", f"a.org,{OURS}"),
        ({"no_proxy": "a.org"}, f"a.org,{OURS}", f"a.org,{OURS}"),
        ({"NO_PROXY": "a.org", "no_proxy": "b.org"}, f"a.org,{OURS}", f"b.org,{OURS}"),
        ({"NO_PROXY": "::1, localhost"}, "::1, localhost,127.0.0.1", "::1, localhost,127.0.0.1"),
        ({"NO_PROXY": "", "no_proxy": "a.org"}, f"a.org,{OURS}", f"a.org,{OURS}"),
        ({"NO_PROXY": "*"}, "*", "*"),
    ],
)
def test_loopback_is_added_to_the_hosts_of_the_user(
    before: dict[str, str], upper: str, lower: str
) -> None:
    environment = dict(before)
    for _ in range(2):  # a second call adds nothing
        bypass_proxies(environment=environment)
        assert environment == {"NO_PROXY": upper, "no_proxy": lower}


def test_hosts_are_added_and_wildcards_are_not() -> None:
    environment = dict[str, str]()
    bypass_proxies("10.0.0.7", "", "auto", "0.0.0.0", "::", "127.0.0.1", environment=environment)
    assert environment["no_proxy"] == f"{OURS},10.0.0.7"


def test_proxy_of_http_is_found_in_both_cases() -> None:
    assert proxy_variable({"HTTP_PROXY": "http://p"}) == "HTTP_PROXY"
    assert proxy_variable({"http_proxy": "", "all_proxy": "http://p"}) == "all_proxy"
    assert proxy_variable({"https_proxy": "http://p", "no_proxy": "x"}) == ""


@pytest.fixture
def proxied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set a proxy, and restore both lists of hosts at the end of the test."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "a.org")


@pytest.mark.usefixtures("proxied")
def test_every_command_bypasses_the_proxy_for_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children of a command inherit its environment."""

    def main(_: object) -> int:
        assert urllib.request.proxy_bypass("127.0.0.1:80")
        assert urllib.request.proxy_bypass("a.org")
        assert not urllib.request.proxy_bypass("b.org")
        return 0

    monkeypatch.setattr("arealite.ext.audit.command.main", main)
    assert cli.main(["audit"]) == 0


@pytest.mark.usefixtures("proxied")
def test_host_of_a_cluster_is_reached_without_the_proxy(tmp_path: Path) -> None:
    config = configs.load(configs.ExperimentConfig, [], ["cluster.host=10.0.0.7"])
    assert not urllib.request.proxy_bypass("10.0.0.7:80")
    resolved.resolve_host(config)
    assert urllib.request.proxy_bypass("10.0.0.7:80")
