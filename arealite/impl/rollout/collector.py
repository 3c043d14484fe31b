"""Runs the episodes of leased groups, and makes trajectories from the turns of their agents.

An exception of an environment or agent becomes a Failure in the episode's result. Only exceptions
of the run itself (`FATAL`) are raised again.
"""

import asyncio
import math
import sys
import time
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, NamedTuple

from arealite.api.agent import Agent, AgentFactory
from arealite.api.collector import PartConfig
from arealite.api.config import ExperimentConfig
from arealite.api.env import Env
from arealite.api.episode import Seat
from arealite.api.llm import LLMClient
from arealite.api.payloads import encode_segments
from arealite.api.rollout_messages import Episode, Failure, Lease, TurnHeader
from arealite.api.task import Task
from arealite.api.trajectory import Segment, TrajectoryHeader, TurnReceipt
from arealite.api.turns import Turn, blake2b
from arealite.base import errors, log
from arealite.base.errors import DeadlineError, EpisodeError, EpisodeTimeout, UserError
from arealite.base.registry import unknown
from arealite.impl.env_client import make_env
from arealite.impl.rollout.failures import FATAL, PLACE, make_failure, root_error
from arealite.impl.rollout.resume import recorded_turns, unsent_turns
from arealite.system.health.waits import Wait, is_cancelled
from arealite.system.ledger.payloads import payload_sum

if TYPE_CHECKING:
    from arealite.base.tokenizer import Tokenizer

logger = log.get(__name__)

if sys.byteorder != "little":
    raise UserError(f"this machine is {sys.byteorder}-endian. Payloads need a little-endian one.")


Agents = dict[str, Agent]
"""By seat."""
Made = tuple[TrajectoryHeader, bytes]
"""Header and payload of a trajectory."""
Played = tuple[Episode, list[bytes]]
"""An episode, and the payloads of its trajectories."""


class NothingGenerated(EpisodeError, failure_class="nothing_generated"):
    """A trainable seat has no sampled token, so nothing can be trained."""


class Part(NamedTuple):
    """One environment of the run."""

    config: PartConfig
    env: Env


