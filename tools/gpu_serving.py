"""Measure the embedded server in the shapes of Qwen2.5: tokens/s of concurrent requests over HTTP.

A part of tools/gpu_day.py. Models are random; on a GPU in bfloat16, on a CPU in float32. Prompts
and answers have the lengths of tools/bench_server.py.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import uvloop

from arealite.base import log
from tools.bench_server import served_rate, serving
from tools.gpu_part import PartRun, parse_part
from tools.qwen_shapes import SHAPES, make_model

REQUESTS = 64, 256
QUICK_REQUESTS = 2, 4
REPEATS = 3


async def measure(run: PartRun, name: str) -> None:
    """Serve a model; report the median rate for each number of requests."""
    folder = make_model(run.scratch / f"model-{name}", SHAPES[name], device=run.device)
    dtype = "bfloat16" if run.device == "cuda" else "float32"
    async with serving(folder, run.scratch / "names", dtype=dtype) as (server, session):
        run.report(f"{name}, decoder", f"{type(server.engine.decoder).__name__}, {dtype}")
        for num_requests in QUICK_REQUESTS if run.quick else REQUESTS:
            await served_rate(session, num_requests)
            repeats = 1 if run.quick or run.device == "cpu" else REPEATS
            rates = [await served_rate(session, num_requests) for _ in range(repeats)]
            result = {"tokens_per_s": statistics.median(rates)}
            run.report(f"{name}, {num_requests} requests", result)


def main() -> None:
    """Measure every shape."""
    run = parse_part(__doc__ or "")
    log.setup("bench", "warning")
    for name in ("tiny",) if run.quick else ("0.5B", "1.5B"):
        uvloop.run(measure(run, name))


if __name__ == "__main__":
    main()
