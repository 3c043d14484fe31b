"""`make("tic_tac_toe")`: any environment as Requests, in scripts and notebooks.

The environment runs in an event loop of a background thread. Its seats wait for `step`, as the
seats of an environment server wait for a client.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
from collections import Counter
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from itertools import count, islice
from math import fsum
from typing import Any, TypeVar

import msgspec

from arealite.api.env import Env, EnvConfig, envs, make_env
from arealite.api.episode import Action
from arealite.api.observation import Observation, Request, ToolCall
from arealite.api.reward import rewards
from arealite.api.task import Row, Task
from arealite.api.tool import tools
from arealite.base import config as base_config
from arealite.base import config_tree
from arealite.base.errors import UserError
from arealite.base.registry import import_plugins
from arealite.ext.gateway.families import HERMES
from arealite.ext.gateway.parser import read_calls
from arealite.ext.hosting.server.env_session import EnvSession
from arealite.ext.hosting.server_config import (
    EnvServerConfig,
    Reset,
    SeatObservation,
    SeatReward,
    Step,
    StepReply,
)
from arealite.ext.wrappers.wrappers import Wrapper, wrapped
from arealite.system.data.dataset import make_task
from arealite.system.data.tasks import generate

T = TypeVar("T")
VARIANTS = {
    "reasoning_gym": "dataset",
    "matrix_game": "game",
    "gymnasium": "env_id",
    "textarena": "env_id",
    "gyllm": "env_id",
}
"""The option that NAME of `FAMILY/NAME` sets, by family."""
EPISODE_S = 1e6
"""Longest episode; a person may think for long."""


@lru_cache(maxsize=1)
def event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of the environments; a daemon thread runs it."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(
        target=loop.run_forever,
        name="environments",
        daemon=True,
    )
    thread.start()
    return loop


os.register_at_fork(after_in_child=event_loop.cache_clear)  # a forked child has no such thread


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in the event loop of the environments; return its result."""
    future = asyncio.run_coroutine_threadsafe(coroutine, event_loop())
    return future.result()


async def gather(calls: Iterable[Coroutine[Any, Any, list[T]]]) -> list[T]:
    """Run coroutines concurrently; when all have ended, return their lists as one."""
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    joined: list[T] = []
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
        joined += outcome
    return joined


def make(name: str, *, wrappers: Sequence[Wrapper] = (), **options: Any) -> Requests:
    """Create an environment and set it up.

    Args:
        name: A registered name, as in `arealite envs`, or FAMILY/NAME: `gymnasium/CartPole-v1`,
            `reasoning_gym/chain_sum`, `textarena/TicTacToe-v0`, `gyllm/…`, `openenv/echo`.
            `openenv/echo` without `addresses` runs the Docker image `echo-env:latest`.
        wrappers: Wrappers; the first one is next to the agent.
        options: Options of the environment, and `runtime={"type": …}`, `imports=[…]`.

    Raises:
        UserError: The name or an option is unknown, or the environment cannot be set up.
    """
    config = load(name, options)
    game = run(open_game(config, wrappers))
    return Requests([game])


def make_vec(
    names: str | Sequence[str | Requests],
    n: int = 1,
    *,
    autoreset: bool = False,
    **options: Any,
) -> Requests:
    """Create a vector of environments, which step concurrently and may differ.

    Args:
        names: A name as for `make`, or a list of names and results of `make`.
        n: Number of copies of each one. Copies share the resources of one environment.
        autoreset: Whether an environment whose episode is over begins the next one by itself.
        options: Options of every name, and `wrappers`, as for `make`.
    """
    if n < 1 or not names:
        raise UserError(f"make_vec: n={n} copies of {names!r}. Give at least one environment.")
    if isinstance(names, str):
        names = [names]
    originals: list[PlayedEnv] = []
    for name in names:
        requests = name
        if isinstance(requests, str):
            requests = make(requests, **options)
        originals += requests.games
    copies = [
        PlayedEnv(game.env, game.config, f"::env={number}")
        for number, game in enumerate(game for game in originals for _ in range(n))
    ]
    return Requests(copies, autoreset=autoreset)


