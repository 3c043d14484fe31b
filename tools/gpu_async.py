"""Compare asynchronous with synchronous training on one device, where g is about t.

A part of tools/gpu_day.py. A synchronous step generates for g seconds and trains for t seconds. The
run is that of tools/bench_async.py. Passes over each batch (`trainer.ppo.epochs`) bring t close to
g. The generator is

* server: an embedded server beside the trainer on the same device, in bfloat16 on a GPU;
* shared: the trainer's process generates from the parameters that it trains, in float32.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.bench_async import compare, run_trainer, write_prompts
from tools.gpu_part import PartRun, parse_part
from tools.qwen_shapes import SHAPES, make_model

MAX_STALENESS = 1
BALANCED = 0.6, 1.6
"""Values of g / t that count as about 1."""
MOST_EPOCHS = 32


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Sizes of the runs."""

    shape: str
    batch_size: int
    longest: int
    """Tokens of the longest answer."""
    warm_steps: int
    timed_steps: int
    server_epochs: int = 1
    """Passes over a batch in the first run with a server."""


WORKLOADS = {
    "cuda": Workload(
        shape="0.5B", batch_size=256, longest=64, warm_steps=2, timed_steps=4, server_epochs=8
    ),
    "cpu": Workload(shape="tiny", batch_size=64, longest=40, warm_steps=2, timed_steps=4),
    "quick": Workload(shape="tiny", batch_size=8, longest=8, warm_steps=1, timed_steps=2),
}


def generator_options(way: str, device: str) -> list[str]:
    """Return the options of train.py for a generator."""
    if way == "shared":
        return ["trainer.ppo.publisher.type=shared"]
    dtype = "bfloat16" if device == "cuda" else "float32"
    return [
        "launcher.llm_servers=1",
        f"model.dtype={dtype}",
        f"trainer.ppo.engine.fsdp.dtype={dtype}",
    ]


class Comparison:
    """Runs with one generator."""

    def __init__(self, run: PartRun, way: str, workload: Workload) -> None:
        self.run = run
        self.way = way
        self.workload = workload

    def measure(self, epochs: int) -> None:
        """Report async over sync; `epochs` is the number of passes to try first."""
        synchronous = self.train("ppo", epochs)
        balanced = balanced_epochs(epochs, synchronous)
        if balanced != epochs and not self.run.quick:
            epochs = balanced
            synchronous = self.train("ppo", epochs)
        asynchronous = self.train("async_ppo", epochs)
        self.run.report(f"{self.way}, async over sync", compare(synchronous, asynchronous))

    def train(self, trainer: str, epochs: int) -> dict[str, float]:
        """Train, and report the result; see bench_async.run_trainer."""
        sizes = self.workload
        staleness = MAX_STALENESS if trainer == "async_ppo" else 0
        # No generation runs beside the last steps of an asynchronous run.
        last_steps = MAX_STALENESS
        overrides = [
            *generator_options(self.way, self.run.device),
            f"trainer.ppo.batch_size={sizes.batch_size}",
            f"trainer.ppo.epochs={epochs}",
            f"trainer.ppo.max_staleness={staleness}",
            f"trainer.ppo.collector.sampling.max_new_tokens={sizes.longest}",
            f"trainer.ppo.total_steps={sizes.warm_steps + 1 + sizes.timed_steps + last_steps}",
            "trainer.ppo.publisher.self_check=false",
            "trainer.ppo.checkpoint.every_steps=0",
            "logger.types=[]",
        ]
        result = run_trainer(
            self.run.scratch,
            trainer,
            self.run.scratch / f"{self.way}-{trainer}-{epochs}",
            overrides,
            warm_steps=sizes.warm_steps,
            last_steps=last_steps,
        )
        self.run.report(f"{self.way}, {trainer}, epochs {epochs}", result)
        return result


def balanced_epochs(epochs: int, synchronous: dict[str, float]) -> int:
    """Return the number of passes at which training takes as long as generation.

    Args:
        epochs: Passes of the run that was measured.
        synchronous: Its result.
    """
    generating_s = synchronous["wait_s"]
    training_s = synchronous["step_s"] - generating_s
    least, most = BALANCED
    if least <= generating_s / training_s <= most:
        return epochs
    return min(max(1, round(epochs * generating_s / training_s)), MOST_EPOCHS)


def main() -> None:
    """Measure both generators."""
    run = parse_part(__doc__ or "")
    workload = WORKLOADS["quick" if run.quick else run.device]
    shape = workload.shape
    model = make_model(run.scratch / f"model-{shape}", SHAPES[shape], device=run.device)
    (run.scratch / "model").symlink_to(model)
    write_prompts(run.scratch)
    if run.quick:  # commands of AReaLite import torch once
        from tests import forks

        forks.install()
    Comparison(run, "server", workload).measure(workload.server_epochs)
    Comparison(run, "shared", workload).measure(1)


if __name__ == "__main__":
    main()
