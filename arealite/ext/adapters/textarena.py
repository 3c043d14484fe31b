"""Adapter of TextArena's games, with one seat per player.

The games use Python's global random state. So each game has its own state, which is set during its
calls, and one call runs at a time.
"""

import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from arealite.api.agent import Agent
from arealite.api.env import Env
from arealite.api.task import Row, Task
from arealite.api.trial import TrialConfig
from arealite.base.errors import UserError
from arealite.base.extras import extra_requirement, import_optional
from arealite.ext.adapters.blocking import T, Threads, Ts
from arealite.ext.adapters.config import TextArenaConfig
from arealite.ext.adapters.foreign import constructing, seed_of, seeded_rows

random_lock = threading.Lock()


class TextArenaEnv(Env):
    """Players act in the game's order; each sees its own observations."""

    check_row = staticmethod(seed_of)
    seats = ()
    """None before the config names them."""

    def __init__(self, args: TrialConfig, config: TextArenaConfig) -> None:
        super().__init__(args, config)
        self.seats = tuple(f"player_{number}" for number in range(config.players))

    @classmethod
    def rows(cls, config: TextArenaConfig, *, split: str, seed: int) -> Iterator[Row]:
        """Yield rows with different seeds, without end."""
        return seeded_rows(
            name=config.env_id,
            prompt=config.env_id,
            split=split,
            seed=seed,
        )

    async def setup(self) -> None:
        """Create one game with the configured number of players.

        Raises:
            UserError: The game is unknown, not installed or not for this number of players.
        """
        self._threads = Threads(1)
        if not self.config.env_id:
            raise UserError("env.textarena.env_id is not set. Set a game, as env_id=TicTacToe-v0.")
        config = self.config
        subject = f"env.textarena.env_id={config.env_id} with players={config.players}"
        with constructing(subject, "env_id, players or kwargs"):
            await self._threads.call(self.begin, 0)

    def begin(self, seed: int) -> "TextGame":
        """Create and reset a game. This call blocks."""
        package = import_optional("textarena", extra_requirement("envs"))
        config = self.config
        make = partial(package.make, config.env_id, **config.kwargs)
        return TextGame(make, len(self.seats), seed)

    async def run(self, task: Task, **agents: Agent) -> None:
        """Play one game; each player gets the game's reward.

        A game that has not ended after `max_turns` gives no reward.
        """
        call = self._threads.call
        whole = self.config.observation == "whole"
        game = await call(self.begin, seed_of(task))
        for _ in range(self.config.max_turns):
            player, observation = await call(game.look, whole)
            agent = agents[self.seats[player]]
            action = await agent.act(observation)
            is_over = await call(game.step, action.text)
            if is_over or action.is_last:
                break
        rewards, info = await call(game.end)
        for player, reward in rewards.items():
            agent = agents[self.seats[player]]
            if agent.record.turns or not agent.trainable:
                player_info = info.get(player, {})
                is_invalid = player_info.get("invalid_move", False)
                agent.reward(float(reward), invalid=float(is_invalid))


class TextGame:
    """One game with its own random state."""

    def __init__(self, make: Callable[[], Any], players: int, seed: int) -> None:
        rng = random.Random(seed)
        self._state = rng.getstate()
        self._env = self._seeded(make)
        self._seeded(self._env.reset, players, seed)
        inner = self._env
        while hasattr(inner, "env"):
            inner = inner.env
        self._inner = inner

    def look(self, whole: bool) -> tuple[int, str]:
        """Return the player to act and its observation.

        Args:
            whole: Return the game's whole observation, else only new messages.
        """
        if whole:
            return self._seeded(self._env.get_observation)
        inner = self._inner
        player, messages = self._seeded(inner.get_observation)
        names = inner.state.role_mapping
        lines: list[str] = []
        for sender, message, _ in messages:
            sender_name = names.get(sender, f"Player {sender}")
            lines.append(f"[{sender_name}] {message}")
        return player, "\n".join(lines)

    def step(self, move: str) -> bool:
        """Play a move; return whether the game is over."""
        is_over, *_ = self._seeded(self._env.step, move)
        return bool(is_over)

    def end(self) -> tuple[dict[int, float], dict[int, Any]]:
        """Close the game; return the rewards and the game's information by player."""
        rewards, info = self._seeded(self._env.close)
        return rewards or {}, info or {}

    def _seeded(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Call a function with the game's random state."""
        with random_lock:
            others = random.getstate()
            random.setstate(self._state)
            try:
                return function(*args)
            finally:
                self._state = random.getstate()
                random.setstate(others)
