"""Measure updates on rows with a common prefix: prefix trees against separate rows.

`layout=packed` computes each shared token once. `layout=padded` computes every row separately. Both
layouts run alternately in one process, on one thread. A speedup is the median over the pairs of
(seconds with separate rows / seconds with trees).

* group: one prompt of 1,000 tokens with 8 answers of 100 tokens (GRPO).
* tree: an episode of 20 turns. The chat template drops the thoughts of earlier turns, so each turn
  is a separate row: the earlier turns without thoughts, then the thought and answer of the turn.
* unshared: rows of log-normal lengths without a common prefix.

Models are random Qwen2s of 0.8 M and of 19 M parameters with a context of 2,048 tokens.
`memory_ratio` is the growth of a process's peak memory by an update on one group, with separate
rows relative to trees.

    python tools/bench_prefix.py [--pairs 5] [--sizes 0.8M 19M] [--out out/bench/prefix.json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from arealite.algo.losses import make_policy_loss
from arealite.api.algorithm import LossConfig
from arealite.api.engine import Sequence, Training
from arealite.api.engine_config import FSDPConfig, OptimizerConfig
from arealite.ext.prefix_trees.packed_rows import input_items
from arealite.ext.prefix_trees.prefix_tree import prefix_forest
from arealite.impl.engine.fsdp import FSDPEngine
from tests.models import tiny_model
from tools import figures

LOSS = make_policy_loss(LossConfig())
CONTEXT = 2048
SIZES = {
    "0.8M": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4},
    "19M": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6},
}
LAYOUTS = "padded", "packed"
PROMPT, ANSWER, GROUP = 1000, 100, 8
TURNS, OBSERVED, THOUGHT, SPOKEN = 20, 25, 30, 15


def row(tokens: np.ndarray, trained: int) -> Sequence:
    """Make a row whose last `trained` tokens are in the loss."""
    mask = np.arange(len(tokens)) >= len(tokens) - trained
    names = "behav_logprobs", "prox_logprobs", "advantages", "loss_weight"
    values = zip(names, (-4.0, -4.0, 1.0, 1e-3), strict=True)
    fields = {name: np.full(len(tokens), value, np.float32) for name, value in values}
    return Sequence(tokens=tokens, loss_mask=mask, temperature=1.0, fields=fields)


def draw(rng: np.random.Generator, count: int) -> np.ndarray:
    """Draw random tokens."""
    return rng.integers(3, 64, count).astype(np.int32)


def group(
    rng: np.random.Generator, prompt_tokens: int = PROMPT, answer_tokens: int = ANSWER
) -> list[Sequence]:
    """Make the answers to one prompt."""
    prompt = draw(rng, prompt_tokens)
    rows = (np.concatenate([prompt, draw(rng, answer_tokens)]) for _ in range(GROUP))
    return [row(tokens, answer_tokens) for tokens in rows]


def tree(rng: np.random.Generator) -> list[Sequence]:
    """Make the turns of one episode."""
    past, rows = draw(rng, PROMPT), list[Sequence]()
    for _ in range(TURNS):
        past = np.concatenate([past, draw(rng, OBSERVED)])
        thought, spoken = draw(rng, THOUGHT), draw(rng, SPOKEN)
        rows.append(row(np.concatenate([past, thought, spoken]), THOUGHT + SPOKEN))
        past = np.concatenate([past, spoken])
    return rows


def unshared(rng: np.random.Generator) -> list[Sequence]:
    """Make 48 rows of a median of 150 tokens."""
    lengths = np.clip(rng.lognormal(np.log(150), 0.8, 48).round(), 8, 1500).astype(int)
    return [row(draw(rng, length), length // 2) for length in lengths]


CASES = {"group": group, "tree": tree, "unshared": unshared}


def make_engine(folder: str, layout: str) -> FSDPEngine:
    """Return an engine for the model of the folder."""
    training = Training(optimizer=OptimizerConfig(), lr=1e-6, total_updates=100)
    config = FSDPConfig(layout=layout)  # type: ignore[arg-type]
    return FSDPEngine(config, model_path=folder, seed=0, training=training)


def model(folder: str, size: str) -> str:
    """Write the random model."""
    return str(tiny_model(folder, max_position_embeddings=CONTEXT, init_std=0.02, **SIZES[size]))


def measure(size: str, pairs: int) -> dict[str, float]:
    """Time updates with both layouts alternately."""
    found = dict[str, float]()
    with tempfile.TemporaryDirectory() as folder:
        path = model(folder, size)
        engines = {layout: make_engine(path, layout) for layout in LAYOUTS}
    for name, case in CASES.items():
        rows, ratios, seconds = case(np.random.default_rng(0)), list[float](), dict[str, float]()
        for repeat in range((2 * pairs if name == "unshared" else pairs) + 1):
            order = LAYOUTS if repeat % 2 else LAYOUTS[::-1]
            for layout in order:
                begin = time.perf_counter()
                engines[layout].train_batch(rows, LOSS)
                seconds[layout] = time.perf_counter() - begin
            if repeat:
                ratios.append(seconds["padded"] / seconds["packed"])
        nodes = prefix_forest(input_items(rows)).nodes
        tokens = sum(len(each.tokens) - 1 for each in rows)
        found[f"{size}_{name}_speedup"] = statistics.median(ratios)
        found[f"{size}_{name}_token_ratio"] = tokens / sum(node.end - node.begin for node in nodes)
        found |= {f"{size}_{name}_{layout}_s": seconds[layout] for layout in LAYOUTS}
        print(f"{size} {name}: {found[f'{size}_{name}_speedup']:.2f}", flush=True)
    return found


def peak(layout: str) -> None:
    """Print the growth of this process's peak memory by one update, in MB."""
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(model(folder, "19M"), layout)
    rng = np.random.default_rng(0)
    warm = [row(draw(rng, 16), 4)]
    engine.train_batch(warm, LOSS)  # the state of the optimizer
    before, rows = figures.peak_mb(), group(rng)
    engine.train_batch(rows, LOSS)
    print(figures.peak_mb() - before)


def main() -> None:
    """Print the table and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--peak", choices=LAYOUTS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=figures.FOLDER / "prefix.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if args.peak:
        peak(args.peak)
        dist.destroy_process_group()
        return
    found = dict[str, float]()
    for size in args.sizes:
        found |= measure(size, args.pairs)
    for layout in LAYOUTS:
        command = [sys.executable, __file__, "--peak", layout]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=os.environ)
        found[f"{layout}_peak_mb"] = json.loads(done.stdout)
    found["memory_ratio"] = found["padded_peak_mb"] / found["packed_peak_mb"]
    for name in ("group", "tree", "unshared"):
        each = [found[f"{size}_{name}_speedup"] for size in args.sizes]
        found[f"{name}_speedup"] = min(each)
    dist.destroy_process_group()
    figures.show(found, digits=3)
    figures.save(args.out, found)


if __name__ == "__main__":
    main()
