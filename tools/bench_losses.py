"""Measure score centering and distillation: cost in a training step, and effect on learning.

`overhead` (the default): a step is the demo's, with the demo's model: 512 short rows, the outputs
of all rows, then two updates of half of the rows each. It runs without top ids, and with 20 top ids
and `loss.centering`, alternately in one process, on one thread. The same pairs are timed for the
head alone, with the sizes of SmolLM2. A figure is the median over the pairs, in CPU seconds: other
work on the machine has little effect on them.

The other experiments train the demo's model, for each seed:

* `staleness`: samples of 16 versions ago, with and without centering, in one process: the loop of
  tests/learning. `centering_gain` is the mean difference of the held-out rewards.
* `quantised`: runs with a server of weights that are rounded to int8, with and without centering.
* `distillation`: the demo itself, then its trained model as the only teacher of the first one, once
  by the log-probability of each sampled token, once by the teacher's 16 most probable tokens there,
  and once by the policy's. `distill_sampled_steps_ratio`, `distill_steps_ratio` and
  `distill_policy_steps_ratio` are the mean ratios of their steps to a reward of 0.7 over those of
  the demo. `canary_share` is the share of a step in which the trainer scores the canary's row. A
  run needs two free cores for about two minutes, and a distilled one for longer: the teacher scores
  each answer.

    python tools/bench_losses.py [--pairs 7] [--out out/bench/losses.json]
    python tools/bench_losses.py --experiment staleness [--seeds 1 2 3] [--steps 80] [key=value …]

`key=value` are further options of all runs. Figures of all experiments are kept in one file.
"""

from __future__ import annotations

import argparse
import json
import math
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
from arealite.ext.served_policy.proof_file import ProofFile, VersionScores  # noqa: E402
from arealite.impl.engine.fsdp import FSDPEngine  # noqa: E402
from tests.learning.loop import learn  # noqa: E402
from tools import bench_engine, figures  # noqa: E402

TOP_IDS = 20
HEAD_SIZES = {"tokens": 256, "hidden": 576, "vocabulary": 49_152, "chunk": 682}
STALENESS = 16
STALE_LOSS = ["trainer.ppo.updates=1", "trainer.ppo.loss.behav_weight_cap=1"]
"""Weights that are truncated often. With the default cap there is little to center: the mean of the
score with the weight π_p/π_b is 0 below the cap, and one update has no clipped ratio."""
QUANTISED = [
    "launcher.server_args=[llm_server.embedded.quantization=int8]",
    "trainer.ppo.publisher.self_check=false",
    "trainer.ppo.publisher.canary=false",
]
VARIANTS = {
    "plain": ["trainer.ppo.loss.centering=false"],
    "centred": [
        "trainer.ppo.loss.centering=true",
        f"trainer.ppo.collector.sampling.top_logprobs={TOP_IDS}",
    ],
}
"""Options of the variants of the experiments `staleness` and `quantised`."""
ENDS = 10
"""Number of last steps whose mean reward is a figure."""
DISTILLATION = "trainer.ppo.distillation"
DISTILLED = {
    "sampled": [],
    "top": [f"{DISTILLATION}.top_k=16"],
    "policy": [
        f"{DISTILLATION}.top_k=16",
        f"{DISTILLATION}.top_k_of=policy",
        "trainer.ppo.collector.sampling.top_logprobs=16",
    ],
}
"""The options of each kind of distillation."""
GOAL = 0.7
"""Reward that distillation and GRPO are to reach."""
SMOOTH = 3
"""Number of steps whose mean reward must reach the goal."""
Step = Callable[[], None]
Metrics = list[dict[str, float]]
"""The lines of a run's metrics."""


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


def compare_variants(
    experiment: str, seeds: Sequence[int], train_variant: Callable[[str, int, list[str]], Metrics]
) -> dict[str, float]:
    """Train for each seed with and without centering; return the figures and the mean gain.

    Args:
        experiment: Its name.
        seeds: The seeds.
        train_variant: Trains by the name of a variant, a seed and options; returns metrics.
    """
    measured = dict[str, float]()
    gains = list[float]()
    for seed in seeds:
        rewards = dict[str, float]()
        for name, variant in VARIANTS.items():
            figures_of_run = figures_of(train_variant(name, seed, variant))
            rewards[name] = figures_of_run["eval_reward"]
            for figure, number in figures_of_run.items():
                measured[f"{experiment}_{name}_seed{seed}_{figure}"] = number
        gains.append(rewards["centred"] - rewards["plain"])
    return measured | {f"{experiment}_centering_gain": statistics.fmean(gains)}


def figures_of(lines: Metrics) -> dict[str, float]:
    """Return the figures of a run."""
    rewards = values_of(lines, "reward/mean")
    entropies = values_of(lines, "loss/entropy")
    return {
        "eval_reward": values_of(lines, "eval/reward")[-1],
        f"reward_last_{ENDS}": statistics.fmean(rewards[-ENDS:]),
        "reward_lowest": min(rewards),
        "entropy_first": entropies[0],
        f"entropy_last_{ENDS}": statistics.fmean(entropies[-ENDS:]),
        "staleness": statistics.fmean(values_of(lines, "staleness/token_mean")),
        "mismatch_kl": statistics.fmean(values_of(lines, "mismatch/kl")),
    }


def values_of(lines: Metrics, name: str) -> list[float]:
    """Return the values of a metric, in order."""
    return [line[name] for line in lines if name in line]


