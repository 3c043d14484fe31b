"""Measure the gateway: what it costs a rollout worker to serve foreign agents.

The clients are a process of their own (tools/gateway_load.py). Ratios come from one run, in which
both sides take turns; every figure is the median of several repeats.

    python tools/bench_gateway.py [--repeats 5] [--only cpu busy stall native first sglang]

`sglang` needs `make sglang`. Close other programs: the figures are those of this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

import msgspec  # noqa: E402
import uvloop  # noqa: E402

from arealite.api.agent import Agent, AgentFactory  # noqa: E402
from arealite.api.agent_config import AgentConfig  # noqa: E402
from arealite.api.episode import Action, Seat  # noqa: E402
from arealite.api.experiment_config import ExperimentConfig, ModelConfig  # noqa: E402
from arealite.api.llm import LLMClient, LLMClientConfig, SamplingConfig  # noqa: E402
from arealite.api.task import Task  # noqa: E402
from arealite.api.trial import ClusterConfig  # noqa: E402
from arealite.ext.gateway.config import GatewayConfig  # noqa: E402
from arealite.ext.gateway.gateway import Gateway  # noqa: E402
from arealite.ext.gateway.session import GatewaySession  # noqa: E402
from arealite.impl.client.servers_client import ServersClient  # noqa: E402
from arealite.system.names.name_registry import NameRegistry  # noqa: E402
from tests.fakes.chat_families import tokenizer_of  # noqa: E402
from tests.models import tiny_model  # noqa: E402
from tools import figures  # noqa: E402
from tools.gateway_load import Job, Result  # noqa: E402

FAMILY = "qwen3"
"""The chat template of the figures without a model."""
ANSWER = 50
"""Tokens of an answer; with the message of the user, a turn has 100 new tokens."""
BUSY = 16
"""Sessions that run at once while the CPU time of one is measured: a worker has many, and code that
runs once in a while runs with cold caches."""
SESSIONS, NATIVE_TURNS, NATIVE_TOKENS = 128, 4, 64
IN_FLIGHT, IN_FLIGHT_TURNS = 400, 10
LONG, LONG_SESSIONS, LONG_TURNS = 128_000, 8, 40
PAUSE_S = 0.3
"""Between the turns of a long conversation: a server takes longer for 50 tokens after 128,000."""
TICK_S = 0.002
GOALS = {
    "native_ratio": 0.9,
    "native_ratio_sglang": 0.9,
    "cpu_s_200_turns": 0.1,
    "worst_stall_ms": 12.0,
    "timeouts": 0,
    "requests_per_s": 1000,
    "first_token_ms": 5.0,
}
Measured = dict[str, list[float]]


class ForeignAgent(Agent):
    """The agent of a seat whose prompts come through the gateway."""

    async def act(self, observation: object) -> Action:
        """Refuse: only `generate` is used."""
        raise NotImplementedError


class Bench:
    """A gateway in this process, its clients in another one, and a server."""

    def __init__(self, gateway: Gateway, load: subprocess.Popen[bytes]) -> None:
        self.gateway, self._load = gateway, load
        self.profiler: cProfile.Profile | None = None
        self._opened = 0

    def open(self, client: LLMClient, tokenizer: Any, sampling: SamplingConfig) -> GatewaySession:
        """Return the session of a new episode."""
        self._opened += 1
        seat = Seat(
            name="agent",
            group_id=f"g{self._opened}",
            episode_id=f"e{self._opened}",
            min_version=0,
            sampling=sampling,
        )
        agent = ForeignAgent(None, client=client, tokenizer=tokenizer, seat=seat)
        return self.gateway.open(
            Task(task_id="train-0", prompt="hi", ground_truth=None, extra_info={}), {"agent": agent}
        )

    async def run(self, job: Job) -> Result:
        """Let the clients work; return their figures."""
        assert self._load.stdin is not None
        assert self._load.stdout is not None
        self._load.stdin.write(msgspec.json.encode(job) + b"\n")
        self._load.stdin.flush()
        if self.profiler is not None:
            self.profiler.enable()
        line = await asyncio.to_thread(self._load.stdout.readline)
        if self.profiler is not None:
            self.profiler.disable()
        result = msgspec.json.decode(line, type=Result)
        assert not result.errors, result.errors
        return result

    async def play(self, make: Callable[[], GatewaySession], clients: int, **job: Any) -> Played:
        """Let clients play new sessions; return the figures and the number of sampled tokens."""
        sessions = [make() for _ in range(clients)]
        keys = [session.endpoint.api_key for session in sessions]
        url = f"{self.gateway.url}/v1/chat/completions"
        result = await self.run(Job(url, keys, **job))
        agents = [session.agents["agent"] for session in sessions]
        tokens = sum(len(t.response.output_ids) for a in agents for t in a.record.turns)
        for session in sessions:
            await session.close()
        return Played(result, tokens)


class Played(msgspec.Struct):
    """The clients' figures, and the number of sampled tokens."""

    result: Result
    tokens: int


