"""One session of an environment server: it plays `Env.run` by reset and step messages.

The environment is not changed. The session passes it agents whose `act` waits for a step message.
"""

import asyncio
import time
import uuid
from collections import Counter
from dataclasses import dataclass
from typing import Any, cast

from msgspec.structs import asdict

from arealite.api.agent import Agent
from arealite.api.env import Env
from arealite.api.episode import Action, Seat, finite
from arealite.api.llm import LLMResponse
from arealite.api.observation import observe
from arealite.api.rollout_messages import root_error
from arealite.api.task import Task
from arealite.api.turns import Turn
from arealite.base import log
from arealite.base.errors import EpisodeTimeout
from arealite.ext.hosting.server.env_messages import MessageRefused
from arealite.ext.hosting.server_config import (
    EnvObservation,
    Reset,
    SeatObservation,
    SeatReward,
    Step,
    StepReply,
)
from arealite.system.health import waits
from arealite.system.health.waits import END_S, is_cancelled

logger = log.get(__name__)

SETTLE_TURNS = 10
"""Iterations of the event loop before an answer, in environments with several seats. Seats that act
at the same time reach their next wait in these iterations, so that one answer holds all waits."""


@dataclass(kw_only=True)
class PendingWait:
    """A seat that waits for a step message of the client."""

    observation: SeatObservation
    step: asyncio.Future[Step]


class RemoteSeat(Agent):
    """Stands for an agent that runs in the client."""

    trainable = False

    def __init__(self, name: str, session: "EnvSession", *, trainable: bool) -> None:
        unused = cast(Any, None)
        super().__init__(
            None,
            client=unused,
            tokenizer=unused,
            seat=Seat(name=name, episode_id=str(session.episode_id)),
        )
        self.trainable = trainable
        self._session = session
        self._turn = 0

    async def act(self, observation: object) -> Action:
        """Send the observation to the client and wait for its step."""
        self._turn, step = await self._session.wait_for(self.seat.name, observation)
        response = None
        if step.stop_reason:  # the client's agent generated the text
            response = LLMResponse(
                output_ids=[], logprobs=[], versions=[], stop_reason=step.stop_reason
            )
            self.record.turns.append(Turn(response=response, temperature=0.0))
        return Action(
            text=step.text,
            response=response,
            calls=step.calls,
            is_last=step.is_last,
        )

    def reward(self, value: float | None, /, **parts: float) -> None:
        """Keep the reward for the next answer."""
        finite_value, finite_parts = finite(value, parts)
        reward = SeatReward(
            seat=self.seat.name,
            turn=self._turn,
            value=finite_value,
            parts=finite_parts,
        )
        self._session.rewards.append(reward)


