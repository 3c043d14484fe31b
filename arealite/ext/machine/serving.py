"""Checks of servers and publishers: the tokens after an update are those of the new weights."""
# pyright: basic

import asyncio
import json
import time
from contextlib import closing
from typing import Any

import numpy as np
import torch

from arealite.api.engine import Sequence, TrainEngine
from arealite.api.experiment_config import ExperimentConfig
from arealite.api.llm import LLMRequest, LLMResponse, SamplingConfig, clients
from arealite.api.publisher import PublishReport, WeightPublisher, publishers
from arealite.cli import configs
from arealite.cli.options import CONFIG_DIR
from arealite.ext.evaluation.own_servers import own_servers
from arealite.ext.machine.bench import Bench
from arealite.ext.machine.checks import BOUNDS, make_engine, train

PROMPT = [*range(5, 15)]


class Site:
    """A trial with a client, and with engines that have the weights before and after an update."""

    def __init__(self, bench: Bench, server: str) -> None:
        """Load the engines; `server` is the type of the server, "": the publisher shared."""
        self.bench = bench
        self.server = server
        self.version = -1
        self.dtype = "bfloat16" if bench.device.type == "cuda" and server else "float32"
        server_args = [
            f"llm_server.type={server}",
            f"llm_server.sglang.python={bench.plan['python']}",
            "llm_server.sglang.mem_fraction=0.4",  # the trainer may have the same GPU
        ]
        backend = "gloo" if bench.plan["gpus"] == 1 else "auto"  # NCCL: one process on a GPU
        self.overrides = [
            f"trial_name=machine-{server}",
            f"cluster.name_root={bench.folder}/names",
            f"cluster.run_root={bench.folder}/runs",
            f"model.path={bench.folder}/dense",
            f"model.dtype={self.dtype}",
            f"launcher.llm_servers={int(bool(server))}",
            f"launcher.server_args={json.dumps(server_args if server else [])}",
            f"trainer.ppo.publisher.distributed.backend={backend}",
            f"trainer.ppo.publisher.type={'disk' if server else 'shared'}",
        ]
        self.old_engine = make_engine(bench, dtype=self.dtype)
        self.new_engine = make_engine(bench, dtype=self.dtype)
        train(bench, self.new_engine)
        config = self.config()
        client_config = config.trainer.ppo.collector.client
        self.client = clients.get(client_config.type)(config, client_config)

    def config(self, **publisher_options: str) -> ExperimentConfig:
        """Return the config of the trial, with options of its publisher."""
        overrides = [*self.overrides]
        for name, choice in publisher_options.items():
            overrides.append(f"trainer.ppo.publisher.{name}={choice}")
        return configs.load(ExperimentConfig, CONFIG_DIR / "async_ppo.yaml", overrides)

    def publish(self, engine: TrainEngine, **options: str) -> PublishReport:
        """Publish an engine's weights as the next version."""
        config = self.config(**options)
        if self.bench.device.type == "cuda":  # each thread has its own current device
            torch.cuda.set_device(self.bench.device)
        publisher_type = publishers.get(config.trainer.ppo.publisher.type)
        with closing(publisher_type(config, engine)) as publisher:
            return self.send(publisher, engine)

    def send(self, publisher: WeightPublisher, engine: TrainEngine) -> PublishReport:
        """Publish an engine's weights as the next version, through `publisher`."""
        self.version += 1
        on_device = publisher.takes_device_tensors
        while publisher.stage(self.version, engine.stream_weights(on_device=on_device)):
            pass
        return publisher.push(self.version)

    async def generate(self, num_tokens: int, **options: Any) -> LLMResponse:
        """Generate `num_tokens` tokens under the newest version."""
        request_id = f"machine-{time.monotonic_ns()}"
        request = LLMRequest(
            request_id=request_id,
            group_id=request_id,
            input_ids=PROMPT,
            sampling=SamplingConfig(max_new_tokens=num_tokens),
            min_version=self.version,
            **options,
        )
        return await self.client.generate(request)

    async def compare(self) -> None:
        """Generate under the newest version; compare the answers with the new engine."""
        bench = self.bench
        bound = BOUNDS[self.dtype]
        num_answers = 8
        num_tokens = 64
        started_s = time.perf_counter()
        generations = [self.generate(num_tokens) for _ in range(num_answers)]
        answers = await asyncio.gather(*generations)
        seconds = time.perf_counter() - started_s
        bench.numbers["tokens/s"] = round(num_answers * num_tokens / seconds)
        versions = {version for answer in answers for version in answer.versions}
        bench.require(
            versions == {self.version},
            f"versions are {versions}, not {self.version}",
        )
        bench.bound("error", max_error(self.new_engine, answers), bound)
        old_error = max_error(self.old_engine, answers)
        bench.numbers["error of the old weights"] = old_error
        bench.require(
            old_error > bound,
            "the update is too small: old weights would not be noticed",
        )


