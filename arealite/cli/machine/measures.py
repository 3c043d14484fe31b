"""Measurements: bandwidths, speed and memory of a training step."""

import ctypes
import gc
import mmap
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from arealite.api.config import ExperimentConfig
from arealite.api.engine import Sequence
from arealite.api.engine_config import OptimizerConfig
from arealite.base.model_folder import read_model
from arealite.base.names import TMPFS
from arealite.cli import configs, estimates
from arealite.cli.machine.bench import Bench
from arealite.cli.machine.training import loss, make_engine
from arealite.cli.presets import CONFIG_DIR

PEAKS = {
    **{"B200": 2250, "GB200": 2500, "H200": 989, "H100": 989, "H800": 989, "A100": 312},
    **{"A800": 312, "L40S": 362, "L4": 121, "A10": 125, "RTX 4090": 165, "MI300X": 1307},
}
"""Peak TFLOP/s of GPUs: dense bfloat16 with float32 accumulation, by a part of the GPU's name."""
SLACK = 32 << 20
"""Bytes that estimates may lack: buffers of libraries, and memory that the allocator keeps."""


def copies(bench: Bench) -> None:
    """Measure copies in memory, to and from the GPU, and to files."""
    size = 16 << 20 if bench.quick else 256 << 20
    host, target = (torch.empty(size, dtype=torch.uint8) for _ in range(2))

    def rate(name: str, call: Callable[[], object]) -> None:
        bench.note(f"{name} GB/s", size / bench.seconds(call) / 1e9)

    rate("host to host", lambda: target.copy_(host))
    if bench.device.type == "cuda":
        pinned, device = host.pin_memory(), host.to(bench.device)
        rate("host to device", lambda: device.copy_(host))
        rate("pinned host to device", lambda: device.copy_(pinned, non_blocking=True))
        rate("device to pinned host", lambda: pinned.copy_(device, non_blocking=True))
        rate("device to device", lambda: device.clone())
        for other in range(1, torch.cuda.device_count()):
            there = device.to(f"cuda:{other}")
            rate(f"cuda:0 to cuda:{other}", lambda there=there: there.copy_(device))
            torch.cuda.synchronize(other)
            same = bool((there.to(bench.device) == device).all())
            bench.require(same, f"a copy from cuda:0 to cuda:{other} is not equal")
    block = memoryview(host.numpy())
    for name, folder in {"disk": bench.folder, "tmpfs": TMPFS}.items():
        if folder.is_dir():
            with tempfile.NamedTemporaryFile(dir=folder) as file:
                path = Path(file.name)
                rate(f"write to {name}", lambda path=path: _write(path, block))
                rate(f"read from {name} (cached)", path.read_bytes)


def all_reduce(bench: Bench) -> None:
    """Measure an all-reduce; check its sum."""
    size = 4 << 20 if bench.quick else 64 << 20
    numbers = torch.ones(size // 4, device=bench.device)
    seconds = bench.seconds(lambda: dist.all_reduce(numbers.fill_(1.0)))
    bench.note("backend", dist.get_backend())
    bench.note("all-reduce GB/s", size / seconds / 1e9)
    bench.require(bool((numbers == bench.world.size).all()), "the sum over ranks is wrong")


def step(bench: Bench, *, dtype: str) -> None:
    """Train `large` with AdamW: tokens/s, share of the peak, memory against the estimate."""
    (tokens, length), model = (256, 128) if bench.quick else (4096, 512), bench.folder / "large"
    folder = {"cluster.run_root": bench.folder, "model.path": model}
    fsdp = {"dtype": dtype, "max_tokens_per_microbatch": tokens}
    keys = {f"trainer.ppo.engine.fsdp.{key}": value for key, value in fsdp.items()}
    overrides = [f"{key}={value}" for key, value in (folder | keys).items()]
    config = configs.load(ExperimentConfig, CONFIG_DIR / "async_ppo.yaml", overrides)
    described, shapes = read_model(str(model))
    estimate = next(estimates.memory(config, described, shapes)).size

    begin = _memory(bench)
    engine = make_engine(bench, "large", optimizer=OptimizerConfig(), **fsdp)
    _reset_peak(bench)
    ids = (
        np.random.default_rng(0)
        .integers(3, described["vocab_size"], (tokens // length, length))
        .astype(np.int32)
    )
    mask = np.arange(length) > 0
    weight = {"loss_weight": np.full(length, 1 / ids.size, np.float32)}
    rows = [Sequence(row, mask, 1.0, weight) for row in ids]
    lengths = [[length] * len(rows)]
    seconds = bench.seconds(lambda: engine.train_batch(rows, lengths, loss), repeat=2)
    measured = _peak(bench) - begin
    bench.note("memory GB", measured / 1e9)
    bench.note("estimated memory GB", estimate / 1e9)
    bench.bound("memory / estimate", measured / estimate, 1.5 + SLACK / estimate)

    layers, hidden = described["num_hidden_layers"], described["hidden_size"]
    multiplied = estimates.count(shapes) - described["vocab_size"] * hidden
    done = 6 * (multiplied + layers * hidden * length) * ids.size / seconds / 1e12
    kind, size = getattr(torch, dtype), 512 if bench.quick else 4096
    square = torch.randn(size, size, device=bench.device).to(kind)
    matmul = 2 * size**3 / bench.seconds(lambda: square @ square) / 1e12
    name = torch.cuda.get_device_name() if bench.device.type == "cuda" else "CPU"
    peaks = [peak for part, peak in PEAKS.items() if part in name and dtype == "bfloat16"]
    bench.note("tokens/s", round(ids.size / seconds))
    bench.note("TFLOP/s", done)
    bench.note("TFLOP/s of a matrix product", matmul)
    bench.note("MFU", done / max(peaks) if peaks else f"unknown (peak of {name}, {dtype})")


def _write(path: Path, block: memoryview) -> None:
    with path.open("wb") as file:
        file.write(block)
        os.fsync(file.fileno())


def _memory(bench: Bench) -> int:
    """Return the bytes that this process uses on its device."""
    if bench.device.type == "cuda":
        return torch.cuda.memory_allocated(bench.device)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # give freed memory of earlier rows back
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def _reset_peak(bench: Bench) -> None:
    if bench.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(bench.device)
    else:
        Path("/proc/self/clear_refs").write_text("5")


def _peak(bench: Bench) -> int:
    """Return the largest number of bytes since `_reset_peak`."""
    if bench.device.type == "cuda":
        return torch.cuda.max_memory_allocated(bench.device)
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