def load(name: str, options: Mapping[str, Any]) -> EnvServerConfig:
    """Return the config of an environment of `make` with these options.

    Raises:
        UserError: The environment or an option is unknown, or a value is invalid.
    """
    kind, _, variant = name.partition("/")
    if variant and kind in VARIANTS:
        options = {VARIANTS[kind]: variant, **options}
    elif kind != "openenv":
        kind = name
    elif variant and "addresses" not in options and "runtime" not in options:
        runtime = {"type": "docker", "image": f"{variant}-env:latest"}
        options = {"runtime": runtime, **options}
    import_plugins(options.get("imports", ()))
    envs.check(kind)
    parts = {table.kind: table.configs for table in (envs, rewards, tools)}
    default_config = config_tree.extend(EnvConfig, parts)()
    has_section = hasattr(default_config, kind)
    section = kind if has_section else envs.base_of(kind)
    paths = {"imports": "imports", "runtime": "env.runtime"}
    words = [f"env.type={kind}"]
    try:
        for name_of_option, setting in options.items():
            path = paths.get(name_of_option, f"env.{section}.{name_of_option}")
            setting_json = msgspec.json.encode(setting).decode()
            words.append(f"{path}={setting_json}")
        return base_config.load(EnvServerConfig, base_config.read_layers([], words), parts)
    except (TypeError, UserError) as error:
        problem = str(error).removeprefix("command line: ")
        raise UserError(f"{kind}: {problem}") from error


async def open_game(config: EnvServerConfig, wrappers: Sequence[Wrapper]) -> PlayedEnv:
    """Create an environment and set it up."""
    env = make_env(config, config.env)
    try:
        await env.setup()
    except BaseException:
        await env.close()
        raise
    setattr(env, "run", wrapped(env.run, wrappers))  # noqa: B010  (a method)
    return PlayedEnv(env, config.env)


class PlayedEnv:
    """The episodes of one environment, one after the other."""

    def __init__(self, env: Env, config: EnvConfig, suffix: str = "") -> None:
        self.env = env
        self.config = config
        self.suffix = suffix
        self.group_id = ""
        self.session = EnvSession(env, episode_s=EPISODE_S)
        self.waits: dict[str, SeatObservation] = {}
        """The oldest pending observation of each actor that must act."""

    async def reset(self, seed: int, task: Task | Row | str | None) -> list[Request]:
        """Begin an episode of a task; without one, of the task that the seed generates."""
        if task is None:
            tasks = generate(self.config, "train", seed)
            task = await asyncio.to_thread(next, tasks)
        elif not isinstance(task, Task):
            row = {"prompt": task} if isinstance(task, str) else task
            task = make_task(row, "task", "the task of the reset")
        self.group_id = group_of(task)
        self.waits = {}
        reset = Reset(untrained=self.env.seats)
        reply = await self.session.reset(task, reset)
        return self.requests(reply, reply.observation.rewards)

    async def step(self, actions: Mapping[str, object], seeds: Iterator[int]) -> list[Request]:
        """Apply one action of each actor in `waits`; begin a next episode with a seed, if any."""
        steps = [make_step(wait, actions[actor]) for actor, wait in self.waits.items()]
        self.waits = {}  # if the episode fails, it is over
        replies = [await self.session.step(step) for step in steps]
        last_reply = replies[-1]
        rewards = [reward for reply in replies for reward in reply.observation.rewards]
        requests = self.requests(last_reply, rewards)
        next_seed = next(seeds, None) if last_reply.done else None
        if next_seed is not None:
            requests += await self.reset(next_seed, None)
        return requests

    def requests(self, reply: StepReply, rewards: Sequence[SeatReward]) -> list[Request]:
        """Return a request for each seat that waits or got a reward; at the end, for each seat."""
        waits = oldest_waits(reply)
        self.waits = {}
        requests: list[Request] = []
        for seat in self.env.seats:
            wait = waits.get(seat)
            if wait:
                self.waits[seat + self.suffix] = wait
            seat_rewards = [reward for reward in rewards if reward.seat == seat]
            if wait or seat_rewards or reply.done:
                request = self._request(seat, wait, seat_rewards, reply.done)
                requests.append(request)
        return requests

    def _request(
        self,
        seat: str,
        wait: SeatObservation | None,
        rewards: Sequence[SeatReward],
        done: bool,
    ) -> Request:
        """Return the request of a seat; `wait` is None if the seat does not have to act."""
        view = wait or SeatObservation()
        observation = Observation(
            content=view.content,
            choices=view.choices,
            tools=view.tools,
        )
        total = fsum(reward.value or 0.0 for reward in rewards)
        parts = Counter[str]()
        for reward in rewards:
            parts.update(reward.parts)  # pyright: ignore  (adds numbers)
        return Request(
            actor=seat + self.suffix,
            observation=observation,
            reward=total,
            needs_action=wait is not None,
            done=done,
            episode_id=str(self.session.episode_id),
            group_id=self.group_id,
            info={**parts},
        )


def group_of(task: Task) -> str:
    """Return an id that is equal for equal tasks."""
    content = (task.prompt, task.ground_truth, task.extra_info)
    digest = hashlib.blake2b(msgspec.json.encode(content), digest_size=8)
    return digest.hexdigest()


