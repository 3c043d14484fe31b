"""Measure what training costs beside its useful work: padding, balance, the engine, the loss.

On a CPU: waste and balance of the plans of both layouts on two log-normal mixes of lengths (median
20 in 4–128, median 300 in 4–4096, σ 0.8); what a micro-batch costs beside its tokens; the engine
against the bare model over the same tokens (tools/bench_engine.py); peak memory of the loss against
full logits, each in a process of its own.

    python tools/bench_train.py [--loss-tokens 2048] [--repeats 5] [--out out/bench/train.json]

On a machine with a GPU (torch for CUDA in the environment, nothing else to set up, about 40 GB of
its memory for the larger model and ten minutes; on several GPUs it takes the first):

    python tools/bench_train.py --gpu [--tokens 4096] [--budget 16384] [--logits-chunk 268435456]

trains random Qwen2s in the shapes of the 0.5 B and the 1.5 B for a few updates, packed rows of
4,096 tokens, bfloat16, gradient checkpointing on and off, through the engine (FSDP2 over one rank,
AdamW in float32), and prints tokens/s, peak memory and MFU: the model's FLOPs over what the device
does in the same time in bfloat16 matrix products of 8192³, measured first. FLOPs are those of the
mathematics, not of what is recomputed: see `flops_per_token`. Both runs write into the same file,
`gpu` beside the rest.
"""

from __future__ import annotations

import argparse
import gc
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

from arealite.algo.logprobs import Head, token_logprobs
from arealite.algo.packing import LAYOUTS
from arealite.algo.partition import balance
from arealite.api.engine import LossInput, Sequence, Training
from arealite.api.engine_config import FSDPConfig, OptimizerConfig
from arealite.impl.engine.batch import collate
from arealite.impl.engine.fsdp import FSDPEngine
from arealite.impl.engine.model import LogprobModel
from tests.models import tiny_model
from tools import bench_engine, figures

MIXES = {"short": (20, 128), "long": (300, 4096)}
BUDGET = FSDPConfig().max_tokens_per_microbatch
VOCAB, HIDDEN = 151_936, 896
LOSSES = "naive", "chunked"
SHAPES: dict[str, dict[str, int]] = {
    "0.5B": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "1.5B": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
}
"""Of Qwen2 and Qwen2.5 (their config.json); heads are tied, the vocabulary is VOCAB."""


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
            for layout in LAYOUTS:
                started = time.process_time()
                plan = LAYOUTS[layout](tokens, BUDGET)
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
            inputs = LossInput(model(batch), batch.rows_N, batch.fields)
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
            hidden, Head(weight), targets, temperature_N=temperature, chunk=chunk
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


def flops_per_token(shape: dict[str, int], tokens: int) -> float:
    """Count forward and backward of one token of a row of `tokens`: 6 a parameter that multiplies
    (with the tied head, without the look-up), and 12 · layers · width · context for attention.

    Chowdhery et al. 2022 (PaLM), appendix B; there the context is the whole row, here the half of
    it that a causal mask leaves, so 6 · layers · width · tokens.
    """
    width, layers = shape["hidden_size"], shape["num_hidden_layers"]
    heads_kv = shape["num_key_value_heads"] / shape["num_attention_heads"]
    matrices = 2 * width**2 * (1 + heads_kv) + 3 * width * shape["intermediate_size"]
    return 6 * (layers * matrices + VOCAB * width) + 6 * layers * width * tokens


def matmul_rate(device: torch.device, side: int = 8192) -> float:
    """Return FLOP/s of bfloat16 products of square matrices: the median of 20 after 5."""
    left, right = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in "ab")
    seconds = []
    for _ in range(25):
        _sync(device)
        started = time.perf_counter()
        left @ right
        _sync(device)
        seconds.append(time.perf_counter() - started)
    return 2 * side**3 / statistics.median(seconds[5:])


