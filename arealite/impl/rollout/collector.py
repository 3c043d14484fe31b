"""Runs the episodes of leased groups, and makes trajectories from the turns of their agents.

An exception of an environment or agent becomes a Failure in the episode's result. Only exceptions
of the run itself (`FATAL`) are raised again.
"""

import asyncio
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, NamedTuple

from arealite.api.agent import Agent, AgentFactory
from arealite.api.collector_config import PartConfig
from arealite.api.env import Env, make_env
from arealite.api.episode import Seat
from arealite.api.experiment_config import ExperimentConfig
from arealite.api.hooks import TreeChange, TreeChangeMaker
from arealite.api.llm import LLMClient
from arealite.api.payloads import Payload
from arealite.api.rollout_messages import (
    FATAL,
    PLACE,
    Episode,
    Failure,
    Lease,
    TurnHeader,
    make_failure,
    root_error,
)
from arealite.api.task import Task
from arealite.api.trajectory import TrajectoryHeader
from arealite.api.trajectory_tree import TrajectoryTree
from arealite.base import entries, errors, log
from arealite.base.errors import DeadlineError, EpisodeError, EpisodeTimeout, UserError
from arealite.base.registry import unknown
from arealite.impl.rollout.resumed_turns import recorded_turns, unsent_turns
from arealite.impl.rollout.tree_maker import make_tree
from arealite.system.health.waits import Wait, is_cancelled

if TYPE_CHECKING:
    from arealite.api.tokenizer import Tokenizer

logger = log.get(__name__)

if sys.byteorder != "little":
    raise UserError(f"this machine is {sys.byteorder}-endian. Payloads need a little-endian one.")


Agents = dict[str, Agent]
"""By seat."""
EpisodeKey = tuple[str, int]
"""(lease id, member)."""
EncodedTrajectory = tuple[TrajectoryHeader, Payload]
"""Header and payload of a trajectory."""
EncodedEpisode = tuple[Episode, list[Payload]]
"""An episode, and the payloads of its trajectories."""


class NothingGenerated(EpisodeError, failure_class="nothing_generated"):
    """A trainable seat has no sampled token, so nothing can be trained."""


class RunEnv(NamedTuple):
    """One environment of the run."""

    config: PartConfig
    env: Env


