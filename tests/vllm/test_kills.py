"""Kills each process of a real vLLM server in each step of an update, while the client generates.

The server is one that `serve-llm` supervises. Three tests are a part of `make test-vllm`.
`make test-vllm-kills` runs all; it takes an hour or more, because vLLM restarts after each.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from arealite.api.experiment_config import ExperimentConfig
from arealite.api.llm import LLMClientConfig, LLMRequest, LLMResponse, SamplingConfig
from arealite.ext.distributed.distributed_publisher import DistributedPublisher
from arealite.ext.vllm.vllm_control import VLLMControl
from arealite.impl.client.servers_client import ServersClient
from arealite.impl.publisher.disk import DiskPublisher
from arealite.impl.publisher.servers import ServersPublisher
from arealite.system.health.waits import Wait
from tests.sglang.shared import call
from tests.vllm.supervised import SupervisedTrial, Weights, supervised_trial
from tests.waiting import eventually, has_exited, until_exited

pytestmark = [pytest.mark.vllm_kills, pytest.mark.timeout(3000)]
LANES = 6
TOKENS = 150
TEMPERATURE = 0.8
TOLERANCE = 1e-4
"""Largest difference of a log-probability from that of transformers in float32."""
PACE_S = 5.0
"""Pause between the generations of a lane while the vLLM server starts, which needs the CPU."""
POLL_S = 0.2
"""Pause between two looks at a server that starts."""
RESTART_S = 900.0
"""Time limit for work of 40 s on an idle machine; see tests/waiting.py."""
PROCESSES = ("api", "engine", "worker")
LAST_ROUTES = {
    "paused": "/pause",
    "loaded": "/update_weights",
    "labelled": "/finish_weight_update",
    "resumed": "/resume",
}
"""The route whose answer begins a step of an update."""
HELD_STEPS = {"receiving": "receive", "loading": "load"}
"""Steps in the middle of /update_weights, in which the worker waits for the kill."""
WAYS: dict[str, type[ServersPublisher]] = {
    "disk": DiskPublisher,
    "distributed": DistributedPublisher,
}


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One kill: in which step of which update, and of which process."""

    way: str
    step: str
    process: str
    mode: str
    has_embedded: bool = True
    """Whether the trial has a second server."""

    def __str__(self) -> str:
        servers = "two servers" if self.has_embedded else "alone"
        return f"{servers}-{self.way}-{self.step}-{self.process}-{self.mode}"


def all_kills() -> list[Kill]:
    """Return the kills of `make test-vllm-kills`; those of one trial are neighbours."""
    kills = [
        Kill(way="disk", step="loading", process=process, mode="retract", has_embedded=False)
        for process in PROCESSES
    ]
    kills.append(
        Kill(way="distributed", step="loading", process="api", mode="abort", has_embedded=False)
    )
    steps = ("staging", "paused", "receiving", "loading", "loaded", "labelled", "resumed")
    for step in steps:
        for way in WAYS:
            for process in PROCESSES:
                if (way, step) == ("disk", "receiving"):
                    continue
                mode = ("retract", "abort")[len(kills) % 2]
                kills.append(Kill(way=way, step=step, process=process, mode=mode))
    return kills


KILLS = all_kills()
SHORT = {
    "two servers-disk-loading-worker",
    "two servers-distributed-loaded-api",
    "two servers-disk-labelled-engine",
}
"""Kills that are a part of `make test-vllm`."""


def parameters() -> Iterator[Any]:
    for kill in KILLS:
        is_short = str(kill).rpartition("-")[0] in SHORT
        marks = [pytest.mark.vllm] if is_short else []
        yield pytest.param(kill, id=str(kill), marks=marks)