def _sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def random_qwen2(folder: str, shape: dict[str, int], tokens: int) -> None:
    """Write a random model of `shape`, as the engine reads it."""
    from transformers import AutoModelForCausalLM, Qwen2Config
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = Qwen2Config(
        **shape, vocab_size=VOCAB, max_position_embeddings=tokens, tie_word_embeddings=True
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def full_rows(count: int, tokens: int) -> list[Sequence]:
    """Draw rows of one length, every token but the first trained."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(count):
        mask = np.arange(tokens) > 0
        fields = {
            name: np.full(tokens, value, np.float32)
            for name, value in (
                ("behav_logprobs", -12.0),
                ("prox_logprobs", -12.0),
                ("advantages", 1.0),
                ("loss_weight", 1 / (count * tokens)),
            )
        }
        rows.append(Sequence(rng.integers(3, VOCAB, tokens).astype(np.int32), mask, 1.0, fields))
    return rows


def updates(
    folder: str, shape: dict[str, int], config: FSDPConfig, *, tokens: int, rate: float
) -> dict[str, Any]:
    """Time whole updates (forward, backward, optimizer) of two micro-batches: the median of 5."""
    training = Training(OptimizerConfig(), 1e-5, 100)
    engine = FSDPEngine(config, model_path=folder, seed=0, training=training)
    cuda = engine.device.type == "cuda"
    rows = full_rows(max(2, 2 * config.max_tokens_per_microbatch // tokens), tokens)
    seconds: list[float] = []
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(7):
        _sync(engine.device)
        started = time.perf_counter()
        engine.train_batch(rows, bench_engine.LOSS)
        _sync(engine.device)
        seconds.append(time.perf_counter() - started)
    per_s = sum(len(row.tokens) for row in rows) / statistics.median(seconds[2:])
    found = {"tokens_per_s": per_s, "mfu": per_s * flops_per_token(shape, tokens) / rate}
    found["layout"] = engine.layout
    if cuda:
        found["peak_gb"] = torch.cuda.max_memory_allocated() / 2**30
    return found


def gpu(args: argparse.Namespace, shapes: dict[str, dict[str, int]]) -> dict[str, Any]:
    """Measure every shape with and without gradient checkpointing."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    rate = matmul_rate(device, 8192 if cuda else 512)
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(0) if cuda else "cpu",
        "torch": torch.__version__,
        "bf16_matmul_tflops": rate / 1e12,
        "tokens_a_row": args.tokens,
    }
    for name, shape in shapes.items():
        with tempfile.TemporaryDirectory() as folder:
            random_qwen2(folder, shape, args.tokens)
            for checkpointing in (True, False):
                config = FSDPConfig(
                    dtype="bfloat16",
                    layout="packed",
                    gradient_checkpointing=checkpointing,
                    max_tokens_per_microbatch=args.budget,
                    logits_chunk=args.logits_chunk,
                )
                key = f"{name}_checkpointing_{'on' if checkpointing else 'off'}"
                try:
                    result = updates(folder, shape, config, tokens=args.tokens, rate=rate)
                except torch.cuda.OutOfMemoryError:
                    result = {"out_of_memory": True}
                found |= {f"{key}_{what}": value for what, value in result.items()}
                gc.collect()
                torch.cuda.empty_cache()
    return found


def cpu(args: argparse.Namespace) -> dict[str, Any]:
    """Measure all that needs no GPU."""
    found: dict[str, Any] = plans()
    for size in bench_engine.SIZES:
        found |= overhead(size, args.repeats)
        engine = bench_engine.measure(size, args.repeats)
        found[f"{size}_engine_of_bare"] = 1 / engine[f"{size}_engine_over_bare"]
    return found | loss_memory(args.loss_tokens)


# The comparison with TRL's GRPOTrainer comes here.


def main() -> None:
    """Print the table and write it as JSON, beside what the other run wrote."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--loss-tokens", type=int, default=2048)
    parser.add_argument("--loss", choices=LOSSES, help=argparse.SUPPRESS)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--tokens", type=int, default=4096, help="of a row (--gpu)")
    parser.add_argument("--budget", type=int, default=16384, help="of a micro-batch (--gpu)")
    parser.add_argument("--logits-chunk", type=int, default=2**28, help="as in the config (--gpu)")
    parser.add_argument("--out", type=Path, default=figures.FOLDER / "train.json")
    args = parser.parse_args()
    if args.loss:
        print(json.dumps(loss_peak(args.loss, args.loss_tokens)))
        return
    if args.gpu and not torch.cuda.is_available():
        parser.error("--gpu needs a CUDA device and a torch built for it.")
    torch.set_num_threads(1)
    backend = "nccl" if args.gpu else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    found = {"gpu": gpu(args, SHAPES)} if args.gpu else cpu(args)
    dist.destroy_process_group()
    figures.show(found["gpu"] if args.gpu else found, digits=3)
    figures.save(args.out, found, keep=True)


if __name__ == "__main__":
    main()
