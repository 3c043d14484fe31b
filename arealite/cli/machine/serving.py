"""Checks of servers and publishers: the tokens after an update are those of the new weights."""

import asyncio
import json
import threading
import time
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, TypeVar

import numpy as np

from arealite.api.config import ExperimentConfig
from arealite.api.engine import Sequence
from arealite.api.llm import LLMRequest, LLMResponse, SamplingConfig, clients
from arealite.api.publisher import PublishReport, WeightPublisher, publishers
from arealite.cli import configs
from arealite.cli.machine.bench import Bench
from arealite.cli.machine.training import BOUNDS, loss, make_engine, make_rows
from arealite.cli.presets import CONFIG_DIR
from arealite.impl.engine.fsdp import FSDPEngine
from arealite.impl.launcher.processes import own_servers
from arealite.impl.publisher.loop_thread import LoopThread

PROMPT = [*range(5, 15)]
START_S = 400.0
"""Longest start of a server."""

T = TypeVar("T")


class Site:
    """A trial with a server, a client, and engines with the weights before and after an update."""

    def __init__(self, bench: Bench, *, python: str = "", way: str = "disk") -> None:
        """Start the server and wait until the client has found it.

        Args:
            bench: Its `server` is the type of the server; "": the publisher has its own.
            python: The Python that has sglang.
            way: The publisher.
        """
        on_gpu = bench.device.type == "cuda"
        self.dtype = "bfloat16" if on_gpu and bench.server else "float32"
        args = [f"llm_server.type={bench.server}", f"model.dtype={self.dtype}"]
        if bench.server == "sglang":
            values = {"python": python, "device": bench.device.type}
            values |= {"mem_fraction": 0.4} if on_gpu else {}
            args += [f"llm_server.sglang.{key}={value}" for key, value in values.items()]
        self.options: dict[str, object] = {
            "trial_name": f"machine-{bench.server or way}",
            "cluster.name_root": str(bench.folder / "names"),
            "cluster.run_root": str(bench.folder / "runs"),
            "model.path": str(bench.folder / "dense"),
            "server_wait_s": START_S,
            "launcher.llm_servers": int(bool(bench.server)),
            "launcher.server_args": args if bench.server else [],
            "trainer.ppo.publisher.type": way,
        }
        self.folder, self.version, self.requests = bench.folder, -1, 0
        self.old, self.new = (make_engine(bench, dtype=self.dtype) for _ in range(2))
        update(bench, self.new)
        self._stop = asyncio.Event()
        self.thread = LoopThread("servers", self._main)
        bench.stack.callback(self.thread.stop, self._stop.set, 30.0)
        config = self.config()
        own = config.trainer.ppo.collector.client
        self.client = clients.get(own.type)(config, own)

    def config(self, **publisher: object) -> ExperimentConfig:
        """Return the config of the trial, with options of its publisher."""
        own = {f"trainer.ppo.publisher.{key}": value for key, value in publisher.items()}
        overrides = [f"{key}={json.dumps(value)}" for key, value in (self.options | own).items()]
        return configs.load(ExperimentConfig, CONFIG_DIR / "async_ppo.yaml", overrides)

    def publish(self, engine: FSDPEngine, **options: object) -> PublishReport:
        """Publish an engine's weights as the next version."""
        config = self.config(**options)
        publisher = publishers.get(config.trainer.ppo.publisher.type)(config, engine)
        try:
            return self.send(publisher, engine)
        finally:
            publisher.close()

    def send(self, publisher: WeightPublisher, engine: FSDPEngine) -> PublishReport:
        """Publish an engine's weights as the next version, through `publisher`."""
        self.version += 1
        on_device = publisher.takes_device_tensors
        while publisher.stage(self.version, engine.stream_weights(on_device=on_device)):
            pass
        return publisher.push(self.version)

    def generate(self, new: int, **options: Any) -> Future[LLMResponse]:
        """Start to generate `new` tokens under the newest version."""
        self.requests += 1
        name = f"machine-{self.requests}"
        sampling = SamplingConfig(max_new_tokens=new)
        request = LLMRequest(name, name, PROMPT, sampling, min_version=self.version, **options)
        return asyncio.run_coroutine_threadsafe(self.client.generate(request), self.thread.loop)

    def result(self, future: Future[T]) -> T:
        """Wait for a future; raise the server's error if it exits before."""
        wait([future, self.thread.ended], return_when=FIRST_COMPLETED)
        if not future.done():
            self.thread.ended.result()
        return future.result()

    def start(self) -> None:
        """Wait until the client has found a server."""
        self.result(asyncio.run_coroutine_threadsafe(self.client.start(), self.thread.loop))

    async def _main(self) -> None:
        async with own_servers(self.config(), self.folder):
            await self._stop.wait()
            await self.client.close()


