"""Measure score centering: its cost in a training step, and what it does with old samples.

`overhead` (the default): a step is the demo's, with the demo's model: 512 short rows, the outputs
of all rows, then two updates of half of the rows each. It runs without top ids, and with 20 top ids
and `loss.centering`, alternately in one process, on one thread. The same pairs are timed for the
head alone, with the sizes of SmolLM2. A figure is the median over the pairs, in CPU seconds: other
work on the machine has little effect on them.

`staleness`: the demo, with samples of up to 16 earlier versions, with and without centering, for
each seed. Needs two free cores for about two minutes a run.

    python tools/bench_losses.py [--pairs 7] [--out out/bench/losses.json]
    python tools/bench_losses.py --experiment staleness [--seeds 1 2 3] [--steps 80] [key=value …]

`key=value` are further options of both variants. Figures of both experiments are kept in one file.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from arealite.algo.logprobs import OutputHead, token_logprobs  # noqa: E402
from arealite.algo.losses import make_policy_loss  # noqa: E402
from arealite.api.algorithm import LossConfig  # noqa: E402
from arealite.api.engine import Sequence as Row  # noqa: E402
from arealite.api.engine import Training  # noqa: E402
from arealite.api.engine_config import FSDPConfig, OptimizerConfig  # noqa: E402
from arealite.base.trial_files import RunPaths  # noqa: E402
from arealite.ext.demo.sorting import SHAPE, make_kit  # noqa: E402
from arealite.ext.demo.tiny_model import make_tiny_model  # noqa: E402
from arealite.impl.engine.fsdp import FSDPEngine  # noqa: E402
from tools import bench_engine, figures  # noqa: E402

TOP_IDS = 20
HEAD_SIZES = {"tokens": 256, "hidden": 576, "vocabulary": 49_152, "chunk": 682}
STALE = ["trainer.ppo.max_staleness=16"]
VARIANTS = {
    "plain": [],
    "centred": [
        "trainer.ppo.loss.centering=true",
        f"trainer.ppo.collector.sampling.top_logprobs={TOP_IDS}",
    ],
}
"""Options of each variant of the staleness experiment."""
ENDS = 10
"""Number of last steps whose mean reward is a figure."""
Step = Callable[[], None]


def make_rows(vocabulary: int, *, has_top_ids: bool) -> list[Row]:
    """Draw the rows of `bench_engine`, of ids below `vocabulary`."""
    rng = np.random.default_rng(1)
    rows = bench_engine.make_rows()
    for row in rows:
        row.tokens %= vocabulary
        if not has_top_ids:
            continue
        count = len(row.tokens)
        num_ids = min(TOP_IDS, vocabulary)
        logits = rng.normal(0, 2, (count, vocabulary))
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        ids = (-logprobs).argsort(-1)[:, :num_ids]
        row.top_ids = np.full((count, TOP_IDS), -1, np.int32)
        row.top_ids[:, :num_ids] = ids
        top_logprobs = np.full((count, TOP_IDS), -np.inf, np.float32)
        top_logprobs[:, :num_ids] = np.take_along_axis(logprobs, ids, -1)
        row.fields["behav_top_logprobs"] = top_logprobs
    return rows


def engine_step(model: Path, *, has_top_ids: bool) -> Step:
    """Return a function that runs a step of the demo's model."""
    engine = FSDPEngine(
        FSDPConfig(),
        model_path=str(model),
        seed=0,
        training=Training(optimizer=OptimizerConfig(), lr=1e-5, total_updates=1000),
    )
    vocabulary = engine.module.config.vocab_size
    rows = make_rows(vocabulary, has_top_ids=has_top_ids)
    loss = make_policy_loss(LossConfig(centering=has_top_ids))

    def step() -> None:
        outputs = engine.forward(rows)
        if has_top_ids:
            for row, top_logprobs in zip(rows, outputs["top_logprobs"], strict=True):
                row.fields["prox_top_logprobs"] = top_logprobs
        middle = len(rows) // 2
        engine.train_batch(rows[:middle], loss)
        engine.train_batch(rows[middle:], loss)

    return step


