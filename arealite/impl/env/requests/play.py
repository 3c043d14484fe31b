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

from arealite.api.env import Env, envs
from arealite.api.env_config import EnvConfig
from arealite.api.env_server import EnvServerConfig, Reply, Reset, SeatObservation, SeatReward, Step
from arealite.api.episode import Action
from arealite.api.observation import Observation, Request
from arealite.api.reward import RewardConfig, rewards
from arealite.api.task import Row, Task
from arealite.api.tool import tools
from arealite.api.tool_config import ToolsEnvConfig
from arealite.base import config as base_config
from arealite.base.errors import UserError
from arealite.base.registry import import_plugins
from arealite.impl.env.requests.wrappers import Wrapper, wrapped
from arealite.impl.env_client import make_env
from arealite.impl.env_server.session import Session
from arealite.impl.gateway.families import HERMES
from arealite.impl.gateway.parser import read_calls
from arealite.system.data.dataset import make_task
from arealite.system.data.tasks import generate

T = TypeVar("T")
VARIANTS = {"reasoning_gym": "dataset", "matrix_game": "game"}
VARIANTS |= dict.fromkeys(("gymnasium", "textarena", "gyllm"), "env_id")
"""The option that NAME of `FAMILY/NAME` sets, by family."""
EPISODE_S = 1e6
"""Longest episode; a person may think for long."""


@lru_cache(maxsize=1)
def event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of the environments; a daemon thread runs it."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="environments", daemon=True).start()
    return loop


