"""Checks of servers and publishers: the tokens after an update are those of the new weights."""
# pyright: basic

import asyncio
import json
import time
from contextlib import closing
from typing import Any

import numpy as np
import torch

from arealite.api.config import ExperimentConfig
from arealite.api.engine import Sequence
from arealite.api.llm import LLMRequest, LLMResponse, SamplingConfig, clients
from arealite.api.publisher import PublishReport, WeightPublisher, publishers
from arealite.cli import configs
from arealite.cli.machine.bench import Bench
from arealite.cli.machine.checks import BOUNDS, make_engine, train
from arealite.cli.presets import CONFIG_DIR
from arealite.impl.engine.fsdp import FSDPEngine
from arealite.impl.launcher.processes import own_servers

PROMPT = [*range(5, 15)]


class Site:
    """A trial with a client, and with engines that have the weights before and after an update."""

    def __init__(self, bench: Bench, server: str) -> None:
        """Load the engines; `server` is the type of the server, "": the publisher shared."""
        self.bench = bench
        self.server = server
        self.version = -1
        self.dtype = "bfloat16" if bench.device.type == "cuda" and server else "float32"
        sglang = "llm_server.sglang."
        args = [f"llm_server.type={server}", f"{sglang}python={bench.plan['python']}"]
        args.append(f"{sglang}mem_fraction=0.4")  # the trainer may have the same GPU
        backend = "gloo" if bench.plan["gpus"] == 1 else "auto"  # NCCL: one process on a GPU
        self.overrides = [
            f"trial_name=machine-{server}",
            f"cluster.name_root={bench.folder}/names",
            f"cluster.run_root={bench.folder}/runs",
            f"model.path={bench.folder}/dense",
            f"model.dtype={self.dtype}",
            f"launcher.llm_servers={int(bool(server))}",
            f"launcher.server_args={json.dumps(args if server else [])}",
            f"trainer.ppo.publisher.distributed.backend={backend}",
            f"trainer.ppo.publisher.type={'disk' if server else 'shared'}",
        ]
        self.old, self.new = (make_engine(bench, dtype=self.dtype) for _ in range(2))
        train(bench, self.new)
        config = self.config()
        own = config.trainer.ppo.collector.client
        self.client = clients.get(own.type)(config, own)

    def config(self, **publisher: str) -> ExperimentConfig:
        """Return the config of the trial, with options of its publisher."""
        own = [f"trainer.ppo.publisher.{key}={value}" for key, value in publisher.items()]
        overrides = [*self.overrides, *own]
        return configs.load(ExperimentConfig, CONFIG_DIR / "async_ppo.yaml", overrides)

    def publish(self, engine: FSDPEngine, **options: str) -> PublishReport:
        """Publish an engine's weights as the next version."""
        config = self.config(**options)
        if self.bench.device.type == "cuda":  # each thread has its own current device
            torch.cuda.set_device(self.bench.device)
        with closing(publishers.get(config.trainer.ppo.publisher.type)(config, engine)) as made:
            return self.send(made, engine)

    def send(self, publisher: WeightPublisher, engine: FSDPEngine) -> PublishReport:
        """Publish an engine's weights as the next version, through `publisher`."""
        self.version += 1
        on_device = publisher.takes_device_tensors
        while publisher.stage(self.version, engine.stream_weights(on_device=on_device)):
            pass
        return publisher.push(self.version)

    async def generate(self, new: int, **options: Any) -> LLMResponse:
        """Generate `new` tokens under the newest version."""
        name = f"machine-{time.monotonic_ns()}"
        sampling = SamplingConfig(max_new_tokens=new)
        request = LLMRequest(name, name, PROMPT, sampling, min_version=self.version, **options)
        return await self.client.generate(request)

    async def compare(self) -> None:
        """Generate under the newest version; compare the answers with the new engine."""
        bench = self.bench
        bound = BOUNDS[self.dtype]
        began = time.perf_counter()
        answers = await asyncio.gather(*(self.generate(64) for _ in range(8)))
        bench.numbers["tokens/s"] = round(8 * 64 / (time.perf_counter() - began))
        versions = {version for answer in answers for version in answer.versions}
        bench.require(versions == {self.version}, f"versions are {versions}, not {self.version}")
        bench.bound("error", max(errors(self.new, each).max() for each in answers), bound)
        stale = float(max(errors(self.old, each).max() for each in answers))
        bench.numbers["error of the old weights"] = stale
        bench.require(stale > bound, "the update is too small: old weights would not be noticed")