def head_step(*, num_ids: int) -> Step:
    """Return a function that runs the head forward and backward for `num_ids` ids a token."""
    generator = torch.Generator().manual_seed(0)
    tokens = HEAD_SIZES["tokens"]
    vocabulary = HEAD_SIZES["vocabulary"]
    hidden = torch.randn(tokens, HEAD_SIZES["hidden"], generator=generator)
    weight = torch.randn(vocabulary, HEAD_SIZES["hidden"], generator=generator).mul_(0.02)
    ids = torch.randint(0, vocabulary, (tokens, num_ids), generator=generator)
    hidden.requires_grad_()
    weight.requires_grad_()

    def step() -> None:
        logprobs, _ = token_logprobs(
            hidden,
            OutputHead(weight),
            ids,
            temperature_N=torch.ones(tokens),
            chunk=HEAD_SIZES["chunk"],
        )
        logprobs.sum().backward()

    return step


def compare(name: str, plain: Step, with_ids: Step, pairs: int) -> dict[str, float]:
    """Time two functions alternately, after one pair that does not count."""
    plain_seconds = list[float]()
    ratios = list[float]()
    for pair in range(pairs + 1):
        plain_s = seconds_of(plain)
        with_ids_s = seconds_of(with_ids)
        if pair > 0:
            plain_seconds.append(plain_s)
            ratios.append(with_ids_s / plain_s)
    return {
        f"{name}_cpu_s": statistics.median(plain_seconds),
        f"{name}_top{TOP_IDS}_over_plain": statistics.median(ratios),
        f"{name}_top{TOP_IDS}_over_plain_min": min(ratios),
        f"{name}_top{TOP_IDS}_over_plain_max": max(ratios),
    }


def seconds_of(step: Step) -> float:
    """Return the CPU seconds of one call."""
    start = time.process_time()
    step()
    return time.process_time() - start


def overhead(pairs: int) -> dict[str, float]:
    """Compare steps and heads with and without top ids."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        make_tiny_model(model, SHAPE)
        make_step = partial(engine_step, model)
        plain = make_step(has_top_ids=False)
        with_ids = make_step(has_top_ids=True)
        measured = compare("step", plain, with_ids, pairs)
    dist.destroy_process_group()
    one_id = head_step(num_ids=1)
    several_ids = head_step(num_ids=1 + TOP_IDS)
    return measured | compare("head", one_id, several_ids, pairs)


def staleness(seeds: Sequence[int], steps: int, options: Sequence[str]) -> dict[str, float]:
    """Train the demo with old samples, for each seed with and without centering."""
    measured = dict[str, float]()
    for seed in seeds:
        for name, variant in VARIANTS.items():
            lines = train(f"{name}-seed{seed}", seed, steps, [*STALE, *variant, *options])
            rewards = [line["reward/mean"] for line in lines if "reward/mean" in line]
            ages = [
                line["staleness/token_mean"] for line in lines if "staleness/token_mean" in line
            ]
            evals = [line["eval/reward"] for line in lines if "eval/reward" in line]
            figures_of_run = {
                "eval_reward": evals[-1],
                f"reward_last_{ENDS}": statistics.fmean(rewards[-ENDS:]),
                "reward_lowest": min(rewards),
                "staleness": statistics.fmean(ages),
            }
            for figure, number in figures_of_run.items():
                measured[f"staleness_{name}_seed{seed}_{figure}"] = number
    return measured


def train(trial: str, seed: int, steps: int, options: Sequence[str]) -> list[dict[str, float]]:
    """Run the demo's config with further options; return the lines of its metrics."""
    runs = ROOT / "runs"
    kit = make_kit(runs / f"demo/kit-seed{seed}", seed)
    paths = RunPaths(runs / "bench_losses" / trial)
    shutil.rmtree(paths.root, ignore_errors=True)
    command = [sys.executable, "train.py", "--config", "config/demo.yaml"]
    command += [f"model.path={kit / 'model'}", f"dataset.train={kit / 'train.jsonl'}"]
    command += [f"dataset.eval={kit / 'eval.jsonl'}", f"seed={seed}", "launcher.llm_servers=1"]
    command += ["experiment_name=bench_losses", f"trial_name={trial}", f"cluster.run_root={runs}"]
    command += [f"trainer.ppo.total_steps={steps}", *options]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in paths.metrics.read_text().splitlines()]


def main() -> None:
    """Print the table and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experiment", choices=["overhead", "staleness"], default="overhead")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--out", type=Path, default=figures.FOLDER / "losses.json")
    parser.add_argument("options", nargs="*", metavar="key=value")
    args = parser.parse_intermixed_args()
    if args.experiment == "overhead":
        measured = overhead(args.pairs)
    else:
        measured = staleness(args.seeds, args.steps, args.options)
    figures.show(measured, digits=3)
    figures.save(args.out, measured, keep=True)


if __name__ == "__main__":
    main()
