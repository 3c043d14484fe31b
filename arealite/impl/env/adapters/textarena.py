"""Environment: the games of TextArena, one seat a player.

They draw from the one random state of the process, so each game keeps a state of its own, which is
put in force for the time of a call; one call runs at a time.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

from arealite.api.agent import Agent
from arealite.api.env import Env
from arealite.api.task import Task
from arealite.base.errors import UserError
from arealite.base.extras import extra_requirement, import_optional
from arealite.impl.env.adapters.blocking import Threads
from arealite.impl.env.adapters.foreign import seed_of, seeded_rows

drawing = threading.Lock()


class TextArenaEnv(Env):
    """Players act one after the other, as the game says; each sees its own observations."""

    check_row = staticmethod(seed_of)
    seats = ()
    """None before the config names them."""

    def __init__(self, args: Any, config: Any) -> None:
        super().__init__(args, config)
        self.seats = tuple(f"player_{number}" for number in range(config.players))

    @classmethod
    def rows(cls, config: Any, *, split: str, seed: int) -> Iterator[dict[str, Any]]:
        """Yield a seed a row."""
        return seeded_rows(config.env_id, config.env_id, split, seed)

    async def setup(self) -> None:
        """Make one game, and see that it is for so many players."""
        self._threads = Threads(1)
        if not self.config.env_id:
            raise UserError("env.textarena.env_id is not set, as in env_id=TicTacToe-v0.")
        try:
            await self._threads.call(self.begin, 0)
        except Exception as error:
            name, players = self.config.env_id, self.config.players
            first = str(error).strip().splitlines()[:1]
            what = f"textarena {name} with players={players} cannot be made: {first}"
            raise error if isinstance(error, UserError) else UserError(what) from error

    def begin(self, seed: int) -> Game:
        """Make a game and deal. Blocks."""
        make = import_optional("textarena", extra_requirement("envs")).make
        return Game(lambda: make(self.config.env_id, **self.config.kwargs), len(self.seats), seed)

    async def run(self, task: Task, **agents: Agent) -> None:
        """Play one game; a player's reward is the game's.

        A game without an end, after `max_turns`, gives none.
        """
        call, whole = self._threads.call, self.config.observation == "whole"
        game = await call(self.begin, seed_of(task))
        for _ in range(self.config.max_turns):
            player, text = await call(game.look, whole)
            agent = agents[self.seats[player]]
            action = await agent.act(text)
            if await call(game.step, action.text) or action.is_last:
                break
        rewards, about = await call(game.end)
        for player, reward in rewards.items():
            agent = agents[self.seats[player]]
            if agent.record.turns or not agent.trainable:
                invalid = about.get(player, {}).get("invalid_move", False)
                agent.reward(float(reward), invalid=float(invalid))


class Game:
    """One game, with a random state of its own."""

    def __init__(self, make: Callable[[], Any], players: int, seed: int) -> None:
        self._state = random.Random(seed).getstate()
        self._env = self._alone(make)
        self._alone(self._env.reset, players, seed)
        self._inner = self._env
        while hasattr(self._inner, "env"):
            self._inner = self._inner.env

    def look(self, whole: bool) -> tuple[int, str]:
        """Return whose turn it is, and what that player sees: as the game's own wrappers put it,
        or only what is new."""
        if whole:
            return self._alone(self._env.get_observation)
        player, messages = self._alone(self._inner.get_observation)
        names = self._inner.state.role_mapping
        lines = [f"[{names.get(who, f'Player {who}')}] {text}" for who, text, _ in messages]
        return player, "\n".join(lines)

    def step(self, text: str) -> bool:
        """Play a move; return whether the game is over."""
        return bool(self._alone(self._env.step, text)[0])

    def end(self) -> tuple[dict[int, float], dict[int, Any]]:
        """Close the game; return reward and facts by player."""
        rewards, about = self._alone(self._env.close)
        return rewards or {}, about or {}

    def _alone(self, function: Callable[..., Any], *args: Any) -> Any:
        with drawing:
            others = random.getstate()
            random.setstate(self._state)
            try:
                return function(*args)
            finally:
                self._state = random.getstate()
                random.setstate(others)
