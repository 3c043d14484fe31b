"""Checks and measurements of the train engine.

The reference is plain transformers in float32 on the CPU.

Shape letters: T = tokens of a row, N = loss tokens of a micro-batch.
"""
# pyright: basic

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from arealite.api.engine import LossInput, Sequence, TrainEngine, Training, engines
from arealite.api.engine_config import FSDPConfig, OptimizerConfig
from arealite.api.experiment_config import ExperimentConfig
from arealite.base.host import return_free_memory
from arealite.base.model_folder import read_model
from arealite.base.trial_files import TMPFS
from arealite.cli import configs
from arealite.cli.options import CONFIG_DIR
from arealite.ext.demo.tiny_model import TinyModel, make_tiny_model
from arealite.ext.machine import estimates
from arealite.ext.machine.bench import SEED, Bench
from arealite.ext.prefix_trees.attention import HAS_FLASH_ATTN
from arealite.ext.self_check.free_memory import kernel_bytes
from arealite.impl.trainer.base import read_engines, write_engines

LR = 0.5
"""Learning rate of SGD: one update changes a log-probability by about 1."""
SGD = OptimizerConfig(
    type="sgd",
    beta1=0.0,
    clip_grad_norm=0.0,
    warmup_steps=0,
)
ADAMW = OptimizerConfig(warmup_steps=0)
BOUNDS = {
    "float32": 1e-3,
    "bfloat16": 0.5,
    "float16": 0.1,
}
"""Largest difference of a log-probability from the reference."""
PEAKS = {
    "B200": 2250,
    "H200": 989,
    "H100": 989,
    "A100": 312,
    "L40S": 362,
    "A10": 125,
}
"""Peak TFLOP/s of GPUs: dense bfloat16 with float32 accumulation, by a part of the GPU's name."""
SLACK = 64 << 20
"""Bytes that the estimate leaves out: buffers of libraries, and memory that allocators keep."""
VOCAB_SIZE = 8000
"""Vocabulary of the model of `step`."""
NUM_STEP_ROWS = 8
"""Rows of the batch of `step`."""
PROCESS_STATUS = Path("/proc/self/status")


@dataclass(frozen=True, kw_only=True)
class StepSize:
    """Size of the model of `step`, and of its batch."""

    hidden: int
    layers: int
    tokens: int
    """Tokens of a batch, which is one micro-batch."""


# ------------------------------------------------------------ checks


def reference(bench: Bench) -> None:
    """Make the models; compute log-probabilities before and after an update in plain torch."""
    if bench.device.type == "cuda":
        bench.numbers["device"] = torch.cuda.get_device_name()
        bench.numbers["flash_attn"] = HAS_FLASH_ATTN
    make_models(bench)
    load: Any = AutoModelForCausalLM.from_pretrained
    model = load(
        bench.folder / "window",
        dtype=torch.float32,
        attn_implementation="eager",
    )
    rows = make_rows(bench)
    weights = np.concatenate([row.fields["loss_weight"] for row in rows])
    before = _logprobs(model, rows)
    loss = -(before * torch.from_numpy(weights)).sum()
    loss.backward()
    with torch.no_grad():
        squared_norm = 0.0
        for parameter in model.parameters():
            squared_norm += float(parameter.grad.square().sum())
            parameter -= LR * parameter.grad
        after = _logprobs(model, rows)
    np.savez(
        bench.folder / "window.npz",
        norm=squared_norm**0.5,
        before=before.detach(),
        after=after,
    )
    change = (after - before).abs()
    bench.numbers["mean change by the update"] = float(change.mean())


def update(bench: Bench, **options: Any) -> None:
    """Compare log-probabilities before and after one update, and the gradient's norm."""
    engine = make_engine(bench, "window", **options)
    expected = np.load(bench.folder / "window.npz")
    bound = BOUNDS[options.get("dtype", FSDPConfig().dtype)]
    bench.bound("error", _max_error(bench, engine, expected["before"]), bound)
    stats = train(bench, engine)
    error_after = _max_error(bench, engine, expected["after"])
    bench.bound("error after the update", error_after, bound)
    norm_ratio = stats["grad_norm"] / expected["norm"]
    bench.bound("error of the gradient's norm", abs(norm_ratio - 1), bound)
    seconds = bench.seconds(lambda: train(bench, engine))
    bench.numbers["tokens/s"] = round(stats["tokens"] / seconds)


