"""Planted checks of `arealite check --machine`, which its child processes import."""

from __future__ import annotations

import os
import signal
import sys
import threading

import torch.distributed as dist

from arealite.base.errors import RoleError
from arealite.ext.machine.bench import Bench


def good(bench: Bench) -> None:
    bench.bound("number", 1.0, 2.0)


def above_its_bound(bench: Bench) -> None:
    bench.bound("number", 3.0, 2.0)


def not_a_number(bench: Bench) -> None:
    bench.bound("number", float("nan"), 2.0)


def killed(bench: Bench) -> None:
    sys.stderr.write("last words")
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def hanging(bench: Bench) -> None:
    threading.Event().wait()


def raising_on_rank_1(bench: Bench) -> None:
    if bench.world.rank == 1:
        raise ValueError("planted")
    dist.barrier()


async def server_that_exits(bench: Bench) -> None:
    raise ExceptionGroup("servers", [RoleError("the server exited")])
