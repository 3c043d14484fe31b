"""One session of an environment server: it plays `Env.run` by reset and step messages.

The environment is not changed. The session passes it agents whose `act` waits for a step message.
"""

import asyncio
import time
import uuid
from collections import Counter
from typing import Any, cast

import msgspec

from arealite.api.agent import Agent
from arealite.api.env import Env
from arealite.api.env_server import EnvObservation, Reply, Reset, SeatObservation, SeatReward, Step
from arealite.api.episode import Action, Seat, finite
from arealite.api.llm import LLMResponse
from arealite.api.observation import observe
from arealite.api.task import Task
from arealite.api.turns import Turn
from arealite.base import log
from arealite.base.errors import EpisodeTimeout
from arealite.impl.env_server.wire import Refused
from arealite.impl.rollout.failures import root_error
from arealite.system.health import waits
from arealite.system.health.waits import END_S, is_cancelled

logger = log.get(__name__)

SETTLE_TURNS = 10
"""Iterations of the event loop before an answer, in environments with several seats. Seats that act
at the same time reach their next wait in these iterations, so that one answer holds all waits."""


class RemoteSeat(Agent):
    """Stands for an agent that runs in the client."""

    trainable = False

    def __init__(self, name: str, session: "Session", *, trainable: bool) -> None:
        unused = cast(Any, None)
        seat = Seat(name, episode_id=str(session.episode_id))
        super().__init__(None, client=unused, tokenizer=unused, seat=seat)
        self.trainable = trainable
        self._session = session
        self._turn = 0

    async def act(self, observation: object) -> Action:
        """Send the observation to the client and wait for its step."""
        self._turn, step = await self._session.wait_for(self.seat.name, observation)
        response = LLMResponse([], [], [], step.stop_reason)
        if step.stop_reason:  # the client's agent generated the text
            self.record.turns.append(Turn(response, 0.0))
        return Action(step.text, response if step.stop_reason else None, step.calls, step.is_last)

    def reward(self, value: float | None, /, **parts: float) -> None:
        """Keep the reward for the next answer."""
        self._session.rewards.append(SeatReward(self.seat.name, self._turn, *finite(value, parts)))


class Session:
    """The episodes of one client, played one after the other."""

    def __init__(self, env: Env, *, episode_s: float, name: str = "") -> None:
        self.env = env
        self.name = name
        """Type of the environment that a reset without `env` selects."""
        self.id = str(uuid.uuid4())
        self.episode_id: str | None = None
        self.created = self.last_message = time.monotonic()
        self.steps = self.episodes = 0
        self.rewards: list[SeatReward] = []
        self._episode_s = episode_s
        self._waits: dict[tuple[str, int], tuple[SeatObservation, asyncio.Future[Step]]] = {}
        """Pending waits by seat and turn, oldest first."""
        self._turns: Counter[str] = Counter()
        self._changed = asyncio.Event()
        self._run: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None

    def describe(self) -> dict[str, object]:
        """Return the session's state, without the text of its messages."""
        run = self._run
        now = time.monotonic()
        playing = "waiting" if self._waits else "running"
        return {
            "id": self.id,
            "status": "new" if run is None else "over" if run.done() else playing,
            "seconds": round(now - self.created, 1),
            "silent_s": round(now - self.last_message, 1),
            "episodes": self.episodes,
            "episode_id": self.episode_id,
            "step_count": self.steps,
        }

    async def reset(self, task: Task, reset: Reset, env: Env | None = None) -> Reply:
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
        frozen = reset.untrained
        names = self.env.seats
        seats = {name: RemoteSeat(name, self, trainable=name not in frozen) for name in names}
        playing = self._play(task.copy(), seats)
        self._run = asyncio.create_task(playing, name=f"episode {self.episode_id}")
        return await self._reply()

    async def step(self, step: Step) -> Reply:
        """Apply the action of a seat; return the next observation.

        A step for a wait that is already over changes nothing.

        Raises:
            Refused: No episode is running, or the seat does not wait for a step.
            BaseException: The episode failed with this exception.
        """
        if self._run is None or (self._run.done() and not step.turn):
            raise Refused("no episode is running. Send a reset first.")
        key = self._find(step)
        if key is not None:
            self.steps += 1
            future = self._waits.pop(key)[1]
            if not future.done():  # done: the environment cancelled this `act`
                future.set_result(step)
            for _ in range(SETTLE_TURNS if self._waits else 0):
                await asyncio.sleep(0)
        return await self._reply()

    def cancel(self) -> asyncio.Task[None] | None:
        """Cancel the episode; return its task if it still has to clean up, else None."""
        for _, future in self._waits.values():
            future.cancel()
        if self._run is None or self._run.done():
            return None
        if not self._run.cancelling():  # a second `cancel` would interrupt its cleanup
            self._run.cancel()
        return self._run

    async def end(self) -> None:
        """Cancel the episode and wait until it has cleaned up, at most END_S seconds."""
        if run := self.cancel():
            await asyncio.wait((run,), timeout=END_S)
            if not run.done():
                logger.warning("cancelled episode still running", env=type(self.env).__name__)

    async def wait_for(self, seat: str, observation: object) -> tuple[int, Step]:
        """Send an observation and wait for the seat's step.

        Returns:
            The number of the seat's turn, from 1, and the step.
        """
        seen = observe(observation)
        self._turns[seat] += 1
        key = seat, self._turns[seat]
        future = asyncio.get_running_loop().create_future()
        self._waits[key] = SeatObservation(*key, seen.content, seen.choices, seen.tools), future
        self._changed.set()
        try:
            return key[1], await future
        finally:
            self._waits.pop(key, None)

    async def _play(self, task: Task, seats: dict[str, RemoteSeat]) -> None:
        on = "environment"
        seconds = self._episode_s
        wait = waits.Wait("an episode", owner="env server", on=on, seconds=seconds)
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
        waiting = [key for key in self._waits if step.seat in ("", key[0])]
        if step.turn:
            waiting = [key for key in waiting if key[1] == step.turn]
            if not waiting and step.turn <= self._turns[step.seat or self.env.seats[0]]:
                return None
        if not waiting:
            now = ", ".join(f"{seat} (turn {turn})" for seat, turn in self._waits) or "none"
            raise Refused(f"seat '{step.seat}' does not wait for turn {step.turn}; waiting: {now}")
        return waiting[0]

    async def _reply(self) -> Reply:
        """Wait until a seat waits or the episode is over; return what has happened since."""
        run = self._run
        seats = len(self.env.seats)
        assert run is not None
        while not self._waits and not run.done():
            self._changed.clear()
            await self._changed.wait()
            for _ in range(SETTLE_TURNS if seats > 1 else 0):
                await asyncio.sleep(0)
        rewards = self.rewards
        self.rewards = []
        if self._failure is not None:
            raise self._failure
        waits = [] if run.done() else [wait for wait, _ in self._waits.values()]
        if seats > 1 or not waits:
            view = EnvObservation(waiting=waits, rewards=rewards)
        else:
            view = EnvObservation(*msgspec.structs.astuple(waits[0]), rewards=rewards)
        values = [given.value for given in rewards if given.value is not None]
        total = sum(values) if values and seats == 1 else None
        return Reply(view, total, not waits)
