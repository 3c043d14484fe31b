"""Count false alarms of the canary in ordinary publishes, and the planted faults that it finds.

    tools/bench_canary.py [--publishes 10000]

A trainer publishes random updates of all sizes to an embedded server with traffic, in float32 and
bfloat16, of a dense model and of a mixture of experts. Then each fault of
tests/ext/served_policy/plants.py is planted once. The figures go to out/bench/losses.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from arealite.api.llm import SamplingConfig
from arealite.api.server_protocol import GenerateRequest
from arealite.base import log
from arealite.base.errors import InvariantError
from arealite.impl.publisher import servers
from arealite.impl.publisher.control import ServerControl
from tests.ext.served_policy.plants import FAULTS, Fault, copied
from tests.ext.served_policy.runs import Run
from tests.models import tiny_mixture, tiny_model
from tools import figures

PERIOD = 200
"""Publishes after which the model is reset, so that its weights stay small."""
TRAFFIC = 3
"""Requests that run during all publishes."""
RUNS = [(family, dtype) for family in ("qwen2", "qwen3_moe") for dtype in ("float32", "bfloat16")]


async def publish_often(folder: Path, family: str, dtype: str, publishes: int) -> list[str]:
    """Publish random updates; return the faults that are found."""
    write = tiny_mixture if family == "qwen3_moe" else tiny_model
    path = write(folder / "model", family=family, init_std=0.1)
    async with Run(path, dtype=dtype).running() as run:
        first = copied(run.engine.module)
        await run.publish(0)
        (server,) = run.publisher._servers.values()
        traffic = [
            asyncio.ensure_future(generate_forever(run, server, number))
            for number in range(TRAFFIC)
        ]
        for version in range(1, publishes):
            if version % PERIOD == 0:
                run.engine.module.load_state_dict(first)
            run.train(10.0 ** -(1 + version % 7), seed=version)
            with contextlib.suppress(InvariantError):
                await run.publish(version)
        for task in traffic:
            task.cancel()
        await asyncio.gather(*traffic, return_exceptions=True)
        proofs = run.proofs()
        unproven = [proof for proof in proofs if proof.obstacle]
        print(
            f"{family} {dtype}: {len(proofs)} proofs, {len(unproven)} without an answer", flush=True
        )
        return [proof.fault for proof in proofs if proof.fault]


async def generate_forever(run: Run, server: ServerControl, number: int) -> None:
    """Keep a request running, so that the canary shares its batches."""
    sampling = SamplingConfig(max_new_tokens=40)
    loop = run.publisher._thread.loop
    for count in range(sys.maxsize):
        request = GenerateRequest(
            rid=f"traffic-{number}-{count}~",
            input_ids=[5 + number] * (8 + number),
            sampling=sampling,
            ignore_eos=True,
        )
        answer = asyncio.run_coroutine_threadsafe(server.generate(request), loop)
        await asyncio.wrap_future(answer)


async def is_found(folder: Path, fault: Fault) -> bool:
    """Return whether a planted fault stops the run at its first version."""
    async with Run(fault.write(folder), served_dtype=fault.served_dtype).running() as run:
        await run.publish_and_plant(fault)
        with contextlib.suppress(InvariantError):
            await run.publish(fault.first)
            return False
    return True


def main() -> None:
    """Count, and write the figures."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--publishes", type=int, default=10_000)
    options = parser.parse_args()
    log.setup("bench", "error")
    torch.set_num_threads(1)
    servers.PROOF_S = servers.LATER_PROOF_S = 60.0  # a slow machine must not hide a fault
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    begin = time.perf_counter()
    false_alarms = 0
    share = options.publishes // len(RUNS)
    for family, dtype in RUNS:
        with tempfile.TemporaryDirectory() as folder:
            faults = asyncio.run(publish_often(Path(folder), family, dtype, share))
        false_alarms += len(faults)
        print(*faults[:5], sep="\n", end="")
    num_found = 0
    for name, fault in FAULTS.items():
        with tempfile.TemporaryDirectory() as folder:
            found = asyncio.run(is_found(Path(folder), fault))
        num_found += found
        print(f"{name:40} {'found' if found else 'NOT FOUND'}", flush=True)
    counts = {
        "publishes": share * len(RUNS),
        "false_alarms": false_alarms,
        "planted": len(FAULTS),
        "planted_found": num_found,
        "canary_seconds": round(time.perf_counter() - begin, 1),
    }
    figures.show(counts)
    figures.save("losses.json", counts, keep=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
