"""Patches the package to use virtual time and the simulated network for one seed."""

from __future__ import annotations

import dataclasses
import random
import sys
import time as real_time
from collections.abc import Generator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import structlog

import arealite.impl.rollout.worker
import arealite.system.datapipe.datapipe
import arealite.system.datapipe.eval_scheduler
import arealite.system.links.worker_link
from arealite.system.datapipe import trainer_request_handler
from arealite.system.ledger.ledger import Ledger
from arealite.system.links import wire
from tests.simulation.links import async_link
from tests.simulation.network import SimChannel

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

CLOCKS = ("monotonic", "time", "perf_counter")


class VirtualTime:
    """Replaces the module `time` in the package's modules."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim

    def monotonic(self) -> float:
        return self.sim.loop.now

    time = perf_counter = process_time = thread_time = monotonic

    async def sleep(self, seconds: float) -> None:
        """Sleep in virtual time; only the rewritten TrainerLink calls it."""
        import asyncio

        await asyncio.sleep(seconds)

    def __getattr__(self, name: str) -> Any:
        return getattr(real_time, name)


class _Undo:
    """Sets attributes and restores them."""

    def __init__(self) -> None:
        self._undo: list[Any] = []

    def set(self, target: Any, name: str, value: Any) -> None:
        has = name in vars(target)
        before = getattr(target, name, None)
        self._undo.append((target, name, before, has))
        setattr(target, name, value)

    def cell(self, cell: Any, value: Any) -> None:
        before = cell.cell_contents
        cell.cell_contents = value
        self._undo.append((cell, "cell_contents", before, True))

    def all(self) -> None:
        for target, name, before, has in reversed(self._undo):
            if has:
                setattr(target, name, before)
            else:
                delattr(target, name)


def _product_modules() -> list[Any]:
    names = ("arealite.system", "arealite.impl.rollout", "arealite.api", "arealite.algo")
    return [m for n, m in sorted(sys.modules.items()) if n.startswith(names) and m is not None]


def _clocks_of(cls: Any) -> list[Any]:
    """Return the closure cells of a dataclass's __init__ that hold a clock as a default."""
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        return []
    cells = getattr(cls.__init__, "__closure__", None) or ()
    return [c for c in cells if any(c.cell_contents is getattr(real_time, n) for n in CLOCKS)]


@contextmanager
def patched(sim: Simulation) -> Generator[None, None, None]:
    """Patch the package while the body runs."""
    undo, clock = _Undo(), VirtualTime(sim)
    log_config = structlog.get_config()
    link = sys.modules[async_link().__module__]
    try:
        for module in [*_product_modules(), link]:
            if getattr(module, "time", None) is real_time:
                undo.set(module, "time", clock)
            for value in list(vars(module).values()):
                for cell in _clocks_of(value):
                    undo.cell(cell, clock.monotonic)
        undo.set(wire, "open_socket", sim.network.open_socket)
        undo.set(wire, "Channel", SimChannel)
        undo.set(arealite.system.links.worker_link, "uuid", SimpleNamespace(uuid4=sim.uuid4))
        if hasattr(link, "uuid"):
            undo.set(link, "uuid", SimpleNamespace(uuid4=sim.uuid4))
        tickets = random.Random(f"tickets {sim.scenario.seed}")
        undo.set(trainer_request_handler, "secrets", SimpleNamespace(randbelow=tickets.randrange))
        undo.set(link, "POLL_MS", 1000)
        if hasattr(arealite.impl.rollout.worker, "LAG_PERIOD_S"):
            undo.set(arealite.impl.rollout.worker, "LAG_PERIOD_S", 20.0)
        execute = Ledger.execute
        undo.set(Ledger, "execute", lambda ledger, rows: sim.on_execute(ledger, rows, execute))
        structlog.configure(**sim.log_config())
        yield
    finally:
        undo.all()
        structlog.configure(**log_config)
