"""One session of an environment's server: an environment's `run`, turned inside out into reset and
step.

The environment stays the program it is: its agents are seats whose `act` waits for a step.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from typing import Any, cast

import msgspec

from arealite.api.agent import Agent
from arealite.api.env import Env
from arealite.api.env_server import Given, Reply, Reset, Step, View, Wait
from arealite.api.episode import Action, Seat, Turn, finite
from arealite.api.llm import LLMResponse
from arealite.api.observation import observe
from arealite.api.task import Task
from arealite.base import log
from arealite.base.errors import EpisodeTimeout
from arealite.impl.env_server.wire import Refused
from arealite.impl.rollout.failures import root_error
from arealite.system.health import waits
from arealite.system.health.waits import END_S, is_cancelled

logger = log.get(__name__)

SETTLE_TURNS = 10
"""Turns of the loop that seats which act at the same time get to come to their next wait: then one
answer tells of all of them."""


class RemoteSeat(Agent):
    """A seat whose agent is at the other end of the wire."""

    trainable = False

    def __init__(self, name: str, session: Session, *, trainable: bool) -> None:
        nobody = cast(Any, None)
        super().__init__(None, client=nobody, tokenizer=nobody, seat=Seat(name))
        self.trainable = trainable
        self._session = session
        self._finished = 0

    async def act(self, observation: Any) -> Action:
        """Tell what the seat sees, and wait for its step."""
        turn, step = await self._session.wait_for(self.seat.name, observation)
        self._finished = turn
        response = LLMResponse([], [], [], step.stop_reason)
        if step.stop_reason:  # it was generated
            self.record.turns.append(Turn([], response, 0.0))
        return Action(step.text, response if step.stop_reason else None, step.calls, step.is_last)

    def reward(self, value: float, **parts: float) -> None:
        """Keep the reward for the next answer."""
        given = finite(value, parts)
        self._session.rewards.append(Given(self.seat.name, self._finished, *given))


class Session:
    """Episodes of one client, one after the other."""

    def __init__(self, env: Env, *, episode_s: float) -> None:
        self.env = env
        self.id = str(uuid.uuid4())
        self.episode_id: str | None = None
        self.created = self.heard = time.monotonic()
        self.steps = self.episodes = 0
        self.rewards: list[Given] = []
        self._episode_s = episode_s
        self._waits: dict[tuple[str, int], tuple[Wait, asyncio.Future[Step]]] = {}
        """In the order in which they began."""
        self._turns: Counter[str] = Counter()
        self._news = asyncio.Event()
        self._run: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None

    def about(self) -> dict[str, Any]:
        """Describe the session, without what is said in it."""
        run, now = self._run, time.monotonic()
        playing = "waiting" if self._waits else "running"
        return {
            "id": self.id,
            "status": "new" if run is None else "over" if run.done() else playing,
            "seconds": round(now - self.created, 1),
            "silent_s": round(now - self.heard, 1),
            "episodes": self.episodes,
            "episode_id": self.episode_id,
            "step_count": self.steps,
        }

    async def reset(self, task: Task, reset: Reset) -> Reply:
        """Begin an episode of a task; what was left of the one before is cancelled.

        Raises:
            BaseException: what `run` raised.
        """
        await self.end()
        self.episode_id = reset.episode_id or str(uuid.uuid4())
        self.steps, self.rewards, self._failure = 0, [], None
        self.episodes += 1
        self._turns.clear()
        seats = {
            name: RemoteSeat(name, self, trainable=name not in reset.untrained)
            for name in self.env.seats
        }
        self._run = asyncio.create_task(self._play(task, seats), name=f"episode {self.episode_id}")
        return await self._reply()

    async def step(self, step: Step) -> Reply:
        """Let a seat act. One that came too late, as its wait is over, changes nothing.

        Raises:
            Refused: no such seat waits.
            BaseException: what `run` raised.
        """
        if self._run is None or (self._run.done() and not step.turn):
            raise Refused("there is no episode under way. Send a reset first.")
        key = self._find(step)
        if key is not None:
            self.steps += 1
            future = self._waits.pop(key)[1]
            if not future.done():  # else the environment has just given up to wait
                future.set_result(step)
            for _ in range(SETTLE_TURNS if self._waits else 0):
                await asyncio.sleep(0)
        return await self._reply()

    def cancel(self) -> asyncio.Task[None] | None:
        """Cancel the episode; return its task while that cleans up."""
        for _, future in self._waits.values():
            future.cancel()
        if self._run is None or self._run.done():
            return None
        if not self._run.cancelling():  # a second time would cut its cleaning
            self._run.cancel()
        return self._run

    async def end(self) -> None:
        """Cancel the episode, and see it gone."""
        if run := self.cancel():
            await asyncio.wait((run,), timeout=END_S)
            if not run.done():
                logger.warning("episode does not end", env=type(self.env).__name__)

    async def wait_for(self, seat: str, observation: Any) -> tuple[int, Step]:
        """Wait for a seat's step; return which of its turns it was, and the step."""
        seen = observe(observation)
        self._turns[seat] += 1
        key = seat, self._turns[seat]
        future = asyncio.get_running_loop().create_future()
        self._waits[key] = Wait(*key, seen.content, seen.choices, seen.tools), future
        self._news.set()
        try:
            return key[1], await future
        finally:
            self._waits.pop(key, None)

    async def _play(self, task: Task, seats: dict[str, RemoteSeat]) -> None:
        on, seconds = "environment", self._episode_s
        wait = waits.Wait("an episode", owner="env server", on=on, seconds=seconds)
        try:
            with wait:
                await self.env.run(task, **seats)
        except (Exception, asyncio.CancelledError) as raised:
            if wait.expired:
                self._failure = EpisodeTimeout(f"longer than server.episode_s={self._episode_s}")
            elif isinstance(raised, asyncio.CancelledError) and is_cancelled():
                raise  # the episode is cancelled, and not something that it waited for
            else:
                self._failure = root_error(raised)
        finally:
            self._news.set()

    def _find(self, step: Step) -> tuple[str, int] | None:
        waiting = [key for key in self._waits if step.seat in ("", key[0])]
        if step.turn:
            waiting = [key for key in waiting if key[1] == step.turn]
            if not waiting and step.turn <= self._turns[step.seat or self.env.seats[0]]:
                return None
        if not waiting:
            now = ", ".join(f"{seat} (turn {turn})" for seat, turn in self._waits) or "none"
            raise Refused(f"seat '{step.seat}' does not wait for turn {step.turn}; now: {now}")
        return waiting[0]

    async def _reply(self) -> Reply:
        run, seats = self._run, len(self.env.seats)
        assert run is not None
        while not self._waits and not run.done():
            self._news.clear()
            await self._news.wait()
            for _ in range(SETTLE_TURNS if seats > 1 else 0):
                await asyncio.sleep(0)
        rewards, self.rewards = self.rewards, []
        if self._failure is not None:
            raise self._failure
        waits = [] if run.done() else [wait for wait, _ in self._waits.values()]
        if seats > 1 or not waits:
            view = View(waiting=waits, rewards=rewards)
        else:
            view = View(*msgspec.structs.astuple(waits[0]), rewards=rewards)
        total = sum(given.value for given in rewards) if rewards and seats == 1 else None
        return Reply(view, total, not waits)
