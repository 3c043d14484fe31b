"""Measure the embedded server: tokens per second over HTTP, and the pause of a weight update.

The baselines are measured alternately in the same run: transformers' static `generate` with the
same batch size, and `safetensors.load_file` + `copy_` of the same file. Each has one torch thread.

    python tools/bench_server.py [--repeats 3] [--large]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import aiohttp
import torch
import uvloop
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from arealite.api.experiment_config import ModelConfig, ServerConfig
from arealite.api.trial import ClusterConfig
from arealite.base import log
from arealite.ext.embedded.embedded_server import EmbeddedServer
from arealite.system.names.name_registry import NameRegistry
from tests.models import tiny_model
from tools import figures

PROMPT_TOKENS, NEW_TOKENS = 32, 64
TIMEOUT = aiohttp.ClientTimeout(total=3600)
"""Longest wait for an answer: large models take minutes on a CPU."""
SMALL = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4}
LARGE = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 10,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "init_std": 0.02,
}
"""A model of about 100 M parameters, 378 MB in float32."""


def prompts_of(count: int) -> list[list[int]]:
    """Return `count` different prompts."""
    rng = torch.Generator().manual_seed(count)
    return torch.randint(3, 64, (count, PROMPT_TOKENS), generator=rng).tolist()


def static_rate(model: Any, prompts: list[list[int]]) -> float:
    """Return the tokens per second of `generate` with sampling, on one batch."""
    ids = torch.tensor(prompts)
    started = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            pad_token_id=0,
        )
    return len(prompts) * NEW_TOKENS / (time.perf_counter() - started)


async def post(session: aiohttp.ClientSession, path: str, **body: Any) -> dict[str, Any]:
    """POST JSON and return the reply."""
    async with session.post(path, json=body) as response:
        response.raise_for_status()
        return await response.json()


async def generate(session: aiohttp.ClientSession, prompt: list[int]) -> dict[str, Any]:
    """Request one generation with logprobs."""
    sampling = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    return await post(
        session, "/generate", input_ids=prompt, sampling_params=sampling, return_logprob=True
    )


async def served_rate(session: aiohttp.ClientSession, batch: int) -> float:
    """Return the tokens per second of `batch` concurrent requests over HTTP."""
    started = time.perf_counter()
    await asyncio.gather(*(generate(session, prompt) for prompt in prompts_of(batch)))
    return batch * NEW_TOKENS / (time.perf_counter() - started)


async def update_seconds(
    session: aiohttp.ClientSession, folder: Path, in_flight: int
) -> tuple[float, float]:
    """Return the pause of generation by an update under load, measured by client and by engine."""
    tasks = [asyncio.ensure_future(generate(session, p)) for p in prompts_of(in_flight)]
    await asyncio.sleep(0.1)
    await post(session, "/pause_generation", mode="retract")
    started = time.perf_counter()
    await post(session, "/update_weights_from_disk", model_path=str(folder), weight_version="1")
    await post(session, "/continue_generation")
    seconds = time.perf_counter() - started
    await asyncio.gather(*tasks)
    async with session.get("/server_info") as response:
        return seconds, (await response.json())["last_pause_s"]


def copy_seconds(model: Any, folder: Path) -> float:
    """Return the seconds of load_file + copy_ into the parameters of a model."""
    parameters = model.state_dict()
    started = time.perf_counter()
    with torch.no_grad():
        for name, tensor in load_file(folder / "model.safetensors").items():
            parameters[name].copy_(tensor)
    return time.perf_counter() - started


@contextlib.asynccontextmanager
async def serving(
    folder: Path, name_root: Path, *, dtype: str = "float32"
) -> AsyncGenerator[tuple[EmbeddedServer, aiohttp.ClientSession]]:
    """Serve a model in this process during the body; yield the server and a session with it."""
    config = ServerConfig(
        cluster=ClusterConfig(name_root=str(name_root)),
        model=ModelConfig(path=str(folder), dtype=dtype),
    )
    server = EmbeddedServer(config)
    serve = asyncio.ensure_future(server.serve())
    is_ready = asyncio.ensure_future(server.ready.wait())
    await asyncio.wait([serve, is_ready], return_when=asyncio.FIRST_COMPLETED)
    if serve.done():  # it failed
        is_ready.cancel()
        serve.result()
    connector = aiohttp.TCPConnector(limit=0)
    headers = NameRegistry.of(config).headers()
    try:
        async with aiohttp.ClientSession(
            server.address, connector=connector, headers=headers, timeout=TIMEOUT
        ) as session:
            yield server, session
    finally:
        serve.cancel()
        await asyncio.wait([serve])


class Bench:
    """One server and one baseline model of the same folder."""

    def __init__(self, root: Path, repeats: int) -> None:
        self.root, self.repeats = root, repeats
        self.results: dict[str, float] = {}

    async def run(self, name: str, *, batches: list[int], settings: dict[str, Any]) -> None:
        """Serve one model; fill `results`."""
        folder = tiny_model(self.root / name, **settings)
        baseline = AutoModelForCausalLM.from_pretrained(folder).eval()
        async with serving(folder, self.root / "names") as (_, session):
            for batch in batches:
                await self._throughput(session, baseline, name, batch)
            await self._updates(session, baseline, name, folder)

    async def _throughput(
        self, session: aiohttp.ClientSession, baseline: Any, name: str, batch: int
    ) -> None:
        static, served = [], []
        await served_rate(session, batch)
        static_rate(baseline, prompts_of(batch))
        for _ in range(self.repeats):
            static.append(static_rate(baseline, prompts_of(batch)))
            served.append(await served_rate(session, batch))
        self._note(f"{name}.static_tok_s.{batch}", statistics.median(static))
        self._note(f"{name}.served_tok_s.{batch}", statistics.median(served))
        ratio = statistics.median(served) / statistics.median(static)
        self._note(f"{name}.served_over_static.{batch}", ratio)

    async def _updates(
        self, session: aiohttp.ClientSession, baseline: Any, name: str, folder: Path
    ) -> None:
        copies, client, engine = [], [], []
        in_flight = 32 if name == "small" else 2
        for _ in range(max(5, self.repeats)):
            copies.append(copy_seconds(baseline, folder))
            seen, inside = await update_seconds(session, folder, in_flight)
            client.append(seen)
            engine.append(inside)
        copy = statistics.median(copies)
        self._note(f"{name}.load_and_copy_ms", copy * 1e3)
        self._note(f"{name}.update_stall_client_ms", statistics.median(client) * 1e3)
        self._note(f"{name}.update_stall_engine_ms", statistics.median(engine) * 1e3)
        self._note(f"{name}.update_over_copy", statistics.median(client) / copy)

    def _note(self, metric: str, value: float) -> None:
        self.results[metric] = round(value, 3)
        print(f"{metric:40s} {value:12.2f}", flush=True)


async def bench(args: argparse.Namespace) -> dict[str, float]:
    """Run everything; return metric → value."""
    with tempfile.TemporaryDirectory() as root:
        runner = Bench(Path(root), args.repeats)
        await runner.run("small", batches=args.batches, settings=SMALL)
        if args.large:
            await runner.run("large", batches=[], settings=LARGE)
        return runner.results


def main() -> None:
    """Print the table and write out/bench/server.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="*", default=[32, 128, 256])
    parser.add_argument("--large", action="store_true", help="also update 100M parameters")
    args = parser.parse_args()
    torch.set_num_threads(1)
    log.setup("bench", "warning")
    results = uvloop.run(bench(args))
    figures.save("server.json", results)


if __name__ == "__main__":
    main()