def publish(bench: Bench, *, way: str, backend: str, python: str = "") -> None:
    """Publish an update; tokens must have its version and its log-probabilities."""
    site = _site(bench, python)
    report = site.publish(site.new, type=way, distributed={"backend": backend})
    _compare(bench, site, 4 if bench.quick else 32)
    bench.note("publish GB/s", report.num_bytes / (report.stage_s + report.load_s or 1.0) / 1e9)
    bench.note("stall s", report.stall_s)
    if way == "distributed":
        bench.note("backend", backend)


def shared(bench: Bench) -> None:
    """Generate with the trained parameters themselves, before and after an update."""
    site = Site(bench, way="shared")
    publisher = publishers.get("shared")(site.config(), site.old)
    bench.stack.callback(publisher.close)
    site.start()
    site.send(publisher, site.old)
    site.result(site.generate(8))
    publisher.pause_generation()
    update(bench, site.old)
    site.send(publisher, site.old)
    site.old, site.new = make_engine(bench), site.old
    _compare(bench, site, 4 if bench.quick else 32)


def interrupt(bench: Bench, *, mode: str, python: str = "") -> None:
    """Publish during a generation; each token must have the log-probability of its version."""
    site, started = _site(bench, python), threading.Event()
    site.publish(site.old)
    first = site.version
    # Long enough to be running when the update arrives; SGLang needs 15 ms for a token on a CPU.
    new = 300 if (bench.server, bench.device.type) == ("sglang", "cpu") else 1500
    answering = site.generate(new, on_tokens=lambda _: started.set())
    while not started.wait(0.05) and not answering.done():
        pass
    report = site.publish(site.new, pause_mode=mode)
    answer = site.result(answering)
    versions = np.array(answer.versions)
    bench.note("tokens before, after", f"{(versions == first).sum()}, {(versions > first).sum()}")
    bench.note("stall s", report.stall_s)
    both = [*dict.fromkeys(answer.versions)] == [first, first + 1]
    bench.require(both, f"versions are {sorted({*answer.versions})}, not {first}, {first + 1}")
    for name, engine, mine in (
        ("error before", site.old, versions == first),
        ("error after", site.new, versions == first + 1),
    ):
        error = float(np.abs(_score(engine, answer) - answer.logprobs)[mine].max(initial=0.0))
        if mode == "in_place" and engine is site.new:  # the old KV cache is kept
            bench.note("difference after, with the old cache", error)
        else:
            bench.bound(name, error, BOUNDS[site.dtype])


def update(bench: Bench, engine: FSDPEngine) -> None:
    """Apply one update."""
    rows = make_rows(bench)
    engine.train_batch(rows, [[len(row.tokens) for row in rows]], loss)


def _site(bench: Bench, python: str) -> Site:
    """Return the session's site; the first call starts it."""
    if "site" not in bench.cache:
        site = bench.cache["site"] = Site(bench, python=python)
        began = time.perf_counter()
        site.start()
        bench.note("start of the server s", time.perf_counter() - began)
        bench.note("dtype", site.dtype)
        site.publish(site.old)
    return bench.cache["site"]


def _compare(bench: Bench, site: Site, count: int) -> None:
    """Generate `count` answers under the newest version; compare them with the new engine."""
    new, began = 64, time.perf_counter()
    answers = [site.result(each) for each in [site.generate(new) for _ in range(count)]]
    bench.note("tokens/s", round(count * new / (time.perf_counter() - began)))
    versions = {version for answer in answers for version in answer.versions}
    bench.require(versions == {site.version}, f"versions are {versions}, not {site.version}")
    bound = BOUNDS[site.dtype]
    bench.bound("error", max(_errors(site.new, answers)), bound)
    stale = max(_errors(site.old, answers))
    bench.note("error of the old weights", stale)
    bench.require(stale > bound, "the update is too small: old weights would not be noticed")


def _errors(engine: FSDPEngine, answers: Iterable[LLMResponse]) -> list[float]:
    return [float(np.abs(_score(engine, each) - each.logprobs).max()) for each in answers]


def _score(engine: FSDPEngine, answer: LLMResponse) -> np.ndarray:
    """Return the engine's log-probabilities of an answer's tokens."""
    tokens = np.array([*PROMPT, *answer.output_ids], np.int32)
    row = Sequence(tokens, np.arange(len(tokens)) >= len(PROMPT), 1.0)
    return engine.forward([row], [[len(tokens)]])["logprobs"][0][len(PROMPT) :]