def staleness(seeds: Sequence[int], steps: int, options: Sequence[str]) -> dict[str, float]:
    """Train with samples of STALENESS versions ago, with and without centering."""

    def train_variant(_: str, seed: int, variant: list[str]) -> Metrics:
        with tempfile.TemporaryDirectory() as folder:
            learned = learn(
                kit_of(seed),
                Path(folder),
                "centering",
                f"trainer.ppo.total_steps={steps}",
                *STALE_LOSS,
                *variant,
                *options,
                staleness=STALENESS,
                seed=seed,
            )
        return [*learned.metrics, {"eval/reward": learned.after}]

    measured = compare_variants("staleness", seeds, train_variant)
    return measured | {"centering_gain": measured["staleness_centering_gain"]}


def quantised(seeds: Sequence[int], steps: int, options: Sequence[str]) -> dict[str, float]:
    """Train with a server of rounded weights, with and without centering."""

    def train_variant(name: str, seed: int, variant: list[str]) -> Metrics:
        return train(f"quantised-{name}-seed{seed}", seed, steps, [*QUANTISED, *variant, *options])

    return compare_variants("quantised", seeds, train_variant)


def canary_share(run: RunPaths) -> float:
    """Return the share of a run's steps in which the trainer scores the canary's row."""
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    step_seconds = values_of(lines, "time/step_s")
    proof_lines = ProofFile(run.root).lines()
    canary_seconds = [line.seconds for line in proof_lines if isinstance(line, VersionScores)]
    return sum(canary_seconds) / sum(step_seconds)


def distillation(seeds: Sequence[int], steps: int, options: Sequence[str]) -> dict[str, float]:
    """Train by rewards, then from the start by the trained model alone; compare steps to GOAL.

    A figure is absent if a run does not reach GOAL.
    """
    measured = dict[str, float]()
    ratios = {arm: list[float]() for arm in DISTILLED}
    for seed in seeds:
        teacher_trial = f"grpo-seed{seed}"
        lines_of_arm = {"grpo": train(teacher_trial, seed, steps, options)}
        teacher = run_folder(teacher_trial).export
        for arm, arm_options in DISTILLED.items():
            words = [f"{DISTILLATION}.teacher={teacher}", f"{DISTILLATION}.only=true"]
            trial = f"{arm}-seed{seed}"
            lines_of_arm[arm] = train(trial, seed, steps, [*words, *arm_options, *options])
        for arm, lines in lines_of_arm.items():
            for figure, number in figures_of(lines).items():
                measured[f"{arm}_seed{seed}_{figure}"] = number
            measured[f"{arm}_seed{seed}_steps_to_{GOAL}"] = steps_to_goal(lines)
        for arm in DISTILLED:
            ratio = steps_to_goal(lines_of_arm[arm]) / steps_to_goal(lines_of_arm["grpo"])
            ratios[arm].append(ratio)
    shares = [canary_share(run_folder(f"grpo-seed{seed}")) for seed in seeds]
    measured |= {
        "distill_sampled_steps_ratio": statistics.fmean(ratios["sampled"]),
        "distill_steps_ratio": statistics.fmean(ratios["top"]),
        "distill_policy_steps_ratio": statistics.fmean(ratios["policy"]),
        "canary_share": statistics.median(shares),
    }
    return {figure: number for figure, number in measured.items() if not math.isnan(number)}


def steps_to_goal(lines: Metrics) -> float:
    """Return the steps until the mean reward of SMOOTH steps is at least GOAL; NaN: never."""
    rewards = values_of(lines, "reward/mean")
    for end in range(SMOOTH, len(rewards) + 1):
        if statistics.fmean(rewards[end - SMOOTH : end]) >= GOAL:
            return float(end)
    return float("nan")


def kit_of(seed: int) -> Path:
    """Return the folder with the demo's model and data; create it if it is missing."""
    return make_kit(ROOT / "runs" / f"demo/kit-seed{seed}", seed)


def run_folder(trial: str) -> RunPaths:
    """Return the paths of a trial's run."""
    return RunPaths(ROOT / "runs" / "bench_losses" / trial)


def train(trial: str, seed: int, steps: int, options: Sequence[str]) -> Metrics:
    """Run the demo's config with further options; return the lines of its metrics."""
    runs = ROOT / "runs"
    kit = kit_of(seed)
    paths = run_folder(trial)
    shutil.rmtree(paths.root, ignore_errors=True)
    command = [sys.executable, "train.py", "--config", "config/demo.yaml"]
    command += [f"model.path={kit / 'model'}", f"dataset.train={kit / 'train.jsonl'}"]
    command += [f"dataset.eval={kit / 'eval.jsonl'}", f"seed={seed}", "launcher.llm_servers=1"]
    command += ["experiment_name=bench_losses", f"trial_name={trial}", f"cluster.run_root={runs}"]
    command += [f"trainer.ppo.total_steps={steps}", *options]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in paths.metrics.read_text().splitlines()]


EXPERIMENTS = {"staleness": staleness, "quantised": quantised, "distillation": distillation}


def main() -> None:
    """Print the table and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experiment", choices=["overhead", *EXPERIMENTS], default="overhead")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--out", type=Path, default=figures.FOLDER / "losses.json")
    parser.add_argument("options", nargs="*", metavar="key=value")
    args = parser.parse_intermixed_args()
    if args.experiment == "overhead":
        measured = overhead(args.pairs)
    else:
        measured = EXPERIMENTS[args.experiment](args.seeds, args.steps, args.options)
    figures.show(measured, digits=3)
    figures.save(args.out, measured, keep=True)


if __name__ == "__main__":
    main()
