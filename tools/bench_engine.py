"""Compare the FSDP engine at world size 1 on the CPU with the bare model.

A step is the demo's: 512 short rows, proximal logprobs of all rows, then two updates of half of the
rows each. The bare model is the same Hugging Face model with the same batches and loss and a plain
fused AdamW: the difference is the cost of the engine and FSDP2.

    python tools/bench_engine.py [--repeats 5] [--out out/bench/engine.json]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from arealite.algo.losses import make_policy_loss
from arealite.api.algorithm import LossConfig
from arealite.api.engine import LossInput, Sequence, Training
from arealite.api.engine_config import FSDPConfig, OptimizerConfig
from arealite.ext.prefix_trees import attention
from arealite.ext.prefix_trees.packed_rows import PackedRows
from arealite.impl.engine.fsdp import FSDPEngine
from arealite.impl.engine.micro_batches import collate
from arealite.impl.engine.model import LogprobModel
from tests.models import tiny_model
from tools import figures

SIZES = {
    "0.1M": {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2},
    "0.8M": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4},
}
LOSS = make_policy_loss(LossConfig())
BUDGET = FSDPConfig().max_tokens_per_microbatch


def make_rows(count: int = 512) -> list[Sequence]:
    """Draw rows of 16 to 30 tokens; the last third of each row is trained."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(count):
        length = int(rng.integers(16, 31))
        mask = np.arange(length) >= length - length // 3
        fields = {
            name: rng.normal(-2, 0.3, length).astype(np.float32)
            for name in ("behav_logprobs", "prox_logprobs", "advantages")
        }
        fields["loss_weight"] = np.full(length, 1 / (count * 4), np.float32)
        rows.append(
            Sequence(
                tokens=rng.integers(3, 60, length).astype(np.int32),
                loss_mask=mask,
                temperature=1.0,
                fields=fields,
            )
        )
    return rows


def engine_step(path: Path, rows: list[Sequence]) -> Callable[[], None]:
    """Return a function that runs one step with the engine."""
    engine = FSDPEngine(
        FSDPConfig(),
        model_path=str(path),
        seed=0,
        training=Training(optimizer=OptimizerConfig(), lr=1e-4, total_updates=100),
    )

    def step() -> None:
        engine.forward(rows)
        for half in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
            engine.train_batch(half, LOSS)

    return step


def bare_step(path: Path, rows: list[Sequence]) -> Callable[[], None]:
    """Return a function that runs the same step with the bare model."""
    from transformers import AutoModelForCausalLM

    causal_lm = AutoModelForCausalLM.from_pretrained(path)
    causal_lm.set_attn_implementation(attention.NAME)
    model = LogprobModel(causal_lm, logits_chunk=FSDPConfig().logits_chunk)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    device = torch.device("cpu")
    layout = PackedRows(device)

    def batches(part: list[Sequence]) -> list[list[Sequence]]:
        plan = layout.plan(part, BUDGET, rows_per_example=1)
        return [[part[i] for i in indices] for indices in plan]

    def step() -> None:
        with torch.no_grad():
            for part in batches(rows):
                model(collate(part, device, layout))
        for half in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
            for part in batches(half):
                batch = collate(part, device, layout)
                outputs = model(batch)
                LOSS(LossInput(outputs=outputs, rows_N=batch.rows_N, fields=batch.fields))[
                    0
                ].backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            adamw.step()
            adamw.zero_grad()

    return step


def measure(size: str, repeats: int) -> dict[str, float]:
    """Time both alternately; return medians."""
    rows = make_rows()
    with tempfile.TemporaryDirectory() as folder:
        path = tiny_model(folder, **SIZES[size])
        steps = {"engine": engine_step(path, rows), "bare": bare_step(path, rows)}
        times: dict[str, list[float]] = {name: [] for name in steps}
        for repeat in range(repeats + 1):
            for name, step in steps.items():
                start = time.perf_counter()
                step()
                if repeat > 0:
                    times[name].append(time.perf_counter() - start)
    engine, bare = (statistics.median(times[name]) for name in ("engine", "bare"))
    tokens = sum(len(row.tokens) for row in rows)
    return {
        f"{size}_engine_step_s": engine,
        f"{size}_bare_step_s": bare,
        f"{size}_engine_over_bare": engine / bare,
        f"{size}_tokens_per_s": tokens / engine,
    }


def main() -> None:
    """Print the table and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=figures.FOLDER / "engine.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found: dict[str, float] = {}
    for size in SIZES:
        found |= measure(size, args.repeats)
    dist.destroy_process_group()
    figures.show(found, digits=3)
    figures.save(args.out, found)


if __name__ == "__main__":
    main()