def replay(bench: Bench) -> None:
    """Train two engines with the same rows; their parameters must be equal bit for bit."""
    twins = [make_engine(bench, optimizer=ADAMW) for _ in range(2)]
    for engine in twins * 2:
        train(bench, engine)
    fingerprints = {engine.fingerprint() for engine in twins}
    bench.require(
        len(fingerprints) == 1,
        "equal updates give different parameters: `arealite replay` reports differences here",
    )


def save(bench: Bench) -> None:
    """Write a checkpoint between two updates, and the log-probabilities after them."""
    engine = make_engine(bench, optimizer=ADAMW)
    path = bench.folder / f"ranks-{bench.world.size}"
    train(bench, engine)
    write_engines(path, {".": engine}, {"step": 1}, bench.world)
    train(bench, engine)
    np.save(path / f"after-{bench.world.rank}.npy", outputs(bench, engine))


def resume(bench: Bench, *, source: int) -> None:
    """Load the checkpoint of `source` ranks, and repeat the update after it."""
    engine = make_engine(bench, optimizer=ADAMW)
    path = bench.folder / f"ranks-{source}"
    read_engines(path, {".": engine})
    train(bench, engine)
    expected = np.load(path / "after-0.npy")
    error = _max_error(bench, engine, expected)
    is_same_size = source == bench.world.size
    bound = 0.0 if is_same_size else BOUNDS["float32"]
    bench.bound("error", error, bound)


# ------------------------------------------------------------ measurements


def copies(bench: Bench) -> None:
    """Measure copies in memory and to files."""
    host = _host_buffer(bench)
    destination = _host_buffer(bench)
    _rate(bench, "host to host", lambda: destination.copy_(host))
    folders = {"disk": bench.folder, "tmpfs": TMPFS}
    for name, folder in folders.items():
        path = folder / f"arealite-machine-{os.getpid()}"
        bench.stack.callback(path.unlink)
        _rate(bench, f"write to {name}", lambda path=path: _write(path, host))
        _rate(bench, f"read from {name}", path.read_bytes)


def gpu_copies(bench: Bench) -> None:
    """Measure copies to, from and between GPUs."""
    host = _host_buffer(bench)
    pinned = host.pin_memory()
    device = host.to(bench.device)
    _rate(bench, "host to device", lambda: device.copy_(host))
    _rate(
        bench,
        "pinned host to device",
        lambda: device.copy_(pinned, non_blocking=True),
    )
    _rate(
        bench,
        "device to pinned host",
        lambda: pinned.copy_(device, non_blocking=True),
    )
    for other in range(torch.cuda.device_count()):
        peer = torch.zeros_like(device, device=f"cuda:{other}")
        _rate(bench, f"cuda:0 to cuda:{other}", lambda peer=peer: peer.copy_(device))
        bench.require(peer.all(), f"a copy from cuda:0 to cuda:{other} is not equal")


