"""Checks and measurements of the train engine.

The reference is plain transformers in float32 on the CPU.
"""
# pyright: basic

import ctypes
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from arealite.api.config import ExperimentConfig
from arealite.api.engine import LossInput, Sequence, Training
from arealite.api.engine_config import FSDPConfig, OptimizerConfig
from arealite.base.model_folder import read_model
from arealite.base.names import TMPFS
from arealite.cli import configs, estimates
from arealite.cli.machine.bench import SEED, Bench
from arealite.cli.presets import CONFIG_DIR
from arealite.impl.demo.tiny_model import TinyModel, make_tiny_model
from arealite.impl.engine.attention import HAS_FLASH_ATTN
from arealite.impl.engine.fsdp import FSDPEngine
from arealite.impl.trainer.base import read_engines, write_engines

LR = 0.5
"""Learning rate of SGD: one update changes a log-probability by about 1."""
SGD = OptimizerConfig(type="sgd", beta1=0.0, clip_grad_norm=0.0, warmup_steps=0)
ADAMW = OptimizerConfig(warmup_steps=0)
BOUNDS = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.1}
"""Largest difference of a log-probability from the reference."""
PEAKS = {"B200": 2250, "H200": 989, "H100": 989, "A100": 312, "L40S": 362, "A10": 125}
"""Peak TFLOP/s of GPUs: dense bfloat16 with float32 accumulation, by a part of the GPU's name."""
SLACK = 64 << 20
"""Bytes that the estimate leaves out: buffers of libraries, and memory that allocators keep."""

# ------------------------------------------------------------ checks


def reference(bench: Bench) -> None:
    """Make the models; compute log-probabilities before and after an update in plain torch."""
    if bench.device.type == "cuda":
        bench.numbers |= {"device": torch.cuda.get_device_name(), "flash_attn": HAS_FLASH_ATTN}
    make_models(bench)
    load: Any = AutoModelForCausalLM.from_pretrained
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = load(bench.folder / "window", **options)
    rows = make_rows(bench)
    weights = torch.from_numpy(np.concatenate([row.fields["loss_weight"] for row in rows]))
    before = torch.cat([_logprobs(model, row) for row in rows])
    (-(before * weights).sum()).backward()
    with torch.no_grad():
        norm = sum(float(each.grad.square().sum()) for each in model.parameters()) ** 0.5
        for parameter in model.parameters():
            parameter -= LR * parameter.grad
        after = torch.cat([_logprobs(model, row) for row in rows])
    np.savez(bench.folder / "window.npz", norm=norm, before=before.detach(), after=after)
    bench.numbers["mean change by the update"] = float((after - before).abs().mean())


def update(bench: Bench, **options: Any) -> None:
    """Compare log-probabilities before and after one update, and the gradient's norm."""
    engine, expected = make_engine(bench, "window", **options), np.load(bench.folder / "window.npz")
    bound = BOUNDS[engine.config.dtype]
    bench.bound("error", np.abs(outputs(bench, engine) - expected["before"]).max(), bound)
    stats = train(bench, engine)
    error = np.abs(outputs(bench, engine) - expected["after"]).max()
    bench.bound("error after the update", error, bound)
    error = abs(stats["grad_norm"] / expected["norm"] - 1)
    bench.bound("error of the gradient's norm", error, bound)
    seconds = bench.seconds(lambda: train(bench, engine))
    bench.numbers["tokens/s"] = round(stats["tokens"] / seconds)


def replay(bench: Bench) -> None:
    """Train two engines with the same rows; their parameters must be equal bit for bit."""
    engines = [make_engine(bench, optimizer=ADAMW) for _ in range(2)]
    for engine in engines * 2:
        train(bench, engine)
    found = {engine.fingerprint() for engine in engines}
    what = "equal updates give different parameters"
    bench.require(len(found) == 1, f"{what}: `arealite replay` reports differences here")


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
    error = np.abs(outputs(bench, engine) - np.load(path / "after-0.npy")).max()
    bench.bound("error", error, 0.0 if source == bench.world.size else BOUNDS["float32"])


# ------------------------------------------------------------ measurements


