"""Compare asynchronous and synchronous training: same server, model, tasks and lengths.

Runs `async_ppo` and `ppo` alternately. The server has the second core, and all other processes have
the first. A synchronous step generates for g seconds, and then trains for t seconds. An
asynchronous step cannot be shorter than the longer of the two, so `async / sync` is at most
`bound` = (g + t) / max(g, t). Lengths are log-normal (median 20, σ 1.0, clipped to 4 … the option
`--longest`). The length of an episode is drawn from its name, so both trainers have the same
lengths. With the default of `--longest`, g is about 1.2 times t; longer answers increase it.
Micro-batches have up to 2,048 tokens, as in `bench_trl`.

    python tools/bench_async.py [--repeats 5] [--steps 40] [--longest 40]

Writes out/bench/async.json: all figures of the pair with the median `share_of_bound`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from arealite.api.agent import Agent, agents  # noqa: E402
from arealite.api.env import Env, envs  # noqa: E402
from arealite.api.task import Task  # noqa: E402
from arealite.impl.agent.math_code_single_step import MathCodeSingleStepAgent  # noqa: E402
from tools import figures  # noqa: E402
from tools.bench_trl import (  # noqa: E402
    BUSY,
    LengthAgent,
    Others,
    environment,
    heavy_length,
    names,
    wait_for_quiet,
)

WARM_STEPS = 3


@envs.register("coin")
class CoinEnv(Env):
    """Gives a random reward of 0 or 1, derived from the seat's name: every batch has a gradient."""

    async def run(self, task: Task, **agents: Agent) -> None:
        (agent,) = agents.values()
        await agent.act(task.prompt)
        agent.reward(float(random.Random(agent.seat.episode_id).random() < 0.5))


@agents.register("heavy_tail")
class HeavyTailAgent(LengthAgent):
    """Generates the number of tokens that is drawn from its episode's name."""

    build_prompt = MathCodeSingleStepAgent.build_prompt
    """With a chat template, unlike in the comparison with TRL."""

    def length(self) -> int:
        return heavy_length(random.Random(self.seat.episode_id), super().length())


