"""A gateway whose model is a scripted sampler, and the check of all its sessions' tokens."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from typing import Any

from arealite.api.agent import Agent
from arealite.api.episode import Action, Seat
from arealite.api.llm import LLMRequest, SamplingConfig
from arealite.api.rollout_messages import Lease
from arealite.api.trajectory import Segment
from arealite.api.trial import TrialConfig
from arealite.ext.gateway.config import GatewayConfig
from arealite.ext.gateway.gateway import Gateway
from arealite.ext.gateway.session import GatewaySession
from arealite.impl.rollout.collector import (
    EncodedTrajectory,
    NothingGenerated,
    make_trajectory,
    tree_of,
)
from tests.fakes.chat_families import tokenizer_of
from tests.fakes.experiment import lease
from tests.fakes.family_answers import Plan, script
from tests.fakes.scripted_tokens import ScriptedTokens, Verdict, check
from tests.payloads import decode_segments


class SeatAgent(Agent):
    """Records the generations of a seat; never acts itself."""

    async def act(self, observation: object) -> Action:
        """Refuse."""
        raise NotImplementedError


def trajectory_of(made: Lease, agent: Agent) -> EncodedTrajectory:
    """Return the trajectory of a session's agent."""
    return make_trajectory(made, 0, agent, tree_of(agent), seconds=1.0)


class GatewaySessions:
    """Sessions of one chat family. Use as a context manager, then read `verdict`."""

    def __init__(
        self,
        family: str,
        plan: Plan,
        *,
        seed: int = 0,
        publish: float = 0.02,
        config: GatewayConfig | None = None,
        pause: Callable[[LLMRequest], Awaitable[None]] | None = None,
        **sampling: Any,
    ) -> None:
        self.family, self.tokenizer = family, tokenizer_of(family)
        written = script(family, self.tokenizer, plan)
        options: Any = {"seed": seed, "publish": publish, "pause": pause}
        self.client = ScriptedTokens(self.tokenizer, written, **options)
        self.gateway = Gateway(config or GatewayConfig(), args=TrialConfig())
        self.sampling = SamplingConfig(**{"max_new_tokens": 4000} | sampling)
        self.segments: list[Segment] = []
        self.rows: dict[str, int] = {}
        """Segments of each closed session, by its episode."""
        self.stats: dict[str, Any] = {}
        """Counters of each closed session, by its episode."""
        self.opened = 0
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> GatewaySessions:
        """Start the gateway."""
        self._stack.push_async_callback(self.gateway.close)
        await self.gateway.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        """Stop the gateway."""
        await self._stack.aclose()

    def open(self, seats: Iterable[str] = ("agent",)) -> GatewaySession:
        """Open the session of a new episode."""
        number, self.opened = self.opened, self.opened + 1
        made = lease(number)
        agents: dict[str, Agent] = {}
        for name in seats:
            seat = Seat(
                name=name,
                group_id=made.group_id,
                episode_id=f"{made.lease_id}/0",
                min_version=0,
                sampling=self.sampling,
            )
            agents[name] = SeatAgent(None, client=self.client, tokenizer=self.tokenizer, seat=seat)
        session = self.gateway.open(made.task, agents)
        session.number = number  # type: ignore[attr-defined]
        return session

    async def close(self, session: GatewaySession) -> int:
        """End a session and make its trajectories; return the number of their segments."""
        await session.close()
        number: int = session.number  # type: ignore[attr-defined]
        made = lease(number)
        rows = 0
        for agent in session.agents.values():
            try:
                _, payload = await asyncio.to_thread(trajectory_of, made, agent)
            except NothingGenerated:
                continue
            segments = decode_segments(payload)
            self.segments += segments
            rows += len(segments)
        self.rows[f"{made.lease_id}/0"] = rows
        self.stats[f"{made.lease_id}/0"] = session.stats
        return rows

    def verdict(self, dropped: Iterable[str] = ()) -> Verdict:
        """Compare all trajectories with the sampler's log."""
        return check(self.client.log, self.segments, dropped=dropped)

    def text(self, segment: Segment) -> str:
        """Return the text of a segment, for messages of failed tests."""
        return self.tokenizer.decode(array("i", segment.tokens).tolist())
