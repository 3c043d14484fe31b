"""Measure adapters that are published and served as adapters, on SmolLM2-135M.

    tools/bench_adapters.py [--model FOLDER] [--requests 1000] [--requests-135m 200]

Figures go to out/bench/adapters.json. `publish_speedup`: a publish of all weights takes so many
times as long as one of a rank-32 adapter of all linear layers (`_qv`: of the query and value
projections, which PEFT takes for Llama if nothing is said). `tenants_speedup`: 8 adapters in one
batch generate so many times as fast as the same requests of one adapter after the other, with 8
requests of each (`_1`: with one request). `tenant_diff_max`: the largest difference, in nats,
between a log-probability in a batch of 8 adapters and alone (float32): of a tiny model, of SmolLM2
(`_135m`), and of SmolLM2 with batch invariance (`_invariant`), which makes one request and 64
requests take `invariant_time_ratio` times as long.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
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
PROMPT_LENGTHS = 4, 60
"""Smallest and largest length of the prompts of requests that are compared."""
BLOCKS, PUBLISHES = 3, 4
"""Blocks of publishes of one kind, in turn; the first publish of a block is not counted, because a
server that had whole weights loads its base weights again."""


async def publish_seconds(model: Path, targets: list[str]) -> dict[str, float]:
    """Return the median time of a publish, by kind; `targets` are the layers with adapters."""
    seconds: dict[str, list[float]] = {"whole": [], "adapter": []}
    run = AdapterRun(model, lora=LoRAConfig(rank=RANK, alpha=32.0, targets=targets))
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


def make_requests(
    adapter: str,
    count: int,
    vocabulary: int,
    seed: int,
    prompt_lengths: tuple[int, int] = (PROMPT, PROMPT),
) -> list[Generation]:
    """Return requests with random prompts of random lengths."""
    rng = random.Random(seed)
    return [
        Generation(
            rid=f"{adapter}-{number}",
            prompt=[rng.randrange(vocabulary) for _ in range(rng.randint(*prompt_lengths))],
            sampling=SamplingParams(sampling_seed=number),
            limit=TOKENS,
            stops=frozenset(),
            adapter=adapter,
        )
        for number in range(count)
    ]


def decode(decoder: Decoder, requests: list[Generation]) -> float:
    """Run the requests to their end; return the seconds."""
    begin = time.perf_counter()
    decoder.run(requests)
    return time.perf_counter() - begin


def make_decoder(model: Path, folders: list[Path], *, batch_invariant: bool = False) -> Decoder:
    """Return a decoder with the adapters "0", "1", … of the folders."""
    served, _ = load_model(
        str(model), dtype="float32", device="cpu", batch_invariant=batch_invariant
    )
    decoder = Decoder(served, max_rows=TENANTS * REQUESTS, seed=0, batch_invariant=batch_invariant)
    for number, folder in enumerate(folders):
        low_rank: LowRankByLayer = read_low_rank(served, folder)
        decoder.adapters.load(str(number), low_rank)
    return decoder


def make_folders(model: Path, parent: Path) -> list[Path]:
    """Write adapters with random matrices; return their folders."""
    return [
        adapter_folder(model, parent / str(number), number, rank=RANK) for number in range(TENANTS)
    ]


def tenants_speedup(decoder: Decoder, vocabulary: int, requests: int) -> float:
    """Return how many times as fast 8 adapters with some requests each are together as in turn."""
    ratios = list[float]()
    for repeat in range(3):
        together, alone = list[Generation](), list[list[Generation]]()
        for number in range(TENANTS):
            together += make_requests(str(number), requests, vocabulary, repeat)
            alone.append(make_requests(str(number), requests, vocabulary, repeat))
        in_turn_s = sum(decode(decoder, of_tenant) for of_tenant in alone)
        ratios.append(in_turn_s / decode(decoder, together))
    return statistics.median(ratios)


def invariant_time_ratios(decoder: Decoder, invariant: Decoder, vocabulary: int) -> list[float]:
    """Return how many times as long a batch-invariant decoder takes: for one request, for 64."""
    ratios = list[float]()
    for count in (1, TENANTS * REQUESTS):
        ratios_of_count = list[float]()
        for repeat in range(3):
            seconds = [
                decode(either, make_requests("0", count, vocabulary, repeat))
                for either in (decoder, invariant)
            ]
            ratios_of_count.append(seconds[1] / seconds[0])
        ratios.append(statistics.median(ratios_of_count))
    return ratios


def compare_with_alone(
    decoder: Decoder, vocabulary: int, requests: int, prompt_lengths: tuple[int, int]
) -> tuple[int, float]:
    """Compare seeded requests in a batch of all adapters with the same ones of an adapter alone.

    Returns:
        (requests with other tokens, largest difference of a log-probability in all others).
    """
    per_tenant = requests // TENANTS
    beside, alone = list[Generation](), list[Generation]()
    for number in range(TENANTS):
        beside += make_requests(str(number), per_tenant, vocabulary, number, prompt_lengths)
        tenant = make_requests(str(number), per_tenant, vocabulary, number, prompt_lengths)
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
    parser.add_argument("--requests-135m", type=int, default=200)
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
        seconds = asyncio.run(publish_seconds(model, ["all-linear"]))
        seconds_qv = asyncio.run(publish_seconds(model, ["q_proj", "v_proj"]))
        folders = make_folders(model, folder / "adapters")
        decoder = make_decoder(model, folders)
        vocabulary = decoder.model.config.vocab_size
        speedup = tenants_speedup(decoder, vocabulary, REQUESTS)
        speedup_1 = tenants_speedup(decoder, vocabulary, 1)
        tiny = tiny_model(folder / "tiny", init_std=0.1)
        tiny_decoder = make_decoder(tiny, make_folders(tiny, folder / "tiny-adapters"))
        other_tokens, difference = compare_with_alone(
            tiny_decoder, 64, options.requests, PROMPT_LENGTHS
        )
        requests = options.requests_135m
        other_tokens_135m, difference_135m = compare_with_alone(
            decoder, vocabulary, requests, PROMPT_LENGTHS
        )
        invariant = make_decoder(model, folders, batch_invariant=True)
        other_tokens_invariant, difference_invariant = compare_with_alone(
            invariant, vocabulary, requests, PROMPT_LENGTHS
        )
        ratio_of_one, ratio_of_many = invariant_time_ratios(decoder, invariant, vocabulary)
        values = {
            "publish_whole_s": seconds["whole"],
            "publish_adapter_s": seconds["adapter"],
            "publish_speedup": seconds["whole"] / seconds["adapter"],
            "publish_adapter_s_qv": seconds_qv["adapter"],
            "publish_speedup_qv": seconds_qv["whole"] / seconds_qv["adapter"],
            "tenants_speedup": speedup,
            "tenants_speedup_1": speedup_1,
            "tenant_requests": options.requests,
            "tenant_other_tokens": other_tokens,
            "tenant_diff_max": difference,
            "tenant_other_tokens_135m": other_tokens_135m,
            "tenant_requests_135m": requests,
            "tenant_diff_max_135m": difference_135m,
            "tenant_other_tokens_invariant": other_tokens_invariant,
            "tenant_diff_max_invariant": difference_invariant,
            "invariant_time_ratio_1": ratio_of_one,
            "invariant_time_ratio_64": ratio_of_many,
        }
    figures.show(values, digits=7)
    figures.save("adapters.json", values)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
