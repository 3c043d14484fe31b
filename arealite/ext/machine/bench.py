"""The child process of `arealite check --machine`: one rank that runs rows and reports numbers."""
# pyright: basic

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.benchmark import Timer
from transformers.utils import logging

from arealite.base import log
from arealite.base.printable import fold
from arealite.ext.machine.command import PlannedCheck, line
from arealite.impl.launcher.processes import PARENT, die_with_parent
from arealite.impl.trainer.rank_group import World

SEED = 1


@dataclass(kw_only=True)
class Bench:
    """The input of a check, and the numbers and failures that it reports."""

    folder: Path
    """Models, references and checkpoints; shared by all rows."""
    plan: PlannedCheck
    """quick, gpus, limit_s, and the python of SGLang."""
    world: World
    device: torch.device
    stack: AsyncExitStack
    """Closed after the last row that runs in these processes."""
    cache: PlannedCheck = field(default_factory=dict[str, Any])
    """Objects that later rows in these processes use again."""
    numbers: PlannedCheck = field(default_factory=dict[str, Any])
    failures: list[str] = field(default_factory=list[str])

    def bound(self, name: str, number: float, maximum: float) -> None:
        """Report a number; the row fails if it is above `maximum` or not a number."""
        self.numbers[name] = float(number)
        self.require(
            number <= maximum,
            f"{name} is {number:.3g}, the bound is {maximum:.3g}",
        )

    def require(self, holds: object, failure: str) -> None:
        """Fail the row with `failure` unless `holds`."""
        if not holds:
            self.failures.append(failure)

    def seconds(self, call: Callable[[], object]) -> float:
        """Return the mean time of two calls, after two calls that are not measured."""
        timer = Timer(
            "call()",
            globals={"call": call},
            num_threads=torch.get_num_threads(),
        )
        return timer.timeit(2).mean

    async def run(self, row: PlannedCheck) -> None:
        """Run one check; rank 0 prints and writes its result."""
        self.numbers = {}
        self.failures = []
        started_s = time.perf_counter()
        module, function_name = row["run"].split(":")
        check = getattr(import_module(module), function_name)
        coroutine = check(self, **row["options"])
        if coroutine is not None:
            await coroutine
        failures = self._failures_of_all_ranks()
        row["status"] = "FAIL" if failures else "pass"
        row["device"] = self.device.type
        row["seconds"] = time.perf_counter() - started_s
        row["numbers"] = self.numbers
        words = [*failures, *self._formatted_numbers()]
        row["text"] = "; ".join(words)
        if self.world.is_rank0:
            print(fold(line(row)), flush=True)
            results_file = self.folder / "results.jsonl"
            with results_file.open("a") as file:
                file.write(json.dumps(row) + "\n")

    def _failures_of_all_ranks(self) -> list[str]:
        failures_by_rank: list[list[str]] = [[]] * self.world.size
        dist.all_gather_object(failures_by_rank, self.failures)
        return [*chain.from_iterable(failures_by_rank)]

    def _formatted_numbers(self) -> Iterator[str]:
        for name, number in self.numbers.items():
            if isinstance(number, float):
                yield f"{name} {number:.3g}"
            else:
                yield f"{name} {number}"


def main(
    rank: int,
    environments: list[PlannedCheck],
    rows: list[PlannedCheck],
    plan: PlannedCheck,
    folder: Path,
) -> None:
    """Run rows as one rank; called in a new process."""
    os.environ |= environments[rank]  # before CUDA is initialized
    os.environ[PARENT] = str(os.getppid())  # the fork server, which exits with the command
    die_with_parent()
    log_flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC
    log_fd = os.open(folder / f"{rank}.log", log_flags)
    os.dup2(log_fd, 2)
    log.setup("machine", "warning")
    logging.disable_progress_bar()
    cores_per_rank = (os.cpu_count() or 1) // len(environments)
    threads = max(1, cores_per_rank // 2)  # servers need the others
    world = World.init(threads=threads, seed=SEED)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())

    async def run() -> None:
        async with AsyncExitStack() as stack:
            bench = Bench(
                folder=folder,
                plan=plan,
                world=world,
                device=device,
                stack=stack,
            )
            for row in rows:
                signal.setitimer(signal.ITIMER_REAL, plan["limit_s"])  # SIGALRM ends the process
                await bench.run(row)
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        world.destroy()

    asyncio.run(run())