class Collector:
    """Runs many episodes concurrently. Environments are made once, agents for every episode."""

    def __init__(self, config: ExperimentConfig, client: LLMClient, tokenizer: "Tokenizer") -> None:
        ppo = config.trainer.ppo
        self.config = ppo.collector
        self.parts = {
            name: RunEnv(part_config, make_env(config, part_config.env))
            for name, part_config in self.config.parts.items()
        }
        """By name; a task's `extra_info.env` is the name of its environment."""
        self._eval_sampling = ppo.eval.sampling
        self._agents = AgentFactory(config, client=client, tokenizer=tokenizer)
        self._logged = set[tuple[str, ...]]()
        makers: list[TreeChangeMaker] = entries.hooks("tree_change")
        self._tree_contexts = entries.results(makers, config)
        self._tree_changes: list[TreeChange] = []
        self._stack = AsyncExitStack()
        self._running = set[Wait]()
        """The wait of each running episode."""
        self._playing: dict[EpisodeKey, tuple[Lease, Agents]] = {}
        """Running episodes of resumable environments."""
        self.resumed: Counter[str] = Counter()
        """Counts of episodes and tokens resumed from records, and of records that differed."""

    async def setup(self) -> None:
        """Start the environments and the shared clients of agents; if one fails, close the others.

        Raises:
            UserError: an environment cannot start, or lacks a seat that the config names.
        """
        async with AsyncExitStack() as stack:
            agent_configs = [self.config.agent]
            for part in self.parts.values():
                stack.push_async_callback(part.env.close)
                await part.env.setup()
                check_seats(part.config, part.env.seats)
                agent_configs += part.config.seats.values()
            for agent_config in agent_configs:
                await self._agents.share(agent_config, stack)
            for context in self._tree_contexts:
                self._tree_changes.append(await stack.enter_async_context(context))
            self._stack = stack.pop_all()

    async def close(self) -> None:
        """Close the environments and the shared clients of agents."""
        await self._stack.aclose()

    def abandon_running(self) -> None:
        """Stop waiting for cancelled episodes that do not end."""
        for wait in [*self._running]:
            wait.abandon()

    def part(self, task: Task) -> RunEnv:
        """Return the environment of a task.

        Raises:
            UserError: the run has no environment of that name.
        """
        name = task.extra_info.get("env", "") if self.config.envs else ""
        if name not in self.parts:
            problem = unknown("environment", str(name), [*self.parts])
            raise UserError(f"{task.task_id}: {problem}")
        return self.parts[name]

    async def run(self, lease: Lease, member: int, turns: Sequence[bytes] = ()) -> EncodedEpisode:
        """Run one episode.

        Args:
            turns: payloads of `lease.turns`; generations recorded in them are not sampled again.

        Returns:
            (the result, a payload for each of its headers).

        Raises:
            InvariantError, UserError: the error concerns the run, not this episode.
        """
        trajectories: list[EncodedTrajectory] = []
        failure = None
        try:
            trajectories = await self._run_episode(lease, member, turns)
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as raised:  # SystemExit and Rust panics are no Exception
            if isinstance(raised, asyncio.CancelledError) and is_cancelled():
                raise  # the episode is cancelled, not a task that it waited for
            error = root_error(raised)
            if isinstance(error, FATAL):
                raise error from raised
            failure = self._failure(lease, error)
        episode = Episode(
            lease_id=lease.lease_id,
            group_id=lease.group_id,
            member=member,
            headers=[header for header, _ in trajectories],
            failure=failure,
        )
        return episode, [payload for _, payload in trajectories]

    def progress(self, resend_all: bool) -> Iterator[tuple[Lease, list[TurnHeader], list[bytes]]]:
        """Yield the unsent turns of running episodes; with `resend_all`, all their turns."""
        for (_, member), (lease, agents) in self._playing.items():
            headers = list[TurnHeader]()
            payloads = list[bytes]()
            turns = unsent_turns(lease, member, agents.values(), resend_all=resend_all)
            for header, payload in turns:
                headers.append(header)
                payloads.append(payload)
            if headers:
                yield lease, headers, payloads

    async def _run_episode(
        self, lease: Lease, member: int, turns: Sequence[bytes]
    ) -> list[EncodedTrajectory]:
        """Run one episode; return one trajectory for each trainable seat."""
        begin = time.perf_counter()
        part = self.part(lease.task)
        resumed_turns = turns if part.env.resumable else ()
        agents = self._make_agents(part, lease, member, resumed_turns)
        if part.env.resumable and lease.split == "train":
            self._playing[lease.lease_id, member] = lease, agents
        try:
            await self._run_env(part, lease, member, agents)
        finally:
            self._playing.pop((lease.lease_id, member), None)
            if turns:
                self._count_resumed(agents)
        seconds = time.perf_counter() - begin
        trained_agents = [agent for agent in agents.values() if agent.trainable]
        if not trained_agents:
            raise NothingGenerated(f"{type(part.env).__name__} has no trainable seat")
        # A game may end before it is a seat's turn.
        with_turns = [agent for agent in trained_agents if agent.record.turns]
        trajectories: list[EncodedTrajectory] = []
        for agent in with_turns or trained_agents:
            tree = tree_of(agent)
            if lease.split == "train":
                for change in self._tree_changes:
                    tree = await change(lease.task, tree)
            trajectories.append(make_trajectory(lease, member, agent, tree, seconds=seconds))
        return trajectories

    async def _run_env(self, part: RunEnv, lease: Lease, member: int, agents: Agents) -> None:
        """Run the environment under the deadline of an episode.

        Raises:
            EpisodeTimeout: the episode ran longer than `episode_timeout_s`.
        """
        limit_s = self.config.episode_timeout_s
        name = f"episode {lease.group_id}/{member} ({lease.task.task_id})"
        env_name = f"environment {part.config.env.type}"
        wait = Wait(event=name, owner="collector", on=env_name, seconds=limit_s)
        self._running.add(wait)
        try:
            with wait:
                task = lease.task.copy()
                await wait.run(part.env.run(task, **agents))
            if wait.expired:  # the environment caught the cancellation
                raise DeadlineError(name, owner="collector", seconds=limit_s)
        except (TimeoutError, DeadlineError) as error:
            if not wait.expired:
                raise
            ending = ", caught its cancellation, and was abandoned" if wait.abandoned else ""
            message = f"the episode ran longer than episode_timeout_s={limit_s}{ending}"
            raise EpisodeTimeout(message) from error
        finally:
            self._running.discard(wait)

    def _count_resumed(self, agents: Agents) -> None:
        records = [agent.record for agent in agents.values()]
        num_tokens = sum(record.resumed_tokens for record in records)
        self.resumed["resumed_episodes"] += num_tokens > 0
        self.resumed["resumed_tokens"] += num_tokens
        self.resumed["resumed_diverged"] += any(record.resumed_diverged for record in records)

    def _make_agents(
        self, part: RunEnv, lease: Lease, member: int, turns: Sequence[bytes]
    ) -> Agents:
        is_eval = lease.split.startswith("eval")
        sampling = self._eval_sampling if is_eval else self.config.sampling
        agents: Agents = {}
        for name in part.env.seats:
            recorded = recorded_turns(lease, member, name, turns) if turns else ()
            seat = Seat(
                name=name,
                group_id=lease.group_id,
                episode_id=f"{lease.lease_id}/{member}",
                min_version=lease.version,
                sampling=sampling,
                is_eval=is_eval,
                recorded=recorded,
            )
            config = part.config.seats.get(name, self.config.agent)
            agents[name] = self._agents.make_agent(config, seat)
        return agents

    def _failure(self, lease: Lease, error: BaseException) -> Failure:
        failure = make_failure(error)
        key = (failure.failure_class, *PLACE.findall(failure.detail))
        if key not in self._logged:  # log only the first of each class and place
            self._logged.add(key)
            logger.warning(
                "episode failed",
                failure=failure.failure_class,
                task=lease.task.task_id,
                error=str(error),
                exc_info=None if isinstance(error, EpisodeError) else error,
            )
        return failure


