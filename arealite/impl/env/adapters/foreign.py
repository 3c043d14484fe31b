"""Base class and rows of seeds for adapters of environments from other packages."""

from __future__ import annotations

import importlib
from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from random import Random
from typing import Any

from arealite.api.env import Env
from arealite.base.errors import UserError
from arealite.base.extras import import_optional
from arealite.impl.env.adapters.blocking import EnvStuck, Instance, Threads, start


def seed_of(task: Any) -> int:
    """Return the task's seed.

    Raises:
        UserError: its row has none.
    """
    if isinstance(seed := task.extra_info.get("seed"), int):
        return seed
    raise UserError(f"{task.task_id}: extra_info.seed must be a whole number, or use `generated`.")


class LibraryEnv(Env):
    """An environment of another package, made by `env_id` or `factory`; a task is a seed."""

    package: str
    """The module whose `make` takes `env_id`."""
    install: str
    """What pip installs for that package."""
    check_row = staticmethod(seed_of)

    def __init__(self, args: Any, config: Any) -> None:
        super().__init__(args, config)
        self.threads = Threads(config.threads)
        self._idle: list[Instance] = []

    @classmethod
    def rows(cls, config: Any, *, split: str, seed: int) -> Iterator[dict[str, Any]]:
        """Yield a row a seed, without end."""
        name = (config.factory or config.env_id).rpartition(":")[2]
        return seeded_rows(name, cls.prompt(config, name), split, seed)

    @classmethod
    def prompt(cls, config: Any, name: str) -> str:
        """Return the prompt of generated rows."""
        return name

    async def setup(self) -> None:
        """Make the first environment and check it.

        Raises:
            UserError: it cannot be made, or does not fit the config.
        """
        self._make = self._maker()
        try:
            async with self.instance() as first:
                self.check_env(first.env)
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"env.{self.package}: it cannot be made: {error}") from error

    @abstractmethod
    def check_env(self, env: Any) -> None:
        """Raise a UserError if agents could not act in `env`."""

    @asynccontextmanager
    async def instance(self) -> AsyncGenerator[Instance]:
        """Lend an environment; close it if the episode fails, else lend it again."""
        instance = self._idle.pop() if self._idle else await self.threads.call(
            lambda: Instance(self._make(), self.threads), drop=Instance.close
        )  # fmt: skip
        try:
            yield instance
        except BaseException:
            start(instance.close)
            raise
        self._idle.append(instance)

    async def close(self) -> None:
        """Close the environments that are not lent."""
        while self._idle:
            close = self._idle.pop().close
            try:
                await self.threads.call(close)
            except EnvStuck:
                start(close)

    def _maker(self) -> Callable[[], Any]:
        config = self.config
        if not config.factory:
            if not config.env_id:
                raise UserError(f"env.{self.package} needs env_id, or factory=module:callable.")
            return partial(
                import_optional(self.package, self.install).make, config.env_id, **config.kwargs
            )
        path, _, name = config.factory.partition(":")
        try:
            return partial(getattr(importlib.import_module(path), name), **config.kwargs)
        except (ImportError, AttributeError, ValueError, TypeError) as error:
            what = f"env.{self.package}.factory={config.factory}: {error}"
            raise UserError(f"{what}. Write module:callable.") from error


def seeded_rows(name: str, prompt: str, split: str, seed: int) -> Iterator[dict[str, Any]]:
    """Yield a row a seed, without end.

    Raises:
        UserError: there is no `name`.
    """
    if not name:
        raise UserError("which environment? Its env_id is not set.")
    for number in count():
        own = Random(f"{name}/{split}/{seed}/{number}").getrandbits(31)
        yield {"prompt": prompt, "extra_info": {"data_source": name, "seed": own}}
