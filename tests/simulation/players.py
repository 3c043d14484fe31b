"""Simulated servers, client, agent and environment, with virtual latencies and failures.

Tokens identify their source: a prompt begins with the number of the group and the member, and each
sampled token is the number of the generation that sampled it.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any

from arealite.api.agent import Agent, agents
from arealite.api.env import Env, envs
from arealite.api.episode import Action
from arealite.api.llm import LLMClient, LLMRequest, LLMResponse
from arealite.api.task import Task
from arealite.base.errors import RewardTimeout, ServerUnavailable

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

MARK = 1_000_000
"""Tokens from here on were sampled; those below are prompts and observations."""
REQUEST_S = 120.0
"""Maximum time for which a generation waits for a server."""


class Servers:
    """The inference servers and the version of each; None while it is down."""

    def __init__(self, sim: Simulation, count: int) -> None:
        self.sim = sim
        self.versions: list[int | None] = [None] * count
        self.newest: int | None = None
        """Newest version whose push has begun."""
        self._changed = asyncio.Event()

    def set(self, index: int, version: int | None) -> None:
        """Set the version of a server."""
        self.versions[index] = version
        self._changed.set()
        self._changed = asyncio.Event()

    async def pick(self, min_version: int) -> int:
        """Wait for a server with at least `min_version`."""
        async with asyncio.timeout(REQUEST_S):
            while True:
                able = [
                    i for i, v in enumerate(self.versions) if v is not None and v >= min_version
                ]
                if able:
                    return self.sim.rng.choice(able)
                await self._changed.wait()


class SimClient(LLMClient):
    """Samples a generation in pieces, each with the version of its server at the end."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim

    async def generate(self, request: LLMRequest) -> LLMResponse:
        sim, rng = self.sim, self.sim.rng
        sim.generations += 1
        number, resumed = sim.generations, request.resumed
        ids = list(resumed.output_ids) if resumed else []
        versions = list(resumed.versions) if resumed else []
        interruptions = resumed.interruptions + 1 if resumed else 0
        pieces = rng.choice((1, 1, 2, 3))
        for piece in range(pieces):
            version, cuts = await self._sample(request)
            size = rng.randint(1, 2)
            ids += [MARK + number] * size
            versions += [version] * size
            interruptions += cuts
            if piece < pieces - 1 and request.on_partial is not None and rng.random() < 0.7:
                request.on_partial(_response(ids, versions, "", interruptions))
        sim.outputs[number] = (tuple(request.input_ids), tuple(ids), tuple(versions))
        return _response(ids, versions, "stop", interruptions)

    async def _sample(self, request: LLMRequest) -> tuple[int, int]:
        """Sample a piece; return its version and its number of interruptions."""
        for cuts in itertools.count():
            try:
                server = await self.sim.servers.pick(request.min_version)
            except TimeoutError as error:
                raise ServerUnavailable(request.request_id) from error
            await asyncio.sleep(self.sim.latency())
            version = self.sim.servers.versions[server]
            if version is not None and version >= request.min_version:
                return version, cuts
        raise AssertionError


def _response(ids: list[int], versions: list[int], reason: str, interruptions: int) -> LLMResponse:
    return LLMResponse(
        output_ids=list(ids),
        logprobs=[logprob(i) for i in ids],
        versions=list(versions),
        stop_reason=reason,
        interruptions=interruptions,
    )


def logprob(token: int) -> float:
    """Return a token's logprob, exact in float32."""
    return -(token % 64) / 64


@agents.register("simulated")
class SimAgent(Agent):
    """An agent with all earlier tokens as its prompt."""

    async def act(self, observation: Any) -> Action:
        seq, member = int(self.seat.group_id[1:].split("-")[0]), self.seat.episode_id
        prompt = [seq, int(member.rsplit("/", 1)[1])]
        for turn in self.record.turns[-1:]:
            prompt = turn.input_ids + turn.response.output_ids
        response = await self.generate([*prompt, observation])
        return Action("", response)


@envs.register("simulated")
class SimEnv(Env):
    """An environment with turns, rewards and failures that follow from task and generations."""

    def __init__(self, args: Any, config: Any) -> None:
        super().__init__(args, config)
        from tests.simulation.simulation import active

        self.sim = active()
        self.resumable = self.sim.scenario.resumable

    async def run(self, task: Task, **agents: Agent) -> None:
        sim, agent = self.sim, agents["agent"]
        if not sim.adversary.calm and sim.rng.random() < sim.scenario.failure_rate:
            await asyncio.sleep(sim.latency())
            raise RewardTimeout("by the scenario")
        for turn in range(sim.scenario.turns):
            action = await agent.act(turn)
            assert action.response is not None
            agent.reward(float(action.response.output_ids[0] * 7919 % 31 % 2))
            if sim.rng.random() < 0.3:
                await asyncio.sleep(sim.latency() / 4)