def check_seats(config: PartConfig, seats: Sequence[str]) -> None:
    """Refuse agents for seats that an environment does not have."""
    for name in config.seats:
        if name not in seats:
            raise UserError(f"{config.env.type}: " + unknown("seat", name, seats))


def tree_of(agent: Agent) -> TrajectoryTree:
    """Return the tree of a seat's turns; without a score, all their rewards are 0."""
    record = agent.record
    if record.is_unscored:
        for turn in record.turns:
            turn.reward = 0.0
    return make_tree(record.turns)


def make_trajectory(
    lease: Lease,
    member: int,
    agent: Agent,
    tree: TrajectoryTree,
    *,
    seconds: float,
) -> EncodedTrajectory:
    """Return the header and the payload of a seat's trajectory.

    Raises:
        NothingGenerated: the seat sampled no token.
        RewardNotFinite: the sum of its rewards is not finite.
    """
    seat = agent.seat.name
    record = agent.record
    turns = record.turns
    versions = [version for turn in turns for version in turn.response.versions]
    if not versions:
        raise NothingGenerated(f"seat '{seat}' sampled no token in {len(turns)} turns")
    reward = math.fsum([turn.reward for turn in turns])
    if not math.isfinite(reward):
        raise errors.RewardNotFinite(f"seat '{seat}' has reward {reward}")
    payload = tree.encode()
    seconds_of_agent = record.seconds_generating + record.seconds_scoring
    header = TrajectoryHeader(
        trajectory_id=f"{lease.group_id}/{member}/{seat}",
        group_id=lease.group_id,
        member=member,
        seat=seat,
        task_id=lease.task.task_id,
        reward=None if record.is_unscored else reward,
        reward_parts=record.reward_parts,
        segment_lengths=tree.segment_lengths,
        trained_tokens=len(versions),
        oldest_version=min(versions),
        newest_version=max(versions),
        turns=len(turns),
        truncated=turns[-1].response.stop_reason == "length",
        interruptions=sum([turn.response.interruptions for turn in turns]),
        seconds=seconds,
        waits={
            "generation": record.seconds_generating,
            "reward": record.seconds_scoring,
            "environment": max(0.0, seconds - seconds_of_agent),
        },
        source=lease.task.source,
        digest=payload.digest,
        prompt=turns[0].prompt,
        prompt_tokens=turns[0].start,
        computed_tokens=sum([turn.end - turn.num_known_tokens for turn in turns]),
    )
    return header, payload