class Collector:
    """Runs many episodes concurrently. Environments are made once, agents for every episode."""

    def __init__(self, config: ExperimentConfig, client: LLMClient, tokenizer: "Tokenizer") -> None:
        ppo = config.trainer.ppo
        self.config = ppo.collector
        parts = self.config.parts.items()
        self.parts = {name: Part(part, make_env(config, part.env)) for name, part in parts}
        """By name; a task's `extra_info.env` is the name of its environment."""
        self._eval_sampling = ppo.eval.sampling
        self._agents = AgentFactory(config, client=client, tokenizer=tokenizer)
        self._logged = set[tuple[str, ...]]()
        self._stack = AsyncExitStack()
        self._running = set[Wait]()
        """The wait of each running episode."""
        self._playing: dict[tuple[str, int], tuple[Lease, Agents]] = {}
        """By lease id and member: running episodes of resumable environments."""
        self.resumed: Counter[str] = Counter()
        """Counts of episodes and tokens resumed from records, and of records that differed."""

    async def setup(self) -> None:
        """Start the environments and the shared clients of agents; if one fails, close the others.

        Raises:
            UserError: an environment cannot start, or lacks a seat that the config names.
        """
        async with AsyncExitStack() as stack:
            for part in self.parts.values():
                stack.push_async_callback(part.env.close)
                await part.env.setup()
                check_seats(part.config, part.env.seats)
            configs = [self.config.agent]
            configs += [seat for part in self.parts.values() for seat in part.config.seats.values()]
            for config in configs:
                await self._agents.share(config, stack)
            self._stack = stack.pop_all()

    async def close(self) -> None:
        """Close the environments and the shared clients of agents."""
        await self._stack.aclose()

    def abandon_running(self) -> None:
        """Stop waiting for cancelled episodes that do not end."""
        for wait in [*self._running]:
            wait.abandon()

    def part(self, task: Task) -> Part:
        """Return the environment of a task.

        Raises:
            UserError: the run has no environment of that name.
        """
        name = task.extra_info.get("env", "") if self.config.envs else ""
        if name not in self.parts:
            raise UserError(f"{task.task_id}: " + unknown("environment", str(name), [*self.parts]))
        return self.parts[name]

    async def run(self, lease: Lease, member: int, turns: Sequence[bytes] = ()) -> Played:
        """Run one episode.

        Args:
            turns: payloads of `lease.turns`; generations recorded in them are not sampled again.

        Returns:
            (the result, a payload for each of its headers).

        Raises:
            InvariantError, UserError: the error concerns the run, not this episode.
        """
        made: list[Made] = []
        failure = None
        try:
            made = await self._run_episode(lease, member, turns)
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as raised:  # SystemExit and Rust panics are no Exception
            if isinstance(raised, asyncio.CancelledError) and is_cancelled():
                raise  # the episode is cancelled, not a task that it waited for
            error = root_error(raised)
            if isinstance(error, FATAL):
                raise error from raised
            failure = self._failure(lease, error)
        headers = [header for header, _ in made]
        payloads = [payload for _, payload in made]
        return Episode(lease.lease_id, lease.group_id, member, headers, failure), payloads

    def progress(self, resend_all: bool) -> Iterator[tuple[Lease, list[TurnHeader], list[bytes]]]:
        """Yield the unsent turns of running episodes; with `resend_all`, all their turns."""
        for (_, member), (lease, agents) in self._playing.items():
            own = agents.values()
            if unsent := [*unsent_turns(lease, member, own, resend_all=resend_all)]:
                yield lease, [header for header, _ in unsent], [payload for _, payload in unsent]

    async def _run_episode(self, lease: Lease, member: int, turns: Sequence[bytes]) -> list[Made]:
        """Run one episode under its deadline; return one trajectory for each trainable seat."""
        begin = time.perf_counter()
        part = self.part(lease.task)
        agents = self._make_agents(part, lease, member, turns if part.env.resumable else ())
        seconds = self.config.episode_timeout_s
        what = f"episode {lease.group_id}/{member} ({lease.task.task_id})"
        on = f"environment {part.config.env.type}"
        wait = Wait(what, owner="collector", on=on, seconds=seconds)
        self._running.add(wait)
        if part.env.resumable and lease.split == "train":
            self._playing[lease.lease_id, member] = lease, agents
        try:
            with wait:
                await wait.run(part.env.run(lease.task.copy(), **agents))
            if wait.expired:  # the environment caught the cancellation
                raise DeadlineError(what, owner="collector", seconds=seconds)
        except (TimeoutError, DeadlineError) as error:
            if not wait.expired:
                raise
            what = f"the episode ran longer than episode_timeout_s={seconds}"
            if wait.abandoned:
                what += ", caught its cancellation, and was abandoned"
            raise EpisodeTimeout(what) from error
        finally:
            self._running.discard(wait)
            self._playing.pop((lease.lease_id, member), None)
            if turns:
                self._count_resumed(agents)
        seconds = time.perf_counter() - begin
        seats = [agent for agent in agents.values() if agent.trainable]
        if not seats:
            raise NothingGenerated(f"{type(part.env).__name__} has no trainable seat")
        # A game may end before it is a seat's turn.
        seats = [agent for agent in seats if agent.record.turns] or seats
        return [make_trajectory(lease, member, agent, seconds=seconds) for agent in seats]

    def _count_resumed(self, agents: Agents) -> None:
        records = [agent.record for agent in agents.values()]
        tokens = sum(record.resumed_tokens for record in records)
        self.resumed["resumed_episodes"] += tokens > 0
        self.resumed["resumed_tokens"] += tokens
        self.resumed["resumed_diverged"] += any(record.resumed_diverged for record in records)

    def _make_agents(self, part: Part, lease: Lease, member: int, turns: Sequence[bytes]) -> Agents:
        episode_id = f"{lease.lease_id}/{member}"
        is_eval = lease.split.startswith("eval")
        sampling = self._eval_sampling if is_eval else self.config.sampling
        made: Agents = {}
        for name in part.env.seats:
            recorded = recorded_turns(lease, member, name, turns) if turns else ()
            seat = Seat(name, lease.group_id, episode_id, lease.version, sampling, recorded)
            config = part.config.seats.get(name, self.config.agent)
            made[name] = self._agents.make_agent(config, seat)
        return made

    def _failure(self, lease: Lease, error: BaseException) -> Failure:
        failure = make_failure(error)
        key = failure.failure_class, *PLACE.findall(failure.detail)
        if key not in self._logged:  # log only the first of each class and place
            self._logged.add(key)
            trace = None if isinstance(error, EpisodeError) else error
            known = {"failure": key[0], "task": lease.task.task_id, "error": str(error)}
            logger.warning("episode failed", **known, exc_info=trace)
        return failure