def copies(bench: Bench) -> None:
    """Measure copies in memory and to files."""
    host, other = (torch.ones(_size(bench), dtype=torch.uint8) for _ in range(2))
    _rate(bench, "host to host", lambda: other.copy_(host))
    for name, folder in {"disk": bench.folder, "tmpfs": TMPFS}.items():
        path = folder / f"arealite-machine-{os.getpid()}"
        bench.stack.callback(path.unlink)
        _rate(bench, f"write to {name}", lambda path=path: _write(path, host))
        _rate(bench, f"read from {name}", path.read_bytes)


def gpu_copies(bench: Bench) -> None:
    """Measure copies to, from and between GPUs."""
    host = torch.ones(_size(bench), dtype=torch.uint8)
    pinned, device = host.pin_memory(), host.to(bench.device)
    _rate(bench, "host to device", lambda: device.copy_(host))
    _rate(bench, "pinned host to device", lambda: device.copy_(pinned, non_blocking=True))
    _rate(bench, "device to pinned host", lambda: pinned.copy_(device, non_blocking=True))
    for other in range(torch.cuda.device_count()):
        there = torch.zeros_like(device, device=f"cuda:{other}")
        _rate(bench, f"cuda:0 to cuda:{other}", lambda there=there: there.copy_(device))
        bench.require(there.all(), f"a copy from cuda:0 to cuda:{other} is not equal")


