"""Measure what training costs beside its useful work: padding, balance, the engine, the loss.

Waste and balance of the plans of both layouts on two log-normal mixes of lengths (median
20 in 4–128, median 300 in 4–4096, σ 0.8); what a micro-batch costs beside its tokens; the engine
against the bare model over the same tokens (tools/bench_engine.py); peak memory of the loss against
full logits, each in a process of its own.

    python tools/bench_train.py [--loss-tokens 2048] [--repeats 5] [--out out/bench/train.json]

For a machine with a GPU, see tools/gpu_day.py.
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
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from arealite.algo.logprobs import OutputHead, token_logprobs
from arealite.algo.partition import balance, padded
from arealite.api.engine import LossInput
from arealite.api.engine_config import FSDPConfig
from arealite.ext.prefix_trees.packed_plan import packed
from arealite.impl.engine.micro_batches import collate
from arealite.impl.engine.model import LogprobModel
from tests.models import tiny_model
from tools import bench_engine, figures
from tools.qwen_shapes import VOCAB

MIXES = {"short": (20, 128), "long": (300, 4096)}
BUDGET = FSDPConfig().max_tokens_per_microbatch
HIDDEN = 896
"""Width of Qwen2.5 0.5B."""
LOSSES = "naive", "chunked"


def draw(mix: str, count: int) -> list[int]:
    """Draw log-normal lengths."""
    median, most = MIXES[mix]
    lengths = np.random.default_rng(0).lognormal(np.log(median), 0.8, count)
    return np.clip(lengths.round(), 4, most).astype(int).tolist()


def plans() -> dict[str, float]:
    """Measure padding, balance over micro-batches and eight ranks, and the time to plan."""
    found: dict[str, float] = {}
    for mix in MIXES:
        for count in (512, 4096):
            lengths = draw(mix, count)
            tokens = [np.arange(length) + 10_000 * i for i, length in enumerate(lengths)]
            for layout in ("padded", "packed"):
                started = time.process_time()
                plan = packed(tokens, BUDGET) if layout == "packed" else padded(lengths, BUDGET)
                seconds = time.process_time() - started
                widest = [len(part) * max(lengths[i] for i in part) for part in plan]
                computed = sum(lengths if layout == "packed" else widest)
                name = f"{mix}_{count}_{layout}"
                found[f"{name}_waste"] = 1 - sum(lengths) / computed
                found[f"{name}_microbatches"] = len(plan)
                found[f"{name}_plan_ms"] = 1e3 * seconds
                if layout == "packed":
                    loads = [sum(lengths[i] for i in rows) for rows in plan]
                    found[f"{name}_spread"] = 1 - min(loads) / max(loads)
            ranks = np.bincount(balance(lengths, ranks=8), weights=lengths)
            found[f"{mix}_{count}_ranks_spread"] = 1 - ranks.min() / ranks.max()
    return found


def overhead(size: str, repeats: int) -> dict[str, float]:
    """Fit seconds = fixed + tokens × rate over forward and backward of micro-batches."""
    from transformers import AutoModelForCausalLM

    rows = bench_engine.make_rows()
    with tempfile.TemporaryDirectory() as folder:
        path = tiny_model(folder, **bench_engine.SIZES[size])
        causal_lm = AutoModelForCausalLM.from_pretrained(path)
        model = LogprobModel(causal_lm, logits_chunk=FSDPConfig().logits_chunk)
    points = []
    for count in (1, 8, 32, 96):
        seconds = []
        for _ in range(repeats + 1):
            started = time.process_time()
            batch = collate(rows[:count], torch.device("cpu"))
            inputs = LossInput(outputs=model(batch), rows_N=batch.rows_N, fields=batch.fields)
            bench_engine.LOSS(inputs)[0].backward()
            seconds.append(time.process_time() - started)
        points.append((batch.input_ids_BW.numel(), statistics.median(seconds[1:])))
    rate, fixed = np.polyfit(*zip(*points, strict=True), 1)
    return {f"{size}_microbatch_overhead_tokens": fixed / rate}


def loss_peak(which: str, tokens: int) -> dict[str, float]:
    """Run one loss of logprobs and entropies, both ways; return the growth of the peak of memory.

    In a fresh process: the peak never falls.
    """
    torch.set_num_threads(1)
    hidden = torch.randn(tokens, HIDDEN).requires_grad_()
    weight = torch.empty(VOCAB, HIDDEN).normal_(0, 0.02).requires_grad_()
    targets = torch.randint(0, VOCAB, (tokens,))
    temperature = torch.ones(tokens)
    before, started = figures.peak_mb(), time.process_time()
    if which == "naive":
        logp = torch.log_softmax(hidden @ weight.T / temperature[:, None], -1)
        logprobs, entropy = logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
    else:
        chunk = FSDPConfig().logits_chunk // VOCAB
        logprobs, entropy = token_logprobs(
            hidden, OutputHead(weight), targets, temperature_N=temperature, chunk=chunk
        )
    (logprobs.sum() + 0.01 * entropy.sum()).backward()
    return {"mb": figures.peak_mb() - before, "cpu_s": time.process_time() - started}


def loss_memory(tokens: int) -> dict[str, float]:
    """Compare both losses at `tokens`, and what both grow to at 8,192: logits grow with tokens,
    the head's gradient (V × H) and the chunk do not."""
    found: dict[str, float] = {"loss_tokens": tokens}
    for which in LOSSES:
        command = [sys.executable, __file__, "--loss", which, "--loss-tokens", str(tokens)]
        out = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=os.environ)
        for name, value in json.loads(out.stdout).items():
            found[f"loss_{which}_{name}"] = value
    found["loss_naive_over_chunked"] = found["loss_naive_mb"] / found["loss_chunked_mb"]
    if tokens < 8192:
        fixed, more = 4 * VOCAB * HIDDEN / 2**20, 8192 / tokens
        naive = fixed + (found["loss_naive_mb"] - fixed) * more
        # Of ours only the gradient of hidden states grows.
        chunked = found["loss_chunked_mb"] + 4 * HIDDEN * (8192 - tokens) / 2**20
        found["loss_naive_over_chunked_at_8192_computed"] = naive / chunked
    return found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure everything."""
    found: dict[str, Any] = plans()
    for size in bench_engine.SIZES:
        found |= overhead(size, args.repeats)
        engine = bench_engine.measure(size, args.repeats)
        found[f"{size}_engine_of_bare"] = 1 / engine[f"{size}_engine_over_bare"]
    return found | loss_memory(args.loss_tokens)


def main() -> None:
    """Print the table and write it as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--loss-tokens", type=int, default=2048)
    parser.add_argument("--loss", choices=LOSSES, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=figures.FOLDER / "train.json")
    args = parser.parse_args()
    if args.loss:
        print(json.dumps(loss_peak(args.loss, args.loss_tokens)))
        return
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = measure(args)
    dist.destroy_process_group()
    figures.show(found, digits=3)
    figures.save(args.out, found)


if __name__ == "__main__":
    main()