def check_seats(config: PartConfig, seats: Sequence[str]) -> None:
    """Refuse agents for seats that an environment does not have."""
    for name in config.seats:
        if name not in seats:
            raise UserError(f"{config.env.type}: " + unknown("seat", name, seats))


def make_trajectory(lease: Lease, member: int, agent: Agent, *, seconds: float) -> Made:
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
    if record.is_unscored:
        for turn in turns:
            turn.reward = 0.0
    reward = math.fsum([turn.reward for turn in turns])
    if not math.isfinite(reward):
        raise errors.RewardNotFinite(f"seat '{seat}' has reward {reward}")
    segments = make_segments(turns)
    payload = encode_segments(segments)
    header = TrajectoryHeader(
        trajectory_id=f"{lease.group_id}/{member}/{seat}",
        group_id=lease.group_id,
        member=member,
        seat=seat,
        task_id=lease.task.task_id,
        reward=None if record.is_unscored else reward,
        reward_parts=record.reward_parts,
        segment_lengths=[len(segment.loss_mask) for segment in segments],
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
            "environment": max(0.0, seconds - record.seconds_generating - record.seconds_scoring),
        },
        source=lease.task.source,
        payload_sum=payload_sum(payload),
        prompt=turns[0].prompt,
        prompt_tokens=turns[0].start,
        computed_tokens=sum([turn.end - turn.known for turn in turns]),
    )
    return header, payload


def make_segments(turns: Sequence[Turn]) -> list[Segment]:
    """Merge turns into segments, with exactly the tokens that were sent and sampled.

    A turn extends the segment that ends with its parent: the longest turn whose prompt and output
    its prompt begins with, at the same temperature. Any other turn begins a segment, in which
    earlier tokens are not trained again. The segments are in the order of their last turns.
    """
    rows: dict[Turn, list[tuple[Turn, TurnReceipt]]] = {}
    kept = {*turns}
    for turn in turns:
        parent = turn.parent
        origin = turn.origin
        start = turn.start
        while parent is not None and parent not in kept:  # its answer was dropped
            parent = parent.parent
        row = rows.pop(parent, []) if parent else []
        known = "first" if turn is turns[0] else "forked" if turn.known else "rewritten"
        reason = "" if row else (origin and origin.reason) or known
        reused = min(origin.reused, start) if origin else parent.end if parent else 0
        answer = blake2b(b"".join(turn.sampled)).digest()
        length = turn.end - start
        row.append((turn, TurnReceipt(start, length, reused, reason, turn.prompt, answer)))
        rows[turn] = row
    return [_segment(row) for row in rows.values()]


def _segment(row: list[tuple[Turn, TurnReceipt]]) -> Segment:
    """Return the segment of turns that extend each other; the last turn has the tokens of all."""
    last = row[-1][0]
    at = 0
    masks: list[bytes] = []  # list[bytes]() takes 0.3 µs more
    logprobs: list[bytes] = []
    versions: list[bytes] = []
    rewards = array("f", bytes(4 * last.end))
    for turn, _ in row:
        before = turn.start - at
        masks += bytes(before), b"\x01" * (turn.end - turn.start)
        logprobs += bytes(4 * before), turn.sampled[1]
        versions += b"\xff" * (4 * before), turn.sampled[2]
        at = turn.end
        rewards[at - 1] += turn.reward
    mask, logprob, version = map(b"".join, (masks, logprobs, versions))
    tokens = last.raw_prompt + last.sampled[0]
    receipts = [receipt for _, receipt in row]
    told = tokens, mask, logprob, version, rewards.tobytes(), last.temperature
    return Segment(*told, last.next_state, receipts, last.routing)
