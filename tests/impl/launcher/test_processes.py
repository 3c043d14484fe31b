"""The host's address, GPUs of servers, and exit codes that srun reports."""

from __future__ import annotations

import asyncio
import ipaddress
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from arealite.impl.launcher.processes import own_address, server_gpus, spawn


def test_address_is_resolved_from_the_host_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.1.2.3")
    assert own_address() == "10.1.2.3"


def test_unresolved_or_loopback_name_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
):
    def fails(name: str) -> str:
        raise OSError("no such host")

    for answer in (fails, lambda name: "127.0.1.1"):
        monkeypatch.setattr(socket, "gethostbyname", answer)
        assert ipaddress.ip_address(own_address())


@pytest.mark.parametrize(
    ("code", "is_read_as"),
    [(0, 0), (3, 3), (130, 130), (137, -signal.SIGKILL), (140, -signal.SIGUSR2)],
)
async def test_death_by_signal_has_one_code_with_and_without_srun(
    tmp_path: Path, code: int, is_read_as: int
):
    command = ["sh", "-c", f"exit {code}"]
    child = await spawn("rollout-0", command, log=tmp_path / "log", environment={})
    await asyncio.wait_for(child.process.wait(), 60)
    assert child.code == is_read_as


@pytest.mark.parametrize(
    ("named", "ranks", "count", "shares"),
    [
        (None, 4, 2, ["4,5", "6,7"]),
        (None, 1, 1, ["1,2,3,4,5,6,7"]),
        (None, 8, 1, [None]),
        ("2,3,5", 1, 2, ["3", "5"]),
        ("2,3", 1, 2, ["3", "3"]),
    ],
)
def test_servers_share_the_gpus_that_ranks_do_not_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: Any, ranks: int, count: int, shares: Any
) -> None:
    for name in [*(f"nvidia{number}" for number in range(8)), "nvidiactl", "nvidia-uvm"]:
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    told = [server_gpus(i, count, ranks=ranks, devices=tmp_path) for i in range(count)]
    assert [each.get("CUDA_VISIBLE_DEVICES") for each in told] == shares