class Trials:
    """Starts the trial of the next kill, unless the kill before it had the same one."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self._stack = ExitStack()
        self._trial: SupervisedTrial | None = None
        self._has_embedded = False

    def of(self, kill: Kill) -> SupervisedTrial:
        """Return a trial with all servers that the kill needs."""
        if self._trial is None or self._has_embedded != kill.has_embedded:
            self.close()
            folder = self._factory.mktemp("kills")
            context = supervised_trial(folder, has_embedded=kill.has_embedded)
            self._trial = self._stack.enter_context(context)
            self._has_embedded = kill.has_embedded
        return self._trial

    def close(self) -> None:
        self._stack.close()
        self._trial = None


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trials]:
    all_trials = Trials(tmp_path_factory)
    yield all_trials
    all_trials.close()


@dataclass(kw_only=True)
class Trap:
    """Kills a process of the vLLM server once, when an update has come to a step."""

    step: str
    process: psutil.Process
    hold_folder: Path
    is_armed: bool = True

    def spring(self) -> None:
        self.is_armed = False
        self.process.kill()
        until_exited(self.process)

    def at_first_tensor(self) -> None:
        """Kill the process while the publisher reads the weights of a version."""
        if self.is_armed and self.step == "staging":
            self.spring()

    async def request(self, path: str, send: Callable[[], Any]) -> tuple[int, str]:
        """Send a request of the publisher, and kill the process during or after it."""
        route = path.partition("?")[0]
        held_step = HELD_STEPS.get(self.step)
        if self.is_armed and held_step and route == "/update_weights":
            return await self._kill_in_update(held_step, send)
        answer: tuple[int, str] = await send()
        if self.is_armed and route == LAST_ROUTES.get(self.step):
            self.spring()
        return answer

    async def _kill_in_update(self, held_step: str, send: Callable[[], Any]) -> tuple[int, str]:
        hold = self.hold_folder / held_step
        held = self.hold_folder / "held"
        hold.touch()
        sending = asyncio.ensure_future(send())
        try:
            await eventually(held.exists, "the worker in the middle of an update")
            self.spring()
        finally:
            hold.unlink()
            held.unlink(missing_ok=True)
        return await sending


@pytest.fixture
def trap(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Trap]]:
    """Provide the list of traps in the requests of the publisher to vLLM servers."""
    traps = list[Trap]()
    send = VLLMControl.request

    async def request(
        control: VLLMControl, path: str, body: Any = None, *, is_slow: bool = False
    ) -> tuple[int, str]:
        sending = lambda: send(control, path, body, is_slow=is_slow)  # noqa: E731
        return await (traps[0].request(path, sending) if traps else sending())

    monkeypatch.setattr(VLLMControl, "request", request)
    yield traps


class Run:
    """A publisher and a client of a trial, as trainer and worker have them."""

    def __init__(self, trial: SupervisedTrial, config: ExperimentConfig, way: str) -> None:
        self.trial = trial
        engine: Any = None
        self.publisher = WAYS[way](config, engine)
        self.client = ServersClient(config, LLMClientConfig())
        self.weights = Weights(trial.folders)
        self.min_version = trial.version
        """The newest version whose publish has ended."""
        self.prompts: list[list[int]] = []
        self.responses: list[LLMResponse] = []
        self.probes: list[tuple[list[int], LLMResponse]] = []
        """Answers of the vLLM server to requests that no client sent."""
        self.is_stopped = False
        self._num_requests = 0

    # ------------------------------------------------------------ the trainer

    async def publish(self, trap: Trap | None = None) -> None:
        """Publish a further version."""
        self.trial.version += 1
        await asyncio.to_thread(self._publish, trap)
        self.min_version = self.trial.version

    def _publish(self, trap: Trap | None) -> None:
        version = self.trial.version
        tensors = self.weights.of(version)

        def stream() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in tensors.items():
                if trap is not None:
                    trap.at_first_tensor()
                yield name, tensor

        while self.publisher.stage(version, stream()):
            pass
        self.publisher.push(version)

    async def until_published(self, condition: Callable[[], object], event: str) -> None:
        """Wait for a condition, and publish again if a server needs it, as the trainer does."""

        with Wait(event=event, owner="test", seconds=RESTART_S):
            while not condition():
                if self.publisher.needs_republish:
                    await asyncio.to_thread(self._publish, None)
                await asyncio.sleep(POLL_S)

    # ------------------------------------------------------------ workers

    async def generate(self) -> None:
        """Generate one response after the other. A generation that is lost ends the test."""
        while not self.is_stopped:
            self._num_requests += 1
            request = LLMRequest(
                request_id=f"r{self._num_requests}",
                group_id=f"g{self._num_requests}",
                input_ids=[5, 6, 7 + self._num_requests % 40],
                sampling=SamplingConfig(
                    max_new_tokens=TOKENS,
                    min_new_tokens=TOKENS,
                    temperature=TEMPERATURE,
                ),
                min_version=self.min_version,
            )
            response = await self.client.generate(request)
            self.prompts.append(request.input_ids)
            self.responses.append(response)
            if self.trial.entry() is None:
                await asyncio.sleep(PACE_S)

    async def until_each_lane_generates(self) -> None:
        """Wait until each lane has begun and ended a generation."""
        num_needed = len(self.responses) + 2 * LANES
        await eventually(lambda: len(self.responses) >= num_needed, "generations")

    # ------------------------------------------------------------ a client without a registry

    async def probe(self) -> None:
        """Ask the vLLM server for some tokens, again and again, also when it is not registered."""
        entry = self.trial.entry()
        assert entry is not None
        address = entry["address"]
        while not self.is_stopped:
            prompt = [9, 8, 10 + len(self.probes) % 40]
            try:
                response = await asyncio.to_thread(self._ask, address, prompt)
            except (OSError, HTTPException):
                response = None
            if response is not None and response.output_ids:
                self.probes.append((prompt, response))
            await asyncio.sleep(POLL_S)

    def _ask(self, address: str, prompt: list[int]) -> LLMResponse | None:
        sampling = {"max_tokens": 3, "temperature": 1.0, "logprobs": 0, "detokenize": False}
        status, answer = call(
            address,
            "/inference/v1/generate",
            {"token_ids": prompt, "sampling_params": sampling},
            token=self.trial.token,
            seconds=20.0,
        )
        if status != 200:
            return None
        (choice,) = answer["choices"]
        versions = [
            0 if span["version"] == "default" else int(span["version"])
            for span in choice["weight_versions"] or []
            for _ in range(span["start"], span["end"])
        ]
        return LLMResponse(
            output_ids=choice["token_ids"],
            logprobs=[entry["logprob"] for entry in choice["logprobs"]["content"]],
            versions=versions,
            stop_reason=choice["finish_reason"],
        )

    def is_served(self, version: int) -> bool:
        """Return whether the vLLM server has answered a probe with tokens of a version."""
        return any(version in response.versions for _, response in self.probes)


@asynccontextmanager
async def running(trial: SupervisedTrial, kill: Kill) -> AsyncIterator[Run]:
    """Run a publisher and a client that generates all the time."""
    config = trial.config(type=kill.way, pause_mode=kill.mode)
    run = await asyncio.to_thread(Run, trial, config, kill.way)
    try:
        await run.publish()
        await run.client.start()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(LANES):
                tasks.create_task(run.generate())
            tasks.create_task(run.probe())
            await run.until_each_lane_generates()
            yield run
            run.is_stopped = True
        await run.client.close()
    finally:
        await asyncio.to_thread(run.publisher.close)


@pytest.mark.parametrize("kill", [*parameters()])
async def test_no_token_is_lost_or_wrong_when_a_process_is_killed_in_an_update(
    trials: Trials, kill: Kill, trap: list[Trap]
) -> None:
    trial = await asyncio.to_thread(trials.of, kill)
    async with running(trial, kill) as run:
        old_server = trial.process("api")
        process = trial.process(kill.process)
        trap.append(Trap(step=kill.step, process=process, hold_folder=trial.hold_folder))
        await run.publish(trap[0])
        assert not trap[0].is_armed
        assert has_exited(process)
        await run.until_published(
            lambda: (
                has_exited(old_server)
                and (entry := trial.entry())
                and entry["pid"] != old_server.pid
                and entry["version"] == str(trial.version)
            ),
            "a restarted server with the newest version",
        )
        run.probes, old_probes = [], run.probes
        await run.until_published(
            lambda: run.is_served(trial.version), "tokens of the restarted server"
        )
        await run.until_each_lane_generates()
        stats = run.client.stats()
    print(f"\n{kill}: {len(run.responses)} generations, {len(old_probes)} probes, {stats}")
    assert stats["requests"] == len(run.responses)
    difference = run.weights.largest_difference
    for prompt, response in zip(run.prompts, run.responses, strict=True):
        assert len(response.output_ids) == len(response.logprobs) == TOKENS
        assert response.versions == sorted(response.versions)
        assert difference(prompt, response, temperature=TEMPERATURE, has_eos=False) <= TOLERANCE
    for prompt, response in old_probes + run.probes:
        assert len(response.versions) == len(response.output_ids)
        assert difference(prompt, response, temperature=1.0, has_eos=True) <= TOLERANCE
