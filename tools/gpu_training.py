"""Measure training steps in the shapes of Qwen2.5: tokens/s, MFU and peak memory.

A part of tools/gpu_day.py. The models are random, and compute in bfloat16 in the layout packed. One
update has either groups of 8 answers to one prompt (prefix trees), or rows of the same length
without a common prefix. Gradient checkpointing is off and on.

MFU is the share of the GPU's peak of dense bfloat16 products, from the table of `arealite check
--machine`. The operations are those of the mathematics: recomputation does not count, and a shared
prompt counts once.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from arealite.api.engine import Sequence, Training
from arealite.api.engine_config import FSDPConfig, OptimizerConfig
from arealite.ext.machine.checks import PEAKS
from arealite.impl.engine.fsdp import FSDPEngine
from arealite.impl.trainer.rank_group import World
from tools.bench_prefix import GROUP, LOSS, draw, group, row
from tools.gpu_part import PartRun, parse_part
from tools.qwen_shapes import SHAPES, Shape, make_model, training_operations


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Sizes of an update."""

    shapes: tuple[str, ...]
    prompt_tokens: int
    answer_tokens: int
    update_tokens: int
    microbatch_tokens: int
    logits_chunk: int
    updates: int
    """Updates that are timed."""


WORKLOADS = {
    "cuda": Workload(
        shapes=("0.5B", "1.5B"),
        prompt_tokens=1024,
        answer_tokens=384,
        update_tokens=32_768,
        microbatch_tokens=8192,
        logits_chunk=2**28,
        updates=3,
    ),
    "cpu": Workload(
        shapes=("0.5B",),
        prompt_tokens=64,
        answer_tokens=16,
        update_tokens=384,
        microbatch_tokens=384,
        logits_chunk=2**25,
        updates=1,
    ),
    "quick": Workload(
        shapes=("tiny",),
        prompt_tokens=32,
        answer_tokens=8,
        update_tokens=192,
        microbatch_tokens=96,
        logits_chunk=2**25,
        updates=1,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Update:
    """The rows of an update, and what they cost."""

    rows: list[Sequence]
    computed_tokens: int
    """A shared prompt counts once."""
    trained_tokens: int
    keys: float
    """Sum over the computed tokens of the tokens that each attends to."""


def grouped_update(workload: Workload) -> Update:
    """Draw groups of answers with a common prompt."""
    rng = np.random.default_rng(0)
    prompt, answer = workload.prompt_tokens, workload.answer_tokens
    group_tokens = prompt + GROUP * answer
    num_groups = workload.update_tokens // group_tokens
    rows = [each for _ in range(num_groups) for each in group(rng, prompt, answer)]
    answer_keys = answer * prompt + answer**2 / 2
    return Update(
        rows=rows,
        computed_tokens=num_groups * group_tokens,
        trained_tokens=len(rows) * answer,
        keys=num_groups * (prompt**2 / 2 + GROUP * answer_keys),
    )


def plain_update(workload: Workload) -> Update:
    """Draw rows of the same length without a common prefix."""
    rng = np.random.default_rng(0)
    row_tokens = workload.prompt_tokens + workload.answer_tokens
    num_rows = workload.update_tokens // row_tokens
    return Update(
        rows=[row(draw(rng, row_tokens), workload.answer_tokens) for _ in range(num_rows)],
        computed_tokens=num_rows * row_tokens,
        trained_tokens=num_rows * workload.answer_tokens,
        keys=num_rows * row_tokens**2 / 2,
    )


UPDATES: dict[str, Callable[[Workload], Update]] = {
    "groups of 8": grouped_update,
    "plain rows": plain_update,
}


def main() -> None:
    """Measure every shape, with gradient checkpointing off and on."""
    run = parse_part(__doc__ or "")
    workload = WORKLOADS["quick" if run.quick else run.device]
    world = World.init(threads=torch.get_num_threads(), seed=0, is_alone=True)
    for name in workload.shapes:
        folder = make_model(run.scratch / f"model-{name}", SHAPES[name], device=run.device)
        for checkpointing in (False, True):
            title = f"{name}, checkpointing {'on' if checkpointing else 'off'}"
            measure(run, title, folder, SHAPES[name], workload, checkpointing=checkpointing)
    world.destroy()


def measure(
    run: PartRun, title: str, folder: Path, shape: Shape, workload: Workload, *, checkpointing: bool
) -> None:
    """Measure both kinds of rows with one engine; report running out of memory."""
    try:
        engine = make_engine(folder, workload, checkpointing=checkpointing)
        for kind, draw_update in UPDATES.items():
            result = time_updates(engine, shape, draw_update(workload), workload.updates)
            run.report(f"{title}, {kind}", result)
    except torch.cuda.OutOfMemoryError:
        run.report(title, "out of memory")
    engine = None
    gc.collect()
    if run.device == "cuda":
        torch.cuda.empty_cache()


def make_engine(folder: Path, workload: Workload, *, checkpointing: bool) -> FSDPEngine:
    """Return an engine that trains the model of a folder."""
    config = FSDPConfig(
        dtype="bfloat16",
        layout="packed",
        gradient_checkpointing=checkpointing,
        max_tokens_per_microbatch=workload.microbatch_tokens,
        logits_chunk=workload.logits_chunk,
    )
    training = Training(optimizer=OptimizerConfig(), lr=1e-6, total_updates=100)
    return FSDPEngine(config, model_path=str(folder), seed=0, training=training)


def time_updates(
    engine: FSDPEngine, shape: Shape, update: Update, num_updates: int
) -> dict[str, Any]:
    """Time whole updates: forward, backward and optimizer; return the medians.

    Raises:
        RuntimeError: A gradient is not finite, so that the optimizer skipped the update.
    """
    uses_gpu = engine.device.type == "cuda"
    if uses_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds = list[float]()
    stats = dict[str, float]()
    for _ in range(1 + num_updates):
        started = time.perf_counter()
        stats = engine.train_batch(update.rows, LOSS)
        if uses_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        if stats["skipped_update"]:
            raise RuntimeError("the gradient is not finite")
    update_s = statistics.median(seconds[1:])
    result: dict[str, Any] = {
        "update_s": update_s,
        "tokens_per_s": sum(len(row.tokens) for row in update.rows) / update_s,
        "computed_tokens_per_s": stats["computed_tokens"] / update_s,
        "microbatches": stats["microbatches"],
    }
    operations = training_operations(
        shape,
        computed_tokens=update.computed_tokens,
        trained_tokens=update.trained_tokens,
        keys=update.keys,
    )
    if uses_gpu:
        result["tflops"] = operations / update_s / 1e12
        result["mfu"] = mfu(torch.cuda.get_device_name(), result["tflops"])
        result["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return result


def mfu(device_name: str, tflops: float) -> float | None:
    """Return the share of a GPU's peak; None if the table does not have the GPU."""
    peaks = [peak for name, peak in PEAKS.items() if name in device_name]
    return tflops / max(peaks) if peaks else None


if __name__ == "__main__":
    main()
