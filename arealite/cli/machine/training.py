"""Checks of the train engine against plain transformers in float32 on the CPU."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from arealite.api.engine import LossInput, Sequence, Training
from arealite.api.engine_config import FSDPConfig, LoRAConfig, OptimizerConfig
from arealite.cli.machine.bench import SEED, Bench
from arealite.cli.machine.models import make_models
from arealite.impl.engine.attention import HAS_FLASH_ATTN
from arealite.impl.engine.fsdp import FSDPEngine
from arealite.impl.trainer.base import read_engines, write_engines

LR = 0.5
BOUNDS = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.05}
"""Largest difference of a log-probability from the reference."""
SGD = OptimizerConfig(type="sgd", beta1=0.0, clip_grad_norm=0.0, warmup_steps=0)


def reference(bench: Bench) -> None:
    """Make the models; compute log-probabilities before and after an update in plain torch."""
    if bench.device.type == "cuda":
        found = torch.cuda.get_device_properties(bench.device)
        bench.note("device", f"{found.name}, {found.total_memory >> 30} GiB, {HAS_FLASH_ATTN=}")
        bench.note("nccl", str(torch.cuda.nccl.version()))  # pyright: ignore
    make_models(bench)
    rows = make_rows(bench)
    for name in ("dense", "window"):
        model: Any = AutoModelForCausalLM.from_pretrained(
            bench.folder / name, dtype=torch.float32, attn_implementation="eager"
        )
        before = [_logprobs(model, row) for row in rows]
        weights = [torch.from_numpy(row.fields["loss_weight"][1:]) for row in rows]
        sum(-(a * w).sum() for a, w in zip(before, weights, strict=True)).backward()
        squares = 0.0
        with torch.no_grad():
            for parameter in model.parameters():
                squares += float(parameter.grad.square().sum())
                parameter -= LR * parameter.grad
            after = [_logprobs(model, row) for row in rows]
        first, second = (torch.cat(part).detach().numpy() for part in (before, after))
        path = bench.folder / f"{name}.npz"
        np.savez(path, before=first, after=second, grad_norm=squares**0.5)
        bench.note(f"{name}: mean change by the update", float(np.abs(second - first).mean()))


def update(bench: Bench, **options: Any) -> None:
    """Compare log-probabilities before and after one update, and the gradient's norm."""
    if "lora" in options:
        options["lora"] = LoRAConfig(rank=options["lora"])
    rows = make_rows(bench)
    lengths, mine = split(bench, rows)
    engine = make_engine(bench, "window", **options)
    expected = np.load(bench.folder / "window.npz")
    bounds = np.cumsum([0, *(len(row.tokens) - 1 for row in rows)])
    bound = BOUNDS[options.get("dtype", "float32")]

    def compare(name: str, key: str) -> None:
        found = engine.forward([rows[i] for i in mine], lengths)["logprobs"]
        errors = [
            float(np.abs(row[1:] - expected[key][bounds[i] : bounds[i + 1]]).max())
            for i, row in zip(mine, found, strict=True)
        ]
        bench.bound(name, max(errors, default=0.0), bound)

    compare("error", "before")
    stats = engine.train_batch([rows[i] for i in mine], lengths, loss)
    if "lora" not in options:
        compare("error after the update", "after")
        error = abs(stats["grad_norm"] / float(expected["grad_norm"]) - 1)
        bench.bound("error of the gradient's norm", error, bound)
    repeated = [rows[i] for i in mine] * 4
    began = time.perf_counter()
    counted = engine.train_batch(repeated, [each * 4 for each in lengths], loss)
    bench.synchronize()
    bench.note("tokens/s", round(counted["tokens"] / (time.perf_counter() - began)))


def replay(bench: Bench) -> None:
    """Train the same batches twice; the parameters must be equal bit for bit."""
    found = [_train_twice(bench).fingerprint() for _ in range(2)]
    what = "two equal trainings end with different parameters"
    bench.require(found[0] == found[1], f"{what}: `arealite replay` fails on this machine")