@contextmanager
def clients() -> Iterator[subprocess.Popen[bytes]]:
    """Run the process of the clients."""
    command = [sys.executable, "-m", "tools.gateway_load"]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen[bytes](command, cwd=ROOT, **pipes) as load:
        assert load.stdin is not None
        yield load
        load.stdin.close()


@asynccontextmanager
async def running() -> AsyncIterator[Bench]:
    """Run a gateway and the process of the clients."""
    gateway = Gateway(GatewayConfig(), args=ExperimentConfig())
    await gateway.start()
    with clients() as load:
        yield Bench(gateway, load)
    await gateway.close()


@asynccontextmanager
async def client_of(address: str, model: str = "") -> AsyncIterator[ServersClient]:
    """Run the training client of one server."""
    with tempfile.TemporaryDirectory() as folder:
        cluster = ClusterConfig(name_root=folder, ttl_s=3600.0)
        config = ExperimentConfig(cluster=cluster, model=ModelConfig(path=model))
        context = {"vocab_size": None, "context_length": 1 << 20} if not model else {}
        NameRegistry.of(config).put("llm_server", "one", {"address": address, **context})
        client = ServersClient(config, LLMClientConfig())
        await client.start()
        try:
            yield client
        finally:
            await client.close()


@contextmanager
def instant() -> Iterator[str]:
    """Run a server that answers at once; yield its address."""
    command = [sys.executable, "-m", "tests.fakes.instant", "--tokens", str(ANSWER)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.stdin.close()


async def quick(bench: Bench, only: set[str], repeats: int, found: Measured) -> None:
    """Measure CPU time, requests and stalls with a server that answers at once."""
    tokenizer, sampling = tokenizer_of(FAMILY), SamplingConfig(max_new_tokens=ANSWER)
    with instant() as address:
        async with client_of(address) as client:

            def make() -> GatewaySession:
                return bench.open(client, tokenizer, sampling)

            await bench.play(make, 8, turns=10)
            gc.freeze()  # the rollout role sets this and the threshold, too
            gc.set_threshold(50_000)
            for _ in range(repeats):
                if "cpu" in only:
                    begin = time.process_time()
                    await bench.play(make, BUSY, turns=200)
                    add(found, "cpu_s_200_turns", (time.process_time() - begin) / BUSY)
                if "busy" in only:
                    played = await bench.play(make, IN_FLIGHT, turns=IN_FLIGHT_TURNS)
                    add(found, "requests_per_s", played.result.requests / played.result.seconds)
                    add(found, "timeouts", played.result.timeouts)
                if "stall" in only:
                    await stall(bench, make, found)


async def stall(bench: Bench, make: Callable[[], GatewaySession], found: Measured) -> None:
    """Measure the lag of the event loop with long conversations, and without any request."""
    lags, stop = list[float](), asyncio.Event()

    async def sample() -> None:
        while not stop.is_set():
            begin = time.perf_counter()
            await asyncio.sleep(TICK_S)
            lags.append(1e3 * (time.perf_counter() - begin - TICK_S))

    begin, sampling = time.perf_counter(), asyncio.create_task(sample())
    await bench.play(make, LONG_SESSIONS, turns=LONG_TURNS, history=LONG, pause_s=PAUSE_S)
    seconds, busy = time.perf_counter() - begin, lags.copy()
    lags.clear()
    await asyncio.sleep(seconds)
    stop.set()
    await sampling
    worst = [sorted(each)[-1 - len(each) // 1000] for each in (busy, lags)]
    add(found, "worst_stall_ms", worst[0] - worst[1])
    add(found, "idle_lag_ms", worst[1])


async def native(
    bench: Bench, address: str, model: Path, name: str, repeats: int, found: Measured
) -> None:
    """Compare the tokens per second of native and foreign agents, alternately."""
    from arealite.api.agent import load_tokenizer

    tokenizer = load_tokenizer(str(model))
    sampling = SamplingConfig(max_new_tokens=NATIVE_TOKENS, min_new_tokens=NATIVE_TOKENS)
    async with client_of(address, str(model)) as client:
        factory = AgentFactory(ExperimentConfig(), client=client, tokenizer=tokenizer)

        async def episode(number: int) -> int:
            seat = Seat(
                name="agent",
                group_id=f"n{number}",
                episode_id=f"n{number}",
                min_version=0,
                sampling=sampling,
            )
            agent = factory.make_agent(AgentConfig(type="chat"), seat)
            for turn in range(NATIVE_TURNS):
                await agent.act(f"{number} {turn} what is next? " * 2)
            return sum(len(turn.response.output_ids) for turn in agent.record.turns)

        async def own() -> float:
            begin = time.perf_counter()
            tokens = sum(await asyncio.gather(*map(episode, range(SESSIONS))))
            return tokens / (time.perf_counter() - begin)

        async def foreign(*, stream: bool = False) -> float:
            make = lambda: bench.open(client, tokenizer, sampling)  # noqa: E731
            job = {"turns": NATIVE_TURNS, "stream": stream}
            played = await bench.play(make, SESSIONS, **job)
            return played.tokens / played.result.seconds

        for repeat in range(-1, repeats):
            rates = [await own(), await foreign()] if repeat % 2 else [await foreign(), await own()]
            if repeat >= 0:  # the first round is a warm-up
                mine, theirs = rates if repeat % 2 else rates[::-1]
                add(found, f"native_ratio{name}", theirs / mine)
                add(found, f"native_tokens_per_s{name}", mine)
        bench.gateway._renderer = bench.gateway.context = None  # another model, another tokenizer


async def first(bench: Bench, address: str, model: Path, repeats: int, found: Measured) -> None:
    """Compare the time to the first streamed token with the server's own, alternately."""
    from arealite.api.agent import load_tokenizer

    tokenizer = load_tokenizer(str(model))
    sampling = SamplingConfig(max_new_tokens=32, min_new_tokens=32)
    async with client_of(address, str(model)) as client:
        make = lambda: bench.open(client, tokenizer, sampling)  # noqa: E731
        server = Job(f"{address}/generate", [""], turns=20, ids=[9] * 60, stream=True, tokens=32)
        for repeat in range(repeats + 1):
            own = await bench.run(server)
            played = await bench.play(make, 1, turns=20, stream=True, user=20)
            if repeat:
                add(found, "first_token_ms", played.result.first_ms - own.first_ms)
                add(found, "first_token_server_ms", own.first_ms)
        bench.gateway._renderer = bench.gateway.context = None


@contextmanager
def served(model: Path, kind: str, folder: Path) -> Iterator[str]:
    """Run a server of this type; yield its address."""
    from tools.server_site import PYTHON, free_port, healthy

    port = free_port()
    words = {"llm_server.type": kind, "llm_server.port": port, "model.path": model}
    if kind == "sglang":
        words |= {"llm_server.sglang.device": "cpu", "llm_server.sglang.python": PYTHON}
    words |= {"cluster.name_root": folder / "names", "cluster.run_root": folder / "runs"}
    words |= {"cluster.security": "false"}
    command = [sys.executable, str(ROOT / "arealite" / "launch_llm_server.py")]
    log = folder / f"{kind}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *(f"{key}={value}" for key, value in words.items())],
            stdout=output,
            stderr=output,
        )
    try:
        while not healthy(port):
            if process.poll() is not None:
                raise SystemExit(log.read_text())
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def add(found: Measured, name: str, value: float) -> None:
    """Add one measured value."""
    found.setdefault(name, []).append(value)


async def measure(options: argparse.Namespace) -> dict[str, float]:
    """Measure what is asked for; return the medians."""
    only, found = set(options.only), Measured()
    async with running() as bench:
        bench.profiler = cProfile.Profile(time.thread_time) if options.profile else None
        if only & {"cpu", "busy", "stall"}:
            await quick(bench, only, options.repeats, found)
            bench.gateway._renderer = bench.gateway.context = None
        for kind, name, steps in (
            ("embedded", "", {"native", "first"}),
            ("sglang", "_sglang", {"sglang"}),
        ):
            if only & steps:
                with tempfile.TemporaryDirectory() as folder:
                    model = tiny_model(Path(folder) / "model", max_position_embeddings=2048)
                    with served(model, kind, Path(folder)) as address:
                        if only & {"native", "sglang"}:
                            await native(bench, address, model, name, options.repeats, found)
                        if "first" in only and not name:
                            await first(bench, address, model, options.repeats, found)
        if bench.profiler is not None:
            pstats.Stats(bench.profiler).sort_stats("tottime").print_stats(50)
    return {name: statistics.median(values) for name, values in found.items()}


def main() -> None:
    """Measure, print a table, and write out/bench/gateway.json."""
    parts = ["cpu", "busy", "stall", "native", "first", "sglang"]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    found = uvloop.run(measure(options))
    for name, value in found.items():
        goal = f"   goal {GOALS[name]}" if name in GOALS else ""
        print(f"{name:28} {value:10.3f}{goal}")
    figures.save("gateway.json", found, keep=True)


if __name__ == "__main__":
    main()