async def publish(bench: Bench, *, way: str, server: str) -> None:
    """Publish an update; tokens must have its version and its log-probabilities."""
    site = await _site(bench, server)
    report = await asyncio.to_thread(site.publish, site.new_engine, type=way)
    await site.compare()
    seconds = report.stage_s + report.load_s or 1.0
    bench.numbers["publish GB/s"] = report.num_bytes / seconds / 1e9
    bench.numbers["stall s"] = report.stall_s


async def shared(bench: Bench) -> None:
    """Generate with the trained parameters themselves, before and after an update."""
    site = Site(bench, "")
    publisher = publishers.get("shared")(site.config(), site.new_engine)
    bench.stack.callback(publisher.close)
    bench.stack.push_async_callback(site.client.close)
    await site.client.start()
    site.send(publisher, site.new_engine)
    await site.generate(8)
    publisher.pause_generation()
    train(bench, site.new_engine)
    site.send(publisher, site.new_engine)
    await site.compare()


async def interrupt(bench: Bench, *, mode: str, server: str) -> None:
    """Publish during a generation; each token must have the log-probability of its version."""
    site = await _site(bench, server)
    started = asyncio.Event()
    await asyncio.to_thread(site.publish, site.old_engine)
    # Long enough to be running when the update arrives; on a CPU, a token takes up to 15 ms.
    num_tokens = 500 if bench.device.type == "cpu" else 1500
    generation = asyncio.ensure_future(
        site.generate(num_tokens, on_tokens=lambda _: started.set()),
    )
    generation.add_done_callback(lambda _: started.set())  # it failed
    await started.wait()
    report = await asyncio.to_thread(site.publish, site.new_engine, pause_mode=mode)
    answer = await generation
    is_new = np.array(answer.versions) == site.version
    num_new = int(is_new.sum())
    bench.numbers["tokens before"] = len(is_new) - num_new
    bench.numbers["tokens after"] = num_new
    bench.numbers["stall s"] = report.stall_s
    _check_interrupted(site, answer, is_new, keeps_cache=mode == "in_place")


def _check_interrupted(
    site: Site,
    answer: LLMResponse,
    is_new: np.ndarray,
    *,
    keeps_cache: bool,
) -> None:
    """Check that each token of an interrupted answer has the log-probability of its version.

    Args:
        site: The trial, which has published the newest version during the answer.
        answer: The answer.
        is_new: Whether each token has the newest version.
        keeps_cache: Whether the tokens after the update attend to keys and values of the old
            weights. Their log-probabilities have no bound then.
    """
    versions = [*dict.fromkeys(answer.versions)]
    expected = [site.version - 1, site.version]
    site.bench.require(
        versions == expected,
        f"the tokens have versions {versions}, not {expected}",
    )
    bound = BOUNDS[site.dtype]
    old_errors = errors(site.old_engine, answer)[~is_new]
    site.bench.bound("error before", old_errors.max(initial=0.0), bound)
    new_errors = errors(site.new_engine, answer)[is_new]
    new_bound = np.inf if keeps_cache else bound
    site.bench.bound("error after", new_errors.max(initial=0.0), new_bound)


def max_error(engine: TrainEngine, answers: list[LLMResponse]) -> float:
    """Return the largest difference of a token's log-probability in several answers."""
    return max(float(errors(engine, answer).max()) for answer in answers)


def errors(engine: TrainEngine, answer: LLMResponse) -> np.ndarray:
    """Return the difference of each token's log-probability from that of the engine."""
    tokens = [*PROMPT, *answer.output_ids]
    row = Sequence(
        tokens=np.array(tokens, np.int32),
        loss_mask=np.arange(len(tokens)) >= len(PROMPT),
        temperature=1.0,
    )
    (logprobs,) = engine.forward([row])["logprobs"]
    sampled_logprobs = logprobs[len(PROMPT) :].astype(np.float64)
    return np.abs(sampled_logprobs - answer.logprobs)


async def _site(bench: Bench, server: str) -> Site:
    """Return the session's site; the first call starts its server."""
    if "site" not in bench.cache:
        site = Site(bench, server)
        started_s = time.perf_counter()
        servers = own_servers(int(bool(server)), configs.write_server(site.config(), bench.folder))
        await bench.stack.enter_async_context(servers)
        await site.client.start()
        bench.stack.push_async_callback(site.client.close)
        bench.numbers["start of the server s"] = time.perf_counter() - started_s
        await asyncio.to_thread(site.publish, site.old_engine)
        bench.cache["site"] = site
    return bench.cache["site"]
