"""Compare asynchronous and synchronous training: same server, model, tasks, heavy-tailed lengths.

Runs `async_ppo` and `ppo` alternately; prints trained tokens per second and the ratio of each pair,
and writes out/bench/async.json. Lengths are log-normal (median 20, clipped to 4 … 128). The length
of an episode is drawn from its name, so both trainers have the same lengths.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from arealite.api.agent import Agent, agents  # noqa: E402
from arealite.api.env import Env, envs  # noqa: E402
from arealite.api.task import Task  # noqa: E402
from arealite.impl.agent.math_code_single_step import MathCodeSingleStepAgent  # noqa: E402
from tools import figures  # noqa: E402

WARM_STEPS = 3


@envs.register("coin")
class CoinEnv(Env):
    """Gives a random reward of 0 or 1, derived from the seat's name: every batch has a gradient."""

    async def run(self, task: Task, **agents: Agent) -> None:
        (agent,) = agents.values()
        await agent.act(task.prompt)
        agent.reward(float(random.Random(agent.seat.episode_id).random() < 0.5))


@agents.register("heavy_tail")
class HeavyTailAgent(MathCodeSingleStepAgent):
    """Generates the number of tokens that is drawn from its episode's name."""

    def __init__(self, config: Any, **context: Any) -> None:
        super().__init__(config, **context)
        draw = random.Random(self.seat.episode_id).lognormvariate(math.log(20), 1.0)
        length = round(min(max(draw, 4), 128))
        sampling = dataclasses.replace(
            self.seat.sampling, max_new_tokens=length, min_new_tokens=length
        )
        self.seat = dataclasses.replace(self.seat, sampling=sampling)


def main() -> None:
    """Run both trainers alternately and compare them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=15)
    options = parser.parse_args()
    rows: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        kit = Path(folder)
        make_kit(kit)
        with server(kit):
            for repeat in range(options.repeats):
                pair = [
                    tokens_per_s(kit, name, options.steps, repeat) for name in ("async_ppo", "ppo")
                ]
                rows.append((pair[0], pair[1]))
                print(f"run {repeat}: async {pair[0]:8.0f}  sync {pair[1]:8.0f}  trained tokens/s")
    ratio = statistics.median(a / s for a, s in rows)
    print(f"async / sync, median of {len(rows)} pairs: {ratio:.2f} (goal: 1.3)")
    found = {
        "async_tokens_per_s": statistics.median(a for a, _ in rows),
        "sync_tokens_per_s": statistics.median(s for _, s in rows),
        "async_over_sync": ratio,
    }
    figures.save("async.json", found)


def make_kit(folder: Path) -> None:
    """Write a random model of 0.1 M parameters (the demo's shape) and short tasks."""
    from tests.models import tiny_model

    tiny_model(
        folder / "model",
        seed=0,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        init_std=0.02,
    )
    with (folder / "train.jsonl").open("w") as file:
        for index in range(512):
            file.write(json.dumps({"prompt": f"{index}+1=", "ground_truth": "x"}) + "\n")


@contextlib.contextmanager
def server(folder: Path) -> Iterator[None]:
    """Run launch_llm_server during the body."""
    script = ROOT / "arealite" / "launch_llm_server.py"
    command = [sys.executable, str(script), *names(folder), f"model.path={folder / 'model'}"]
    process = subprocess.Popen(command, env=environment(), stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)


def names(folder: Path) -> list[str]:
    """Return the overrides by which server and trainer find each other."""
    return ["experiment_name=bench", "trial_name=t", f"cluster.name_root={folder / 'names'}"]


def environment() -> dict[str, str]:
    """Return the environment: one maths thread per process, and this module as a plugin."""
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "tools")}


def tokens_per_s(folder: Path, trainer: str, steps: int, repeat: int) -> float:
    """Train; return trained tokens per second of wall time, without the first steps."""
    run_root = folder / f"{trainer}-{repeat}"
    command = [
        sys.executable,
        str(ROOT / "train.py"),
        "--config",
        str(ROOT / "config" / f"{trainer}.yaml"),
        *names(folder),
        f"model.path={folder / 'model'}",
        f"dataset.train={folder / 'train.jsonl'}",
        f"cluster.run_root={run_root}",
        "imports=[bench_async]",
        "trainer.ppo.collector.agent.type=heavy_tail",
        "trainer.ppo.collector.env.type=coin",
        "trainer.ppo.batch_size=256",
        "trainer.ppo.collector.group_size=8",
        "trainer.ppo.collector.sampling.max_new_tokens=128",
        f"trainer.ppo.total_steps={steps}",
        "trainer.ppo.checkpoint.export=false",
    ]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{trainer} failed:\n{done.stdout}{done.stderr}")
    lines = (run_root / "bench" / "t" / "metrics.jsonl").read_text().splitlines()
    measured = [json.loads(line) for line in lines if "throughput/trained_tokens" in line]
    measured = measured[WARM_STEPS:]
    tokens = sum(line["throughput/trained_tokens"] for line in measured[1:])
    return tokens / (measured[-1]["time"] - measured[0]["time"])


if __name__ == "__main__":
    main()
