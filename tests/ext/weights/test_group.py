"""Two processes in a separate process group; one may die."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from arealite.ext.weights.process_group import join

MEMBER = """
import sys, torch, torch.distributed as dist
from arealite.ext.weights.process_group import join
for number, port in enumerate(map(int, sys.argv[2:])):
    where, name = ("127.0.0.1", port), f"{sys.argv[1]}{number}"
    group = join(where, name, rank=1, world_size=2, backend="gloo", seconds=240.0)
    if sys.argv[1] != "lost":
        tensor = torch.zeros(5)
        dist.broadcast(tensor, src=0, group=group)
        dist.destroy_process_group(group)
        print(tensor.tolist())
    else:
        sys.stdin.readline()
"""


@pytest.fixture
def member(tmp_path: Path):
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", MEMBER, *map(str, arguments)]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=tmp_path))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.processes
def test_tensor_is_broadcast_in_each_of_two_groups(member) -> None:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    ports = [listener.getsockname()[1] for listener in listeners]
    other = member("g", *ports)
    for number, (listener, port) in enumerate(zip(listeners, ports, strict=True)):
        group = join(listener, f"g{number}", rank=0, world_size=2, backend="gloo", seconds=240.0)
        listening = [c for c in psutil.Process().net_connections() if c.status == "LISTEN"]
        assert {c.laddr.ip for c in listening if c.laddr.port == port} == {"127.0.0.1"}
        assert not dist.is_initialized(), "the default group stays untouched"
        dist.broadcast(torch.arange(5.0) + number, src=0, group=group)
        dist.destroy_process_group(group)
    sent = [str([0.0 + number + i for i in range(5)]) for number in range(2)]
    assert other.communicate(timeout=60)[0].splitlines() == sent


@pytest.mark.processes
def test_broadcast_fails_if_a_member_dies(member) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    other = member("lost", listener.getsockname()[1])
    group = join(listener, "lost0", rank=0, world_size=2, backend="gloo", seconds=240.0)
    other.communicate("we have both joined\n", timeout=60)
    assert other.returncode == 0
    with pytest.raises(RuntimeError, match=r"closed by peer|reset by peer|Broken pipe"):
        dist.broadcast(torch.zeros(1 << 20), src=0, group=group)
    dist.destroy_process_group(group)


def test_join_times_out_without_other_members() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with pytest.raises(RuntimeError):
        join(listener, "alone", rank=0, world_size=2, backend="gloo", seconds=0.3)