def main() -> None:
    """Run both trainers alternately and compare them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--longest", type=int, default=40)
    options = parser.parse_args()
    pairs = list[dict[str, float]]()
    with tempfile.TemporaryDirectory() as folder:
        kit = Path(folder)
        make_kit(kit)
        for repeat in range(options.repeats):
            pair = {"quiet": 1.0}
            for name in ("async_ppo", "ppo"):
                wait_for_quiet()
                pair |= measure(kit, name, options, repeat, pair)
            pair |= compare(results_of(pair, "ppo"), results_of(pair, "async_ppo"))
            pairs.append(pair)
            print(f"pair {repeat}:", "  ".join(f"{k} {v:.3f}" for k, v in pair.items()))
    quiet = [pair for pair in pairs if pair["quiet"]] or pairs
    quiet.sort(key=lambda pair: pair["share_of_bound"])
    median = quiet[(len(quiet) - 1) // 2]
    print(f"median of {len(quiet)} pairs; goal: share_of_bound 0.85")
    figures.show(median, digits=3)
    figures.save("async.json", median | {"quiet_pairs": len(quiet)})


def make_kit(folder: Path) -> None:
    """Write a random model of 0.1 M parameters (the demo's shape), and prompts."""
    from tests.models import tiny_model

    tiny_model(
        folder / "model",
        seed=0,
        hidden_size=64,
        max_position_embeddings=512,
        intermediate_size=256,
        num_hidden_layers=2,
        init_std=0.02,
    )
    write_prompts(folder)


def write_prompts(folder: Path) -> None:
    """Write the prompts."""
    with (folder / "train.jsonl").open("w") as file:
        for index in range(512):
            file.write(json.dumps({"prompt": f"{index}+1=", "ground_truth": "x"}) + "\n")


def results_of(pair: dict[str, float], trainer: str) -> dict[str, float]:
    """Return the results of one trainer, without its prefix."""
    prefix = f"{trainer}_"
    return {k.removeprefix(prefix): v for k, v in pair.items() if k.startswith(prefix)}


@contextlib.contextmanager
def server(folder: Path) -> Iterator[None]:
    """Run launch_llm_server during the body."""
    script = ROOT / "arealite" / "launch_llm_server.py"
    command = [sys.executable, str(script), *names(folder), f"model.path={folder / 'model'}"]
    with core(1):
        process = subprocess.Popen(command, env=environment(), stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)


@contextlib.contextmanager
def core(number: int) -> Iterator[None]:
    """Start the processes of the body on one core, if there are two."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(cores)[number]} if len(cores) > 1 else cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def measure(
    folder: Path, trainer: str, options: argparse.Namespace, repeat: int, pair: dict[str, float]
) -> dict[str, float]:
    """Train beside a server on the other core; return prefixed figures of `run_trainer`."""
    others, run_root = Others(), folder / f"{trainer}-{repeat}"
    overrides = [
        "trainer.ppo.batch_size=256",
        f"trainer.ppo.collector.sampling.max_new_tokens={options.longest}",
        f"trainer.ppo.total_steps={options.steps}",
        "trainer.ppo.engine.fsdp.max_tokens_per_microbatch=2048",
    ]
    with server(folder), core(0):
        run = run_trainer(folder, trainer, run_root, overrides, warm_steps=WARM_STEPS)
    return {
        "quiet": float(pair["quiet"] and others.cores() < BUSY),
        **{f"{trainer}_{name}": value for name, value in run.items()},
    }


def run_trainer(
    kit: Path,
    trainer: str,
    run_root: Path,
    overrides: Sequence[str],
    *,
    warm_steps: int,
    last_steps: int = 0,
) -> dict[str, float]:
    """Train with random rewards and answers of heavy-tailed lengths.

    Args:
        kit: Folder of `make_kit`.
        trainer: Name of a file in config/.
        run_root: Folder for the run.
        overrides: Further options of train.py.
        warm_steps: Steps at the beginning that are not measured.
        last_steps: Steps at the end that are not measured.

    Returns:
        Trained tokens per second, mean seconds of a step, and of its wait for the batch.

    Raises:
        SystemExit: train.py failed; the message has its output.
    """
    command = [
        sys.executable,
        str(ROOT / "train.py"),
        "--config",
        str(ROOT / "config" / f"{trainer}.yaml"),
        *names(kit),
        f"model.path={kit / 'model'}",
        f"dataset.train={kit / 'train.jsonl'}",
        f"cluster.run_root={run_root}",
        "imports=[bench_async]",
        "trainer.ppo.collector.agent.type=heavy_tail",
        "trainer.ppo.collector.env.type=coin",
        "trainer.ppo.collector.group_size=8",
        "trainer.ppo.checkpoint.export=false",
        *overrides,
    ]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{trainer} failed:\n{done.stdout}{done.stderr}")
    return speed(run_root, warm_steps, last_steps)


def speed(run_root: Path, warm_steps: int, last_steps: int) -> dict[str, float]:
    """Read the figures of `run_trainer` from the metrics of a run."""
    lines = (run_root / "bench" / "t" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines if "throughput/trained_tokens" in line]
    timed = steps[warm_steps : len(steps) - last_steps]
    tokens = sum(line["throughput/trained_tokens"] for line in timed[1:])
    seconds = timed[-1]["time"] - timed[0]["time"]
    return {
        "tokens_per_s": tokens / seconds,
        "step_s": seconds / (len(timed) - 1),
        "wait_s": statistics.mean(line["wait/batch_s"] for line in timed[1:]),
    }


def compare(synchronous: dict[str, float], asynchronous: dict[str, float]) -> dict[str, float]:
    """Return async over sync, and its bound, from two results of `run_trainer`."""
    generating_s = synchronous["wait_s"]
    training_s = synchronous["step_s"] - generating_s
    ratio = asynchronous["tokens_per_s"] / synchronous["tokens_per_s"]
    bound = (generating_s + training_s) / max(generating_s, training_s)
    return {
        "ratio": ratio,
        "generating_s": generating_s,
        "training_s": training_s,
        "bound": bound,
        "share_of_bound": ratio / bound,
    }


if __name__ == "__main__":
    main()
