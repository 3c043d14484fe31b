"""The child process of `arealite check --machine`: one rank that runs rows and reports numbers."""
# pyright: basic

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.benchmark import Timer
from transformers.utils import logging

from arealite.base import log
from arealite.cli.fold import fold
from arealite.cli.machine.command import Row, line
from arealite.impl.launcher.processes import PARENT, die_with_parent
from arealite.impl.trainer.world import World

SEED = 1


@dataclass
class Bench:
    """The input of a check, and the numbers and failures that it reports."""

    folder: Path
    """Models, references and checkpoints; shared by all rows."""
    plan: Row
    """quick, gpus, limit_s, and the python of SGLang."""
    world: World
    device: torch.device
    stack: AsyncExitStack
    """Closed after the last row that runs in these processes."""
    cache: Row = field(default_factory=dict[str, Any])
    """Objects that later rows in these processes use again."""
    numbers: Row = field(default_factory=dict[str, Any])
    failures: list[str] = field(default_factory=list[str])

    def bound(self, name: str, value: float, most: float) -> None:
        """Report a number; the row fails if it is above `most` or not a number."""
        self.numbers[name] = float(value)
        self.require(value <= most, f"{name} is {value:.3g}, the bound is {most:.3g}")

    def require(self, holds: object, failure: str) -> None:
        """Fail the row with `failure` unless `holds`."""
        self.failures += [] if holds else [failure]

    def seconds(self, call: Callable[[], object]) -> float:
        """Return the mean time of two calls, after two calls that are not measured."""
        threads = torch.get_num_threads()
        return Timer("call()", globals={"call": call}, num_threads=threads).timeit(2).mean

    async def run(self, row: Row) -> None:
        """Run one check; rank 0 prints and writes its result."""
        self.numbers = {}
        self.failures = []
        began = time.perf_counter()
        module, name = row["run"].split(":")
        check = getattr(import_module(module), name)
        if (waiting := check(self, **row["options"])) is not None:
            await waiting
        failures: list[list[str]] = [[]] * self.world.size
        dist.all_gather_object(failures, self.failures)
        words = sum(failures, list[str]())
        row |= {"status": "FAIL" if words else "pass", "device": self.device.type}
        row |= {"seconds": time.perf_counter() - began, "numbers": self.numbers}
        for name, value in self.numbers.items():
            words.append(f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}")
        row["text"] = "; ".join(words)
        if self.world.is_rank0:
            print(fold(line(row)), flush=True)
            with (self.folder / "results.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")


def main(rank: int, environments: list[Row], rows: list[Row], plan: Row, folder: Path) -> None:
    """Run rows as one rank; called in a new process."""
    os.environ |= environments[rank]  # before CUDA is initialized
    os.environ[PARENT] = str(os.getppid())  # the fork server, which exits with the command
    die_with_parent()
    os.dup2(os.open(folder / f"{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC), 2)
    log.setup("machine", "warning")
    logging.disable_progress_bar()
    threads = max(1, (os.cpu_count() or 1) // len(environments) // 2)  # servers need the others
    world = World.init(threads=threads, seed=SEED)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())

    async def run() -> None:
        async with AsyncExitStack() as stack:
            bench = Bench(folder, plan, world, device, stack)
            for row in rows:
                signal.setitimer(signal.ITIMER_REAL, plan["limit_s"])  # SIGALRM ends the process
                await bench.run(row)
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        world.destroy()

    asyncio.run(run())
