"""The child process of `arealite check --machine`: one rank that runs rows and reports numbers."""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from arealite.base import log
from arealite.impl.launcher.processes import die_with_parent
from arealite.impl.trainer.world import World

SEED = 1
Number = float | str


@dataclass
class Bench:
    """What a check gets: its ranks, its device, and a place for its numbers."""

    folder: Path
    """Models, references and checkpoints; shared by all rows."""
    quick: bool
    world: World
    device: torch.device
    server: str = ""
    stack: ExitStack = field(default_factory=ExitStack)
    """Closed after the last row of the session."""
    cache: dict[str, Any] = field(default_factory=dict[str, Any])
    """Objects that later rows of the session use again."""
    numbers: dict[str, Number] = field(default_factory=dict[str, Number])
    failures: list[str] = field(default_factory=list[str])

    def note(self, name: str, value: Number) -> None:
        """Report a number."""
        self.numbers[name] = value

    def bound(self, name: str, value: float, most: float) -> None:
        """Report a number; the row fails if it is above `most` or not a number."""
        self.note(name, value)
        if not value <= most:
            self.failures.append(f"{name} is {value:.3g}, the bound is {most:.3g}")

    def require(self, holds: bool, failure: str) -> None:
        """Fail the row with `failure` unless `holds`."""
        if not holds:
            self.failures.append(failure)

    def seconds(self, call: Callable[[], object], repeat: int = 3) -> float:
        """Return the shortest time of `repeat` calls, after one call that is not measured."""
        call()
        found = list[float]()
        for _ in range(repeat):
            self.synchronize()
            began = time.perf_counter()
            call()
            self.synchronize()
            found.append(time.perf_counter() - began)
        return min(found)

    def synchronize(self) -> None:
        """Wait until the device has no work left."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def run(self, function: str, options: dict[str, Any]) -> dict[str, Any]:
        """Run one check; return its numbers (the largest of all ranks), failures and seconds."""
        self.numbers, self.failures, began = {}, [], time.perf_counter()
        module, _, name = function.partition(":")
        getattr(import_module(module), name)(self, **options)
        mine = self.numbers, self.failures
        found: list[Any] = [mine] * self.world.size
        if self.world.size > 1:
            dist.all_gather_object(found, mine)
        numbers: dict[str, Number] = {}
        for each, _ in found:
            for key, value in each.items():
                highest = (
                    isinstance(value, str) or value != value or value > numbers.get(key, value)
                )
                numbers[key] = value if highest else numbers.get(key, value)
        failures = [failure for _, failures in found for failure in failures]
        seconds = time.perf_counter() - began
        return {"numbers": numbers, "failures": failures, "seconds": round(seconds, 2)}


def main(argv: Sequence[str]) -> int:
    """Run the rows `argv[1:]` of the plan in the folder `argv[0]`; print a JSON line for each."""
    die_with_parent()
    log.setup("machine", "warning")
    plan = json.loads(Path(argv[0], "plan.json").read_text())
    rows = [plan["rows"][int(index)] for index in argv[1:]]
    threads = max(1, (os.cpu_count() or 1) // int(os.environ.get("WORLD_SIZE", 1)))
    world = World.init(threads=threads, seed=SEED)
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")
    bench = Bench(Path(argv[0]), plan["quick"], world, device, rows[0]["server"])
    for row in rows:
        try:
            found = bench.run(row["function"], row["options"])
        except BaseException:  # noqa: BLE001  (the device or a collective may be unusable now)
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        if world.is_rank0:
            print(json.dumps({"row": row["name"], **found}), flush=True)
    bench.stack.close()
    world.destroy()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