def all_reduce(bench: Bench) -> None:
    """Measure an all-reduce; check its sum."""
    ones = torch.ones(_copy_bytes(bench) // 4, device=bench.device)
    _rate(bench, "all-reduce", lambda: dist.all_reduce(ones.fill_(1.0)))
    is_sum = ones == bench.world.size
    bench.require(is_sum.all(), "the sum over ranks is wrong")


def step(bench: Bench, *, dtype: str) -> None:
    """Train a larger model with AdamW: tokens/s, share of the peak, memory against the estimate."""
    on_gpu = bench.device.type == "cuda"
    size = _step_size(bench)
    path = bench.folder / "large"
    shape = TinyModel(
        hidden=size.hidden,
        layers=size.layers,
        heads=size.hidden // 64,
        vocab_size=VOCAB_SIZE,
        context=4096,
    )
    make_tiny_model(path, shape)
    model_config, shapes = read_model(str(path))
    overrides = [
        f"trainer.ppo.engine.fsdp.dtype={dtype}",
        f"trainer.ppo.engine.fsdp.max_tokens_per_microbatch={size.tokens}",
    ]
    config = configs.load(ExperimentConfig, CONFIG_DIR / "async_ppo.yaml", overrides)
    trainer_need = next(estimates.memory(config, model_config, shapes))
    estimated_bytes = trainer_need.size

    return_free_memory()  # of earlier rows
    bytes_before = (
        torch.cuda.memory_allocated() if on_gpu else kernel_bytes(PROCESS_STATUS, "VmRSS")
    )
    engine = make_engine(
        bench,
        "large",
        optimizer=ADAMW,
        dtype=dtype,
        max_tokens_per_microbatch=size.tokens,
    )
    _reset_peak_bytes(on_gpu=on_gpu)
    rows = _step_rows(size.tokens)
    seconds = bench.seconds(lambda: engine.train_batch(rows, weighted_loss))
    peak_bytes = (
        torch.cuda.max_memory_allocated() if on_gpu else kernel_bytes(PROCESS_STATUS, "VmHWM")
    )
    used_bytes = peak_bytes - bytes_before
    bench.numbers["memory GB"] = used_bytes / 1e9
    bench.numbers["estimated GB"] = estimated_bytes / 1e9
    bench.bound(
        "memory / estimate",
        used_bytes / estimated_bytes,
        1.5 + SLACK / estimated_bytes,
    )

    num_parameters = estimates.count(shapes)
    multiplications = size.tokens * _multiplications_per_token(size, num_parameters)
    tflops = 6 * multiplications / seconds / 1e12
    bench.numbers["tokens/s"] = round(size.tokens / seconds)
    bench.numbers["TFLOP/s"] = tflops
    # Some CPUs need a hundred times longer for a product in bfloat16 than in float32.
    side = 4 * size.hidden if on_gpu else size.hidden
    square = torch.randn(side, side, device=bench.device)
    bench.numbers["of a product"] = _tflops_of_square(bench, square.to(getattr(torch, dtype)))
    device_name = torch.cuda.get_device_name() if on_gpu else "CPU"
    bench.numbers["MFU"] = _mfu(tflops, device_name, dtype)


def _step_size(bench: Bench) -> StepSize:
    """Return a size that fits the device."""
    on_gpu = bench.device.type == "cuda"
    if on_gpu and not bench.plan["quick"]:
        gpu_bytes = torch.cuda.get_device_properties(bench.device).total_memory
        if gpu_bytes > 60 << 30:  # 1.1 B parameters and 44 GB
            return StepSize(hidden=2048, layers=16, tokens=8192)
        return StepSize(hidden=1024, layers=16, tokens=4096)  # 0.3 B parameters and 11 GB
    if bench.plan["quick"]:
        return StepSize(hidden=256, layers=2, tokens=64)
    return StepSize(hidden=512, layers=8, tokens=2048)


def _reset_peak_bytes(*, on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def _step_rows(num_tokens: int) -> list[Sequence]:
    """Return rows of equal length, together `num_tokens`; each token has the same weight."""
    length = num_tokens // NUM_STEP_ROWS
    rng = np.random.default_rng(0)
    tokens = rng.integers(3, VOCAB_SIZE, (NUM_STEP_ROWS, length))
    loss_weights = np.full(length, 1 / num_tokens, np.float32)
    return [
        Sequence(
            tokens=row,
            loss_mask=np.arange(length) > 0,
            temperature=1.0,
            fields={"loss_weight": loss_weights},
        )
        for row in tokens.astype(np.int32)
    ]


def _multiplications_per_token(size: StepSize, num_parameters: int) -> int:
    """Return the multiplications of a forward pass for a token, by parameters and in attention.

    The embedding is a look-up. A forward and backward pass has 6 operations for a multiplication.
    """
    length = size.tokens // NUM_STEP_ROWS
    # Causal attention adds half of 12 · layers · hidden · length operations for a token.
    attention = size.layers * size.hidden * length
    return num_parameters - VOCAB_SIZE * size.hidden + attention


def _tflops_of_square(bench: Bench, matrix: torch.Tensor) -> float:
    """Measure the product of a square matrix with itself."""
    operations = 2 * len(matrix) ** 3
    return operations / bench.seconds(lambda: matrix @ matrix) / 1e12


def _mfu(tflops: float, device_name: str, dtype: str) -> float | str:
    """Return the share of the device's peak, or a text if its peak in `dtype` is unknown."""
    peaks = [peak for part, peak in PEAKS.items() if part in device_name]
    if not peaks or dtype != "bfloat16":
        return f"unknown ({device_name}, {dtype})"
    return tflops / max(peaks)


# ------------------------------------------------------------ models, rows, engines


def make_models(bench: Bench) -> None:
    """Write `dense`, and `window`, in which every other layer has a sliding window.

    Weights have a scale at which attention is not uniform, so that a wrong mask is seen. No token
    ends an answer: a generation has exactly the length that is requested.
    """
    is_quick = bench.plan["quick"]
    hidden = 64 if is_quick else 256
    layers = 2 if is_quick else 4
    shape = TinyModel(
        hidden=hidden,
        layers=layers,
        kv_heads=2,
        context=4096,
        init_std=1.2 / hidden**0.5,
    )
    window: dict[str, Any] = {
        "use_sliding_window": True,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
    }
    no_end = {"eos_token_id": None, "eos_token": None}
    models = {"dense": {}, "window": window}
    for name, config_changes in models.items():
        folder = bench.folder / name
        make_tiny_model(folder, shape)
        _change_json(folder / "config.json", {"eos_token_id": None} | config_changes)
        _change_json(folder / "generation_config.json", no_end)
        _change_json(folder / "tokenizer_config.json", no_end)


def _change_json(path: Path, changes: dict[str, Any]) -> None:
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | changes))