def all_reduce(bench: Bench) -> None:
    """Measure an all-reduce; check its sum."""
    ones = torch.ones(_size(bench) // 4, device=bench.device)
    _rate(bench, "all-reduce", lambda: dist.all_reduce(ones.fill_(1.0)))
    bench.require((ones == bench.world.size).all(), "the sum over ranks is wrong")


def step(bench: Bench, *, dtype: str) -> None:
    """Train a larger model with AdamW: tokens/s, share of the peak, memory against the estimate."""
    on_gpu = bench.device.type == "cuda"
    path = bench.folder / "large"
    hidden, layers, tokens = (256, 2, 128) if bench.plan["quick"] else (512, 8, 2048)
    if on_gpu and not bench.plan["quick"]:  # 1.1 B parameters and 44 GB, or 0.3 B and 11 GB
        is_large = torch.cuda.get_device_properties(bench.device).total_memory > 60 << 30
        hidden, layers, tokens = (2048, 16, 8192) if is_large else (1024, 16, 4096)
    heads = hidden // 64
    context = 4096
    shape = TinyModel(hidden=hidden, layers=layers, heads=heads, vocab_size=8000, context=context)
    make_tiny_model(path, shape)
    fsdp = {"dtype": dtype, "max_tokens_per_microbatch": tokens}
    overrides = [f"trainer.ppo.engine.fsdp.{key}={value}" for key, value in fsdp.items()]
    config = configs.load(ExperimentConfig, CONFIG_DIR / "async_ppo.yaml", overrides)
    described, shapes = read_model(str(path))
    estimate = next(estimates.memory(config, described, shapes)).size

    ctypes.CDLL(None).malloc_trim(0)  # give freed memory of earlier rows back
    before = torch.cuda.memory_allocated() if on_gpu else _status("VmRSS")
    engine = make_engine(bench, "large", optimizer=ADAMW, **fsdp)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")
    ids = np.random.default_rng(0).integers(3, 8000, (8, tokens // 8)).astype(np.int32)
    weight = {"loss_weight": np.full(ids.shape[1], 1 / tokens, np.float32)}
    rows = [Sequence(row, np.arange(len(row)) > 0, 1.0, weight) for row in ids]
    seconds = bench.seconds(lambda: engine.train_batch(rows, weighted_loss))
    used = (torch.cuda.max_memory_allocated() if on_gpu else _status("VmHWM")) - before
    bench.numbers |= {"memory GB": used / 1e9, "estimated GB": estimate / 1e9}
    bench.bound("memory / estimate", used / estimate, 1.5 + SLACK / estimate)

    # Causal attention adds half of 12 · layers · hidden · length operations for a token.
    multiplied = estimates.count(shapes) - 8000 * hidden + layers * hidden * ids.shape[1]
    rate = 6 * multiplied * tokens / seconds / 1e12
    square = torch.randn(4 * hidden, 4 * hidden, device=bench.device).to(engine.dtype)
    product = 2 * len(square) ** 3 / bench.seconds(lambda: square @ square) / 1e12
    name = torch.cuda.get_device_name() if on_gpu else "CPU"
    peaks = [peak for part, peak in PEAKS.items() if part in name and dtype == "bfloat16"]
    bench.numbers |= {"tokens/s": round(tokens / seconds), "TFLOP/s": rate, "of a product": product}
    bench.numbers["MFU"] = rate / max(peaks) if peaks else f"unknown ({name}, {dtype})"


# ------------------------------------------------------------ models, rows, engines


def make_models(bench: Bench) -> None:
    """Write `dense`, and `window`, in which every other layer has a sliding window.

    Weights have a scale at which attention is not uniform, so that a wrong mask is seen. No token
    ends an answer: a generation has exactly the length that is requested.
    """
    hidden, layers = (64, 2) if bench.plan["quick"] else (256, 4)
    scale = 1.2 / hidden**0.5
    kinds = ["sliding_attention", "full_attention"] * (layers // 2)
    window = {"use_sliding_window": True, "sliding_window": 8, "layer_types": kinds}
    for name, changes in {"dense": {}, "window": window}.items():
        folder = bench.folder / name
        shape = TinyModel(hidden=hidden, layers=layers, kv_heads=2, context=4096, init_std=scale)
        make_tiny_model(folder, shape)
        for file in ("config.json", "generation_config.json", "tokenizer_config.json"):
            values = json.loads((folder / file).read_text()) | {"eos_token_id": None}
            values |= changes if file == "config.json" else {"eos_token": None}
            (folder / file).write_text(json.dumps(values))


def make_rows(bench: Bench) -> list[Sequence]:
    """Draw rows of different lengths, some longer than the window; loss on scattered tokens."""
    rng = np.random.default_rng(SEED)
    longest = 40 if bench.plan["quick"] else 200
    rows = list[Sequence]()
    for length in rng.integers(3, longest, 12):
        mask = (rng.random(length) < 0.6) & (np.arange(length) > 0)
        mask[-1] = True
        weight = (mask * rng.normal(0.5, 1.0, length) / 6 / longest).astype(np.float32)
        tokens = rng.integers(3, 90, length).astype(np.int32)
        rows.append(Sequence(tokens, mask, float(rng.uniform(0.7, 1.3)), {"loss_weight": weight}))
    return rows


def make_engine(
    bench: Bench, model: str = "dense", *, optimizer: OptimizerConfig = SGD, **options: Any
) -> FSDPEngine:
    """Load a model of the bench; small micro-batches, so that there are several."""
    values: Any = {"max_tokens_per_microbatch": 128} | options
    config = FSDPConfig(**values)
    training = Training(optimizer, LR if optimizer is SGD else 1e-3, 1000)
    return FSDPEngine(config, model_path=str(bench.folder / model), seed=SEED, training=training)


def train(bench: Bench, engine: FSDPEngine) -> dict[str, float]:
    """Apply one update on the rows, which the ranks share; return its stats."""
    rows = make_rows(bench)
    size = bench.world.size
    return engine.train_batch(rows[bench.world.rank :: size], weighted_loss)


def outputs(bench: Bench, engine: FSDPEngine) -> np.ndarray:
    """Return the log-probabilities of all rows; every rank computes them."""
    return np.concatenate(engine.forward(make_rows(bench))["logprobs"])


def weighted_loss(batch: LossInput) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the weighted sum of negative log-probabilities."""
    return -(batch.outputs["logprobs"] * batch.fields["loss_weight"]).sum(), {}


def _logprobs(model: Any, row: Sequence) -> torch.Tensor:
    """Return the log-probability of each token, 0 outside the loss mask."""
    tokens = torch.from_numpy(row.tokens.astype(np.int64))
    logits = model(tokens[None]).logits[0, :-1] / row.temperature
    found = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    return torch.cat([torch.zeros(1), found]) * torch.from_numpy(row.loss_mask)


def _size(bench: Bench) -> int:
    return 16 << 20 if bench.plan["quick"] else 256 << 20


def _rate(bench: Bench, name: str, call: Callable[[], object]) -> None:
    bench.numbers[f"{name} GB/s"] = _size(bench) / bench.seconds(call) / 1e9


def _write(path: Path, data: torch.Tensor) -> None:
    with path.open("wb") as file:
        file.write(data.numpy().data)
        os.fsync(file.fileno())


def _status(key: str) -> int:
    """Return a line of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])