async def publish(bench: Bench, *, way: str, server: str) -> None:
    """Publish an update; tokens must have its version and its log-probabilities."""
    site = await _site(bench, server)
    report = await asyncio.to_thread(site.publish, site.new, type=way)
    await site.compare()
    rate = report.num_bytes / (report.stage_s + report.load_s or 1.0) / 1e9
    bench.numbers |= {"publish GB/s": rate, "stall s": report.stall_s}


async def shared(bench: Bench) -> None:
    """Generate with the trained parameters themselves, before and after an update."""
    site = Site(bench, "")
    publisher = publishers.get("shared")(site.config(), site.new)
    bench.stack.callback(publisher.close)
    bench.stack.push_async_callback(site.client.close)
    await site.client.start()
    site.send(publisher, site.new)
    await site.generate(8)
    publisher.pause_generation()
    train(bench, site.new)
    site.send(publisher, site.new)
    await site.compare()


async def interrupt(bench: Bench, *, mode: str, server: str) -> None:
    """Publish during a generation; each token must have the log-probability of its version."""
    site = await _site(bench, server)
    started = asyncio.Event()
    await asyncio.to_thread(site.publish, site.old)
    # Long enough to be running when the update arrives; SGLang needs 15 ms for a token on a CPU.
    length = 300 if (site.server, bench.device.type) == ("sglang", "cpu") else 1500
    answering = asyncio.ensure_future(site.generate(length, on_tokens=lambda _: started.set()))
    answering.add_done_callback(lambda _: started.set())  # it failed
    await started.wait()
    report = await asyncio.to_thread(site.publish, site.new, pause_mode=mode)
    answer = await answering
    is_new = np.array(answer.versions) == site.version
    expected = [site.version - 1, site.version]
    bench.numbers |= {"tokens before": int((~is_new).sum()), "tokens after": int(is_new.sum())}
    bench.numbers["stall s"] = report.stall_s
    found = [*dict.fromkeys(answer.versions)]
    bench.require(found == expected, f"the tokens have versions {found}, not {expected}")
    bound = BOUNDS[site.dtype]
    after = errors(site.new, answer)[is_new].max(initial=0.0)
    bench.bound("error before", errors(site.old, answer)[~is_new].max(initial=0.0), bound)
    # In place, the tokens after the update attend to keys and values of the old weights.
    bench.bound("error after", after, np.inf if mode == "in_place" else bound)


def errors(engine: FSDPEngine, answer: LLMResponse) -> np.ndarray:
    """Return the difference of each token's log-probability from that of the engine."""
    tokens = np.array([*PROMPT, *answer.output_ids], np.int32)
    row = Sequence(tokens, np.arange(len(tokens)) >= len(PROMPT), 1.0)
    found = engine.forward([row])["logprobs"][0][len(PROMPT) :]
    return np.abs(found.astype(np.float64) - answer.logprobs)


async def _site(bench: Bench, server: str) -> Site:
    """Return the session's site; the first call starts its server."""
    if "site" not in bench.cache:
        site = Site(bench, server)
        began = time.perf_counter()
        await bench.stack.enter_async_context(own_servers(site.config(), bench.folder))
        await site.client.start()
        bench.stack.push_async_callback(site.client.close)
        bench.numbers["start of the server s"] = time.perf_counter() - began
        await asyncio.to_thread(site.publish, site.old)
        bench.cache["site"] = site
    return bench.cache["site"]
