"""Measurements: bandwidths, speed and memory of a training step."""

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from arealite.api.config import ExperimentConfig
from arealite.api.engine import Sequence
from arealite.base.model_folder import read_model
from arealite.base.names import TMPFS
from arealite.cli import configs, estimates
from arealite.cli.machine.bench import Bench
from arealite.cli.machine.training import ADAMW, make_engine, weighted_loss
from arealite.cli.presets import CONFIG_DIR
from arealite.impl.demo.tiny_model import TinyModel, make_tiny_model

PEAKS = {
    **{"B200": 2250, "H200": 989, "H100": 989, "H800": 989, "A100": 312, "A800": 312},
    **{"L40S": 362, "L4": 121, "A10": 125, "RTX 4090": 165, "MI300X": 1307},
}
"""Peak TFLOP/s of GPUs: dense bfloat16 with float32 accumulation, by a part of the GPU's name."""
SLACK = 64 << 20
"""Bytes that estimates may lack: buffers of libraries, and memory that the allocator keeps."""


def copies(bench: Bench) -> None:
    """Measure copies in memory and to files."""
    host, other = (torch.ones(_size(bench), dtype=torch.uint8) for _ in range(2))
    _rate(bench, "host to host", lambda: other.copy_(host))
    for name, folder in {"disk": bench.folder, "tmpfs": TMPFS}.items():
        path = folder / f"arealite-machine-{os.getpid()}"
        bench.stack.callback(path.unlink, missing_ok=True)
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
    on_gpu, quick, path = bench.device.type == "cuda", bench.plan["quick"], bench.folder / "large"
    hidden, layers, tokens = (256, 4, 256) if quick else (512, 8, 2048)
    if on_gpu and not quick:  # 0.3 B parameters; 1.1 B on GPUs with more than 40 GiB
        memory = torch.cuda.get_device_properties(bench.device).total_memory
        hidden, layers, tokens = 1024 << (memory >> 30 > 40), 16, 8192
    sizes = {"hidden": hidden, "layers": layers, "heads": hidden // 64, "vocab_size": 8000}
    make_tiny_model(path, TinyModel(context=4096, **sizes))
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
    lengths = [[len(row) for row in ids]]
    seconds = bench.seconds(lambda: engine.train_batch(rows, lengths, weighted_loss), repeat=2)
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


def _size(bench: Bench) -> int:
    return 16 << 20 if bench.plan["quick"] else 256 << 20


def _rate(bench: Bench, name: str, call: Callable[[], object]) -> None:
    bench.numbers[f"{name} GB/s"] = _size(bench) / bench.seconds(call) / 1e9


def _write(path: Path, data: torch.Tensor) -> None:
    with path.open("wb") as file:
        file.write(memoryview(data.numpy()))
        os.fsync(file.fileno())


def _status(key: str) -> int:
    """Return a line of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])