class EnvSession:
    """The episodes of one client, played one after the other."""

    def __init__(self, env: Env, *, episode_s: float, name: str = "") -> None:
        self.env = env
        self.name = name
        """Type of the environment that a reset without `env` selects."""
        self.id = str(uuid.uuid4())
        self.episode_id: str | None = None
        self.created = time.monotonic()
        self.last_message = self.created
        self.steps = 0
        """Steps of the current episode."""
        self.episodes = 0
        self.rewards: list[SeatReward] = []
        """Rewards since the last reply."""
        self._episode_s = episode_s
        self._waits: dict[tuple[str, int], PendingWait] = {}
        """Pending waits by seat and turn, oldest first."""
        self._turns: Counter[str] = Counter()
        self._changed = asyncio.Event()
        self._run: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None

    def describe(self) -> dict[str, object]:
        """Return the session's state, without the text of its messages."""
        now = time.monotonic()
        return {
            "id": self.id,
            "status": self._status(),
            "seconds": round(now - self.created, 1),
            "silent_s": round(now - self.last_message, 1),
            "episodes": self.episodes,
            "episode_id": self.episode_id,
            "step_count": self.steps,
        }

    def _status(self) -> str:
        if self._run is None:
            return "new"
        if self._run.done():
            return "over"
        return "waiting" if self._waits else "running"

    async def reset(self, task: Task, reset: Reset, env: Env | None = None) -> StepReply:
        """Cancel the current episode, if any, and begin an episode of a task.

        Args:
            task: The task.
            reset: The client's message.
            env: The environment of the episode; None: that of the last episode.

        Raises:
            BaseException: The episode failed with this exception.
        """
        await self.end()
        self.env = env or self.env
        self.episode_id = reset.episode_id or str(uuid.uuid4())
        self.steps = 0
        self.rewards = []
        self._failure = None
        self.episodes += 1
        self._turns.clear()
        seats = {
            name: RemoteSeat(name, self, trainable=name not in reset.untrained)
            for name in self.env.seats
        }
        playing = self._play(task.copy(), seats)
        self._run = asyncio.create_task(playing, name=f"episode {self.episode_id}")
        return await self._reply()

    async def step(self, step: Step) -> StepReply:
        """Apply the action of a seat; return the next observation.

        A step for a wait that is already over changes nothing.

        Raises:
            MessageRefused: No episode is running, or the seat does not wait for a step.
            BaseException: The episode failed with this exception.
        """
        if self._run is None or (self._run.done() and not step.turn):
            raise MessageRefused("no episode is running. Send a reset first.")
        key = self._find(step)
        if key is not None:
            self.steps += 1
            wait = self._waits.pop(key)
            if not wait.step.done():  # done: the environment cancelled this `act`
                wait.step.set_result(step)
            if self._waits:
                await _settle()
        return await self._reply()

    def cancel(self) -> asyncio.Task[None] | None:
        """Cancel the episode; return its task if it still has to clean up, else None."""
        for wait in self._waits.values():
            wait.step.cancel()
        if self._run is None or self._run.done():
            return None
        if not self._run.cancelling():  # a second `cancel` would interrupt its cleanup
            self._run.cancel()
        return self._run

    async def end(self) -> None:
        """Cancel the episode and wait until it has cleaned up, at most END_S seconds."""
        run = self.cancel()
        if run is not None:
            await asyncio.wait((run,), timeout=END_S)
            if not run.done():
                logger.warning("cancelled episode still running", env=type(self.env).__name__)

    async def wait_for(self, seat: str, observation: object) -> tuple[int, Step]:
        """Send an observation and wait for the seat's step.

        Returns:
            The number of the seat's turn, from 1, and the step.
        """
        observed = observe(observation)
        self._turns[seat] += 1
        turn = self._turns[seat]
        seat_observation = SeatObservation(
            seat=seat,
            turn=turn,
            content=observed.content,
            choices=observed.choices,
            tools=observed.tools,
        )
        step: asyncio.Future[Step] = asyncio.get_running_loop().create_future()
        self._waits[seat, turn] = PendingWait(observation=seat_observation, step=step)
        self._changed.set()
        try:
            return turn, await step
        finally:
            self._waits.pop((seat, turn), None)

    async def _play(self, task: Task, seats: dict[str, RemoteSeat]) -> None:
        """Play an episode; keep the exception with which it fails."""
        wait = waits.Wait(
            event="an episode",
            owner="env server",
            on="environment",
            seconds=self._episode_s,
        )
        try:
            with wait:
                await self.env.run(task, **seats)
        except (Exception, asyncio.CancelledError) as raised:
            if wait.expired:
                self._failure = EpisodeTimeout(f"longer than server.episode_s={self._episode_s}")
            elif isinstance(raised, asyncio.CancelledError) and is_cancelled():
                raise  # the task itself was cancelled, not a future that the episode awaits
            else:
                self._failure = root_error(raised)
        finally:
            self._changed.set()

    def _find(self, step: Step) -> tuple[str, int] | None:
        """Return the wait that a step answers, or None if that wait is over."""
        for seat, turn in self._waits:
            is_seat = step.seat in ("", seat)
            is_turn = step.turn in (0, turn)
            if is_seat and is_turn:
                return seat, turn
        if step.turn and step.turn <= self._turns[step.seat or self.env.seats[0]]:
            return None
        waiting = ", ".join(f"{seat} (turn {turn})" for seat, turn in self._waits) or "none"
        raise MessageRefused(
            f"seat '{step.seat}' does not wait for turn {step.turn}; waiting: {waiting}"
        )

    async def _reply(self) -> StepReply:
        """Wait until a seat waits or the episode is over; return what has happened since."""
        run = self._run
        has_several_seats = len(self.env.seats) > 1
        assert run is not None
        while not self._waits and not run.done():
            self._changed.clear()
            await self._changed.wait()
            if has_several_seats:
                await _settle()
        rewards = self.rewards
        self.rewards = []
        if self._failure is not None:
            raise self._failure
        waiting: list[SeatObservation] = []
        if not run.done():
            waiting = [wait.observation for wait in self._waits.values()]
        if has_several_seats or not waiting:
            observation = EnvObservation(waiting=waiting, rewards=rewards)
        else:
            observation = EnvObservation(**asdict(waiting[0]), rewards=rewards)
        scores = [reward.value for reward in rewards if reward.value is not None]
        total_reward = sum(scores) if scores and not has_several_seats else None
        return StepReply(observation=observation, reward=total_reward, done=not waiting)


async def _settle() -> None:
    """Let seats that act at the same time reach their next wait."""
    for _ in range(SETTLE_TURNS):
        await asyncio.sleep(0)
