"""Runs one episode of a leased group and turns what its agents recorded into trajectories.

The boundary where a failed episode becomes data: what an environment raises ends here, unless it
says that the run itself is wrong.
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING

from arealite.api.agent import Agent, AgentFactory
from arealite.api.config import ExperimentConfig
from arealite.api.env import EnvFactory
from arealite.api.episode import Seat
from arealite.api.llm import LLMClient
from arealite.api.rollout_messages import Episode, Failure, Lease
from arealite.api.trajectory import Trajectory, TrajectoryHeader, encode_segments
from arealite.base import log
from arealite.base.errors import (
    EpisodeError,
    EpisodeTimeout,
    InvariantError,
    UserError,
    failure_class,
)
from arealite.impl.rollout.segments import make_segments

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = log.get(__name__)

MAX_DETAIL = 500


class NothingGenerated(EpisodeError):
    """A trainable seat has no sampled token: there is nothing to train on."""

    failure_class = "nothing_generated"


class RewardNotFinite(EpisodeError):
    """A seat's rewards add up to infinity or to no number."""

    failure_class = "reward_not_finite"


class Collector:
    """Makes the environment once, and fresh agents for every episode. Episodes run concurrently."""

    def __init__(
        self,
        config: ExperimentConfig,
        client: LLMClient,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        ppo = config.trainer.ppo
        self.config = ppo.collector
        self.env = EnvFactory(config).make_env(self.config.env)
        self._eval_sampling = ppo.eval.sampling
        self._agents = AgentFactory(config, self.config.client, client=client, tokenizer=tokenizer)
        self._logged: set[str] = set()

    async def setup(self) -> None:
        """Start what the environment shares between episodes."""
        await self.env.setup()

    async def close(self) -> None:
        """Stop it."""
        await self.env.close()

    async def run(self, lease: Lease, member: int) -> tuple[Episode, list[bytes]]:
        """Run one episode; return its end, and a payload for each of its headers.

        Raises:
            InvariantError, UserError: not the episode but the run is wrong.
        """
        try:
            trajectories = await self.play(lease, member)
        except Exception as raised:
            error = cause(raised)
            if isinstance(error, InvariantError | UserError):
                raise error from raised
            failure = self._failure(lease, error)
            return Episode(lease.lease_id, lease.group_id, member, [], failure), []
        headers = [trajectory.header for trajectory in trajectories]
        payloads = [encode_segments(trajectory.segments) for trajectory in trajectories]
        return Episode(lease.lease_id, lease.group_id, member, headers, None), payloads

    async def play(self, lease: Lease, member: int) -> list[Trajectory]:
        """Run one episode under its deadline and return a trajectory a trainable seat.

        Raises:
            EpisodeError: it failed; so does whatever the environment raises.
        """
        begin = time.perf_counter()
        agents = self._make_agents(lease, member)
        scope = asyncio.timeout(self.config.episode_timeout_s)
        try:
            async with scope:
                await self.env.run(lease.task, **agents)
        except TimeoutError as error:
            if not scope.expired():
                raise
            limit = self.config.episode_timeout_s
            raise EpisodeTimeout(
                f"the episode ran longer than episode_timeout_s={limit}"
            ) from error
        seconds = time.perf_counter() - begin
        found = [
            trajectory(lease, member, agent, seconds=seconds)
            for agent in agents.values()
            if agent.trainable
        ]
        if not found:
            raise NothingGenerated(f"{type(self.env).__name__} has no trainable seat")
        return found

    def _make_agents(self, lease: Lease, member: int) -> dict[str, Agent]:
        episode_id = f"{lease.lease_id}/{member}"
        is_eval = lease.split.startswith("eval")
        sampling = self._eval_sampling if is_eval else self.config.sampling
        return {
            name: self._agents.make_agent(
                self.config.agent,
                Seat(name, lease.group_id, episode_id, lease.version, sampling),
            )
            for name in self.env.seats
        }

    def _failure(self, lease: Lease, error: Exception) -> Failure:
        kind = failure_class(error)
        if kind not in self._logged:  # the first of each class with its traceback, the rest counted
            self._logged.add(kind)
            expected = isinstance(error, EpisodeError)
            logger.warning(
                "episode failed",
                failure=kind,
                task=lease.task.task_id,
                error=str(error),
                exc_info=None if expected else error,
            )
        return Failure(kind, f"{type(error).__name__}: {error}"[:MAX_DETAIL])


def cause(error: Exception) -> Exception:
    """Return the error behind an environment's TaskGroup: a fatal one, else the first."""
    if not isinstance(error, ExceptionGroup):
        return error
    found = [cause(inner) for inner in error.exceptions]
    return next((e for e in found if isinstance(e, InvariantError | UserError)), found[0])


def trajectory(lease: Lease, member: int, agent: Agent, *, seconds: float) -> Trajectory:
    """Make the trajectory of one seat.

    Raises:
        NothingGenerated: the seat sampled no token.
        RewardNotFinite: its rewards do not add up to a number.
    """
    seat, record = agent.seat.name, agent.record
    turns = record.turns
    sampled = [turn.response for turn in turns if turn.response.versions]
    if not sampled:
        raise NothingGenerated(f"seat '{seat}' sampled no token in {len(turns)} turns")
    reward = math.fsum(turn.reward for turn in turns) if len(turns) > 1 else turns[0].reward
    if not math.isfinite(reward):
        raise RewardNotFinite(f"seat '{seat}' has reward {reward}")
    segments, lengths = make_segments(turns)
    waiting = record.seconds_generating + record.seconds_scoring
    header = TrajectoryHeader(
        trajectory_id=f"{lease.group_id}/{member}/{seat}",
        group_id=lease.group_id,
        member=member,
        seat=seat,
        task_id=lease.task.task_id,
        reward=reward,
        reward_parts=record.reward_parts,
        segment_lengths=lengths,
        trained_tokens=sum(len(response.versions) for response in sampled),
        oldest_version=min(min(response.versions) for response in sampled),
        newest_version=max(max(response.versions) for response in sampled),
        turns=len(turns),
        truncated=turns[-1].response.stop_reason == "length",
        interruptions=sum(turn.response.interruptions for turn in turns),
        seconds=seconds,
        waits={
            "generation": record.seconds_generating,
            "reward": record.seconds_scoring,
            "environment": max(0.0, seconds - waiting),
        },
    )
    return Trajectory(header, segments)