os.register_at_fork(after_in_child=event_loop.cache_clear)  # a forked child has no such thread


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in the event loop of the environments; return its result."""
    return asyncio.run_coroutine_threadsafe(coroutine, event_loop()).result()


async def gather(calls: Iterable[Coroutine[Any, Any, list[T]]]) -> list[T]:
    """Run coroutines concurrently; when all have ended, return their lists as one."""
    ended = await asyncio.gather(*calls, return_exceptions=True)
    if errors := [each for each in ended if isinstance(each, BaseException)]:
        raise errors[0]
    return [each for made in ended if isinstance(made, list) for each in made]


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
    return Requests([run(open_game(load(name, options), wrappers))])


def make_vec(
    names: str | Sequence[str | Requests], n: int = 1, *, autoreset: bool = False, **options: Any
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
    named = [names] if isinstance(names, str) else names
    made = [make(each, **options) if isinstance(each, str) else each for each in named]
    own = enumerate(game for each in made for game in each.games for _ in range(n))
    games = [Game(game.env, game.config, f"::env={number}") for number, game in own]
    return Requests(games, autoreset=autoreset)


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
    elif variant and not {"addresses", "runtime"} & {*options}:
        options = {"runtime": {"type": "docker", "image": f"{variant}-env:latest"}, **options}
    import_plugins(options.get("imports", ()))
    envs.check(kind)
    parts = {EnvConfig: envs.configs, RewardConfig: rewards.configs, ToolsEnvConfig: tools.configs}
    section = kind if hasattr(base_config.extend(EnvConfig, parts)(), kind) else envs.base_of(kind)
    words = [f"env.type={kind}"]
    places = {"imports": "imports", "runtime": "env.runtime"}
    try:
        for key, value in options.items():
            place = places.get(key, f"env.{section}.{key}")
            words.append(f"{place}={msgspec.json.encode(value).decode()}")
        return base_config.load(EnvServerConfig, [], words, parts)
    except (TypeError, UserError) as error:
        raise UserError(f"{kind}: {str(error).removeprefix('command line: ')}") from error


async def open_game(config: EnvServerConfig, wrappers: Sequence[Wrapper]) -> Game:
    """Create an environment and set it up."""
    env = make_env(config, config.env)
    try:
        await env.setup()
    except BaseException:
        await env.close()
        raise
    setattr(env, "run", wrapped(env.run, wrappers))  # noqa: B010  (a method)
    return Game(env, config.env)


class Game:
    """The episodes of one environment, one after the other."""

    def __init__(self, env: Env, config: EnvConfig, suffix: str = "") -> None:
        self.env = env
        self.config = config
        self.suffix = suffix
        self.group_id = ""
        self.session = Session(env, episode_s=EPISODE_S)
        self.waits: dict[str, SeatObservation] = {}
        """The oldest pending observation of each actor that must act."""

    async def reset(self, seed: int, task: Task | Row | str | None) -> list[Request]:
        """Begin an episode of a task; without one, of the task that the seed generates."""
        if task is None:
            task = await asyncio.to_thread(next, generate(self.config, "train", seed))
        elif not isinstance(task, Task):
            row = {"prompt": task} if isinstance(task, str) else task
            task = make_task(row, "task", "the task of the reset")
        content = msgspec.json.encode((task.prompt, task.ground_truth, task.extra_info))
        self.group_id = hashlib.blake2b(content, digest_size=8).hexdigest()
        self.waits = {}
        reply = await self.session.reset(task, Reset(untrained=self.env.seats))
        return self.requests(reply, reply.observation.rewards)

    async def step(self, actions: Mapping[str, object], seeds: Iterator[int]) -> list[Request]:
        """Apply one action of each actor in `waits`; begin a next episode with a seed, if any."""
        steps = [make_step(wait, actions[actor]) for actor, wait in self.waits.items()]
        self.waits = {}  # if the episode fails, it is over
        replies = [await self.session.step(step) for step in steps]
        given = [each for reply in replies for each in reply.observation.rewards]
        made = self.requests(replies[-1], given)
        for seed in islice(seeds, int(replies[-1].done)):
            made += await self.reset(seed, None)
        return made

    def requests(self, reply: Reply, given: Sequence[SeatReward]) -> list[Request]:
        """Return a request for each seat that waits or got a reward; at the end, for each seat."""
        view = reply.observation
        made = list[Request]()
        episode = str(self.session.episode_id)
        waits = {wait.seat: wait for wait in [view, *reversed(view.waiting)] if wait.turn}
        self.waits = {s + self.suffix: waits[s] for s in self.env.seats if s in waits}
        for seat in self.env.seats:
            own = [each for each in given if each.seat == seat]
            parts = Counter[str]()
            for each in own:
                parts.update(each.parts)  # pyright: ignore  (adds numbers)
            if own or reply.done or seat in waits:
                wait = waits.get(seat, SeatObservation())
                needs_action = seat in waits
                seen = Observation(wait.content, wait.choices, wait.tools)
                result = (fsum(each.value or 0.0 for each in own), needs_action, reply.done)
                ids = (episode, self.group_id, {**parts})
                made.append(Request(seat + self.suffix, seen, *result, *ids))
        return made


def make_step(wait: SeatObservation, action: object) -> Step:
    """Return the message that answers `wait` with an action.

    Raises:
        UserError: The action is neither a text nor an Action.
    """
    if isinstance(action, str):
        action = Action(action, calls=read_calls(action, HERMES)[1] if wait.tools else ())
    if not isinstance(action, Action):
        raise UserError(f"step: the action of '{wait.seat}' is {action!r:.100}. Give a text.")
    return Step(action.text, wait.seat, wait.turn, action.calls, action.is_last, "stop")


class Requests(AbstractContextManager["Requests"]):
    """One or several environments as Requests: `reset`, then `step` until a Request is `done`.

    A context manager; `close` stops the environments.
    """

    def __init__(self, games: Sequence[Game], *, autoreset: bool = False) -> None:
        self.games = games
        self._autoreset = autoreset
        self._seeds = count(1)

    @property
    def actors(self) -> tuple[str, ...]:
        """The names of all actors."""
        return tuple(seat + game.suffix for game in self.games for seat in game.env.seats)

    def reset(
        self, *, seed: int | Sequence[int] | None = None, task: Task | Row | str | None = None
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
        if isinstance(seed, int):
            self._seeds = count(seed)
        seeds = seed if isinstance(seed, Sequence) else [*islice(self._seeds, len(self.games))]
        if len(seeds) != len(self.games):
            raise UserError(f"reset: {len(seeds)} seeds for {len(self.games)} environments.")
        return run(gather(g.reset(n, task) for g, n in zip(self.games, seeds, strict=True)))

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
        given = actions if isinstance(actions, Mapping) else {waiting[0]: actions}
        if wrong := sorted(map(str, {*given} ^ {*waiting})):
            what = "has no action" if wrong[0] in waiting else "does not have to act"
            listed = ", ".join([*waiting[:9], *["…"][: len(waiting) > 9]])
            fix = f"Give one action to each actor whose Request needs one: {listed}"
            raise UserError(f"step: '{wrong[0]}' {what}. {fix}.")
        seeds = self._seeds if self._autoreset else iter(())
        return run(gather(game.step(given, seeds) for game in self.games if game.waits))

    def close(self) -> None:
        """End the episodes and stop the environments."""
        for game in self.games:
            game.waits = {}
            run(game.session.end())
        for env in {game.env for game in self.games}:
            run(env.close())

    def __exit__(self, *_: object) -> None:
        self.close()