def make_rows(bench: Bench) -> list[Sequence]:
    """Draw rows of different lengths, some longer than the window; loss on scattered tokens."""
    rng = np.random.default_rng(SEED)
    longest = 40 if bench.plan["quick"] else 200
    rows = list[Sequence]()
    for length in rng.integers(3, longest, 12):
        mask = rng.random(length) < 0.6
        mask[0] = False
        mask[-1] = True
        weights = mask * rng.normal(0.5, 1.0, length) / 6 / longest
        row = Sequence(
            tokens=rng.integers(3, 90, length).astype(np.int32),
            loss_mask=mask,
            temperature=float(rng.uniform(0.7, 1.3)),
            fields={"loss_weight": weights.astype(np.float32)},
        )
        rows.append(row)
    return rows


def make_engine(
    bench: Bench,
    model: str = "dense",
    *,
    optimizer: OptimizerConfig = SGD,
    **options: Any,
) -> TrainEngine:
    """Load a model of the bench; small micro-batches, so that there are several."""
    fsdp_options: Any = {"max_tokens_per_microbatch": 128} | options
    return engines.get("fsdp")(
        FSDPConfig(**fsdp_options),
        model_path=str(bench.folder / model),
        seed=SEED,
        training=Training(
            optimizer=optimizer,
            lr=LR if optimizer is SGD else 1e-3,
            total_updates=1000,
        ),
        head="lm",
    )


def train(bench: Bench, engine: TrainEngine) -> dict[str, float]:
    """Apply one update on the rows, which the ranks share; return its stats."""
    rows = make_rows(bench)
    rows_of_rank = rows[bench.world.rank :: bench.world.size]
    return engine.train_batch(rows_of_rank, weighted_loss)


def outputs(bench: Bench, engine: TrainEngine) -> np.ndarray:
    """Return the log-probabilities of all rows; every rank computes them."""
    logprobs_by_row = engine.forward(make_rows(bench))["logprobs"]
    return np.concatenate(logprobs_by_row)


def _max_error(bench: Bench, engine: TrainEngine, expected: np.ndarray) -> float:
    """Return the largest difference of the log-probabilities of all rows from `expected`."""
    differences = np.abs(outputs(bench, engine) - expected)
    return differences.max()


def weighted_loss(batch: LossInput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the weighted sum of negative log-probabilities."""
    weighted_N = batch.outputs["logprobs"] * batch.fields["loss_weight"]
    return -weighted_N.sum(), {}


def _logprobs(model: Any, rows: list[Sequence]) -> torch.Tensor:
    """Return the log-probabilities of the tokens of all rows."""
    return torch.cat([_logprobs_of_row(model, row) for row in rows])


def _logprobs_of_row(model: Any, row: Sequence) -> torch.Tensor:
    """Return the log-probability [T] of each token, 0 outside the loss mask."""
    tokens_T = torch.from_numpy(row.tokens).long()
    logits = model(tokens_T[None]).logits[0, :-1]
    logprobs = (logits / row.temperature).log_softmax(-1)
    next_tokens = tokens_T[1:, None]
    sampled_logprobs = logprobs.gather(1, next_tokens)[:, 0]
    logprobs_T = torch.cat([torch.zeros(1), sampled_logprobs])
    return logprobs_T * torch.from_numpy(row.loss_mask)


def _host_buffer(bench: Bench) -> torch.Tensor:
    return torch.ones(_copy_bytes(bench), dtype=torch.uint8)


def _copy_bytes(bench: Bench) -> int:
    return 16 << 20 if bench.plan["quick"] else 256 << 20


def _rate(bench: Bench, name: str, call: Callable[[], object]) -> None:
    seconds = bench.seconds(call)
    bench.numbers[f"{name} GB/s"] = _copy_bytes(bench) / seconds / 1e9


def _write(path: Path, tensor: torch.Tensor) -> None:
    with path.open("wb") as file:
        file.write(tensor.numpy().data)
        os.fsync(file.fileno())