def save_and_load(bench: Bench) -> None:
    """Save between two updates; a resumed engine must end with the same parameters."""
    rows, path = make_rows(bench), checkpoint_folder(bench, bench.world.size)
    lengths, mine = split(bench, rows)
    engine = _train_twice(bench)
    began = time.perf_counter()
    write_engines(path, {".": engine}, {"step": 1}, bench.world)
    bench.note("save s", time.perf_counter() - began)
    engine.train_batch([rows[i] for i in mine], lengths, loss)
    again = make_engine(bench, optimizer=OptimizerConfig(warmup_steps=0))
    began = time.perf_counter()
    read_engines(path, {".": again})
    bench.note("load s", time.perf_counter() - began)
    again.train_batch([rows[i] for i in mine], lengths, loss)
    same = engine.fingerprint() == again.fingerprint()
    bench.require(same, "a resumed engine ends with other parameters")
    logprobs = engine.forward(rows, [[len(row.tokens) for row in rows]] * bench.world.size)
    if bench.world.is_rank0:
        np.save(path / "after.npy", np.concatenate(logprobs["logprobs"]))


def resume(bench: Bench, *, source: int) -> None:
    """Load the checkpoint of `source` ranks, update, and compare the log-probabilities."""
    rows, path = make_rows(bench), checkpoint_folder(bench, source)
    lengths, mine = split(bench, rows)
    engine = make_engine(bench, optimizer=OptimizerConfig(warmup_steps=0))
    read_engines(path, {".": engine})
    engine.train_batch([rows[i] for i in mine], lengths, loss)
    everything = [[len(row.tokens) for row in rows]] * bench.world.size
    found = np.concatenate(engine.forward(rows, everything)["logprobs"])
    error = np.abs(found - np.load(path / "after.npy")).max()
    bench.bound("error", float(error), BOUNDS["float32"])


def make_rows(bench: Bench) -> list[Sequence]:
    """Draw rows of different lengths, some longer than the window; loss on scattered tokens."""
    rng, longest = np.random.default_rng(SEED), 40 if bench.quick else 300
    rows = list[Sequence]()
    for _ in range(12):
        length = int(rng.integers(3, longest))
        mask = rng.random(length) < 0.6
        mask[0], mask[-1] = False, True
        weight = {"loss_weight": (mask * rng.normal(0.5, 1.0, length)).astype(np.float32)}
        tokens = rng.integers(3, 90, length).astype(np.int32)
        rows.append(Sequence(tokens, mask, float(rng.uniform(0.7, 1.3)), weight))
    total = sum(int(row.loss_mask.sum()) for row in rows)
    for row in rows:
        row.fields["loss_weight"] /= total
    return rows


def split(bench: Bench, rows: list[Sequence]) -> tuple[list[list[int]], list[int]]:
    """Return (lengths of the rows of each rank, indices of this rank's rows)."""
    size, rank = bench.world.size, bench.world.rank
    parts = [range(r, len(rows), size) for r in range(size)]
    return [[len(rows[i].tokens) for i in part] for part in parts], [*parts[rank]]


def make_engine(
    bench: Bench, model: str = "dense", *, optimizer: OptimizerConfig = SGD, **options: Any
) -> FSDPEngine:
    """Load a model of the bench; small micro-batches, so that there are several."""
    config = FSDPConfig(**{"max_tokens_per_microbatch": 128, **options})
    training = Training(optimizer, LR if optimizer is SGD else 1e-3, 1000)
    path = str(bench.folder / model)
    return FSDPEngine(config, model_path=path, seed=SEED, training=training)


def checkpoint_folder(bench: Bench, ranks: int) -> Path:
    """Return the folder of the checkpoint that `ranks` ranks write."""
    return bench.folder / "checkpoints" / f"ranks-{ranks}"


def loss(batch: LossInput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the weighted sum of negative log-probabilities."""
    total = -(batch.outputs["logprobs"] * batch.fields["loss_weight"]).sum()
    return total, {"loss": total.detach()}


def _train_twice(bench: Bench) -> FSDPEngine:
    rows = make_rows(bench)
    lengths, mine = split(bench, rows)
    engine = make_engine(bench, optimizer=OptimizerConfig(warmup_steps=0))
    for _ in range(2):
        engine.train_batch([rows[i] for i in mine], lengths, loss)
    return engine


def _logprobs(model: Any, row: Sequence) -> torch.Tensor:
    """Return the log-probabilities of tokens 1 … T − 1, 0 outside the loss mask."""
    tokens = torch.from_numpy(row.tokens.astype(np.int64))
    logits = model(tokens[None, :-1]).logits[0].float() / row.temperature
    found = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    return found * torch.from_numpy(row.loss_mask[1:])