def oldest_waits(reply: StepReply) -> dict[str, SeatObservation]:
    """Return the oldest pending observation of each seat that has to act."""
    view = reply.observation
    waits: dict[str, SeatObservation] = {}
    for wait in (*view.waiting, view):
        if wait.turn:
            waits.setdefault(wait.seat, wait)
    return waits


def make_step(wait: SeatObservation, action: object) -> Step:
    """Return the message that answers `wait` with an action.

    Raises:
        UserError: The action is neither a text nor an Action.
    """
    if isinstance(action, str):
        calls: tuple[ToolCall, ...] = ()
        if wait.tools:
            _, calls = read_calls(action, HERMES)
        action = Action(action, calls=calls)
    if not isinstance(action, Action):
        raise UserError(f"step: the action of '{wait.seat}' is {action!r:.100}. Give a text.")
    return Step(
        text=action.text,
        seat=wait.seat,
        turn=wait.turn,
        calls=action.calls,
        is_last=action.is_last,
        stop_reason="stop",
    )


class Requests(AbstractContextManager["Requests"]):
    """One or several environments as Requests: `reset`, then `step` until a Request is `done`.

    A context manager; `close` stops the environments.
    """

    def __init__(self, games: Sequence[PlayedEnv], *, autoreset: bool = False) -> None:
        self.games = games
        self._autoreset = autoreset
        self._seeds = count(1)

    @property
    def actors(self) -> tuple[str, ...]:
        """The names of all actors."""
        return tuple(seat + game.suffix for game in self.games for seat in game.env.seats)

    def reset(
        self,
        *,
        seed: int | Sequence[int] | None = None,
        task: Task | Row | str | None = None,
    ) -> list[Request]:
        """Begin an episode in each environment; unfinished ones are cancelled.

        Args:
            seed: Selects the generated task; equal seeds give equal tasks. The environments of a
                vector count it up, or take a list of seeds. None: the next seeds.
            task: The task: a row with `prompt`, `ground_truth` and `extra_info`, or a prompt.

        Returns:
            One Request for each actor that must act; if an episode is over, one for every actor.

        Raises:
            UserError: The task is invalid, or the environment generates none.
            EpisodeError: An episode failed.
        """
        num_games = len(self.games)
        if isinstance(seed, int):
            self._seeds = count(seed)
        seeds = seed
        if not isinstance(seeds, Sequence):
            seeds = [*islice(self._seeds, num_games)]
        if len(seeds) != num_games:
            raise UserError(f"reset: {len(seeds)} seeds for {num_games} environments.")
        games_and_seeds = zip(self.games, seeds, strict=True)
        return run(gather(game.reset(game_seed, task) for game, game_seed in games_and_seeds))

    def step(self, actions: Mapping[str, str | Action] | str | Action) -> list[Request]:
        """Apply the action of each actor that must act.

        Args:
            actions: Texts or `Action`s by actor; a single actor's action may be given alone. In
                an environment with tools, `<tool_call>{…}</tool_call>` in a text calls them.

        Returns:
            One Request for each actor that must act or got a reward; if an episode is over, one
            for each of its actors.

        Raises:
            UserError: All episodes are over, or an actor is unknown or has no action.
            EpisodeError: An episode failed.
        """
        waiting = [actor for game in self.games for actor in game.waits]
        if not waiting:
            raise UserError("no episode is running. Call reset() before step().")
        if not isinstance(actions, Mapping):
            actions = {waiting[0]: actions}
        check_actors(acting=actions, waiting=waiting)
        seeds = self._seeds if self._autoreset else iter(())
        running = [game for game in self.games if game.waits]
        steps = [game.step(actions, seeds) for game in running]
        return run(gather(steps))

    def close(self) -> None:
        """End the episodes and stop the environments."""
        for game in self.games:
            game.waits = {}
            run(game.session.end())
        for env in {game.env for game in self.games}:
            run(env.close())

    def __exit__(self, *_: object) -> None:
        self.close()


def check_actors(acting: Iterable[str], waiting: Sequence[str]) -> None:
    """Check that the actors with an action are those that must act.

    Raises:
        UserError: They are not.
    """
    wrong_actors = {*acting} ^ {*waiting}
    if not wrong_actors:
        return
    actor = min(map(str, wrong_actors))
    problem = "has no action" if actor in waiting else "does not have to act"
    shown_actors = [*waiting[:9]]
    if len(waiting) > 9:
        shown_actors.append("…")
    raise UserError(
        f"step: '{actor}' {problem}. "
        "Give one action to each actor whose Request needs one: "
        f"{', '.join(shown_actors)}."
    )
