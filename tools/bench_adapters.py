"""Measure adapters that are published and served as adapters, on SmolLM2-135M.

    tools/bench_adapters.py [--model FOLDER] [--requests 1000]

Three figures go to out/bench/adapters.json. `publish_speedup`: a publish of all weights takes so
many times as long as one of a rank-32 adapter. `tenants_speedup`: 8 adapters in one batch generate
so many times as fast as the same requests of one adapter after the other. `tenant_diff_max`: the
largest difference, in nats, between a log-probability in a batch of 8 adapters and alone (float32).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections import deque
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from arealite.api.engine_config import LoRAConfig
from arealite.base import log
from arealite.base.trial_files import TMPFS
from arealite.ext.embedded.decoder import Decoder
from arealite.ext.embedded.generation import Generation, SamplingParams
from arealite.ext.embedded.served_adapters import LowRankByLayer, read_low_rank
from arealite.ext.embedded.weight_loading import load_model
from tests.ext.embedded.adapter_runs import AdapterRun, adapter_folder
from tests.models import tiny_model
from tools import figures
from tools.smollm2 import FOLDER

RANK = 32
TENANTS = 8
REQUESTS = 8
"""Requests of each tenant at a time."""
PROMPT, TOKENS = 16, 32
BLOCKS, PUBLISHES = 3, 4
"""Blocks of publishes of one kind, in turn; the first publish of a block is not counted, because a
server that had whole weights loads its base weights again."""


async def publish_seconds(model: Path) -> dict[str, float]:
    """Return the median time of a publish, by kind."""
    seconds: dict[str, list[float]] = {"whole": [], "adapter": []}
    run = AdapterRun(model, lora=LoRAConfig(rank=RANK, alpha=32.0, targets=["all-linear"]))
    async with run.running():
        version = 0
        for _ in range(BLOCKS):
            for kind, times in seconds.items():
                for number in range(PUBLISHES):
                    for server in run.publisher._servers.values():
                        server.serves_adapters = kind == "adapter"
                    run.train(1e-3, seed=version)
                    run.canary.expect(version)
                    begin = time.perf_counter()
                    await asyncio.to_thread(send, run, version)
                    if number:
                        times.append(time.perf_counter() - begin)
                    version += 1
    return {kind: statistics.median(times) for kind, times in seconds.items()}


def send(run: AdapterRun, version: int) -> None:
    """Stage and push a version, without the canary: both kinds wait for its answer equally long."""
    run.publisher.proof = None
    if run.publisher.takes_adapter:
        run.publisher.stage_adapter(version, run.engine.stream_adapter())
    else:
        run.publisher.stage(version, run.engine.stream_weights())
    run.publisher.push(version)


def make_requests(adapter: str, count: int, vocabulary: int, seed: int) -> list[Generation]:
    """Return requests with random prompts."""
    rng = random.Random(seed)
    return [
        Generation(
            rid=f"{adapter}-{number}",
            prompt=[rng.randrange(vocabulary) for _ in range(PROMPT)],
            sampling=SamplingParams(sampling_seed=number),
            limit=TOKENS,
            stops=frozenset(),
            adapter=adapter,
        )
        for number in range(count)
    ]


def decode(decoder: Decoder, requests: list[Generation]) -> float:
    """Run the requests to their end; return the seconds."""
    waiting = deque(requests)
    begin = time.perf_counter()
    with torch.inference_mode():
        while waiting or decoder.running:
            if waiting and len(decoder.running) < decoder.max_rows:
                decoder.prefill(waiting)
                decoder.remove_ended()
            if decoder.running:
                decoder.decode()
                decoder.remove_ended()
    return time.perf_counter() - begin


def make_decoder(model: Path, folder: Path) -> Decoder:
    """Return a decoder with the adapters "0", "1", …, which have random matrices."""
    served, _ = load_model(str(model), dtype="float32", device="cpu")
    decoder = Decoder(served, max_rows=TENANTS * REQUESTS, seed=0)
    for number in range(TENANTS):
        low_rank: LowRankByLayer = read_low_rank(
            served, adapter_folder(model, folder / str(number), number, rank=RANK)
        )
        decoder.adapters.load(str(number), low_rank)
    return decoder


def tenants_speedup(decoder: Decoder, vocabulary: int) -> float:
    """Return how many times as fast 8 adapters are together as one after the other."""
    ratios = list[float]()
    for repeat in range(3):
        together, alone = list[Generation](), list[list[Generation]]()
        for number in range(TENANTS):
            together += make_requests(str(number), REQUESTS, vocabulary, repeat)
            alone.append(make_requests(str(number), REQUESTS, vocabulary, repeat))
        in_turn_s = sum(decode(decoder, requests) for requests in alone)
        ratios.append(in_turn_s / decode(decoder, together))
    return statistics.median(ratios)


def compare_with_alone(decoder: Decoder, vocabulary: int, requests: int) -> tuple[int, float]:
    """Compare seeded requests in a batch of all adapters with the same ones of an adapter alone.

    Returns:
        (requests with other tokens, largest difference of a log-probability in all others).
    """
    per_tenant = requests // TENANTS
    beside, alone = list[Generation](), list[Generation]()
    for number in range(TENANTS):
        beside += make_requests(str(number), per_tenant, vocabulary, number)
        tenant = make_requests(str(number), per_tenant, vocabulary, number)
        decode(decoder, tenant)
        alone += tenant
    mixed = [*beside]
    random.Random(0).shuffle(mixed)
    decode(decoder, mixed)
    num_different = 0
    largest = 0.0
    for one, other in zip(beside, alone, strict=True):
        if one.output != other.output:
            num_different += 1
            continue
        pairs = zip(one.logprobs, other.logprobs, strict=True)
        largest = max(largest, *(abs(left - right) for left, right in pairs))
    return num_different, largest


def main() -> None:
    """Measure, and write the figures."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--model", type=Path, default=FOLDER)
    parser.add_argument("--requests", type=int, default=1000)
    options = parser.parse_args()
    log.setup("bench", "error")
    torch.set_num_threads(1)
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    shared_memory = TMPFS if TMPFS.is_dir() else None  # where servers of this host get weights
    with tempfile.TemporaryDirectory(dir=shared_memory, prefix="arealite-") as name:
        folder = Path(name)
        model = folder / "model"
        model.symlink_to(options.model.resolve())
        seconds = asyncio.run(publish_seconds(model))
        decoder = make_decoder(model, folder / "adapters")
        speedup = tenants_speedup(decoder, decoder.model.config.vocab_size)
        tiny = tiny_model(folder / "tiny", init_std=0.1)
        tiny_decoder = make_decoder(tiny, folder / "tiny-adapters")
        other_tokens, difference = compare_with_alone(tiny_decoder, 64, options.requests)
        other_tokens_135m, difference_135m = compare_with_alone(
            decoder, decoder.model.config.vocab_size, TENANTS * REQUESTS
        )
        values = {
            "publish_whole_s": seconds["whole"],
            "publish_adapter_s": seconds["adapter"],
            "publish_speedup": seconds["whole"] / seconds["adapter"],
            "tenants_speedup": speedup,
            "tenant_requests": options.requests,
            "tenant_other_tokens": other_tokens,
            "tenant_diff_max": difference,
            "tenant_other_tokens_135m": other_tokens_135m,
            "tenant_diff_max_135m": difference_135m,
        }
    figures.show(values, digits=7)
    figures.save("adapters.json", values)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
