"""Base class and seeded rows for adapters of environments from other packages."""

from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from itertools import count
from random import Random
from typing import Any

from arealite.api.env import Env
from arealite.api.task import Row, Task
from arealite.api.trial import TrialConfig
from arealite.base.errors import UserError
from arealite.base.extras import import_optional
from arealite.ext.adapters.blocking import EnvStuck, Instance, Threads, start
from arealite.ext.adapters.config import LibraryConfig
from arealite.ext.rewards.user_functions import import_function


def seed_of(task: Task) -> int:
    """Return the task's seed.

    Raises:
        UserError: The row has no seed.
    """
    seed = task.extra_info.get("seed")
    if isinstance(seed, int):
        return seed
    raise UserError(
        f"{task.task_id}: extra_info.seed must be an integer. "
        "Add it to the row, or set dataset.train=generated."
    )


class LibraryEnv(Env):
    """An environment of another package, constructed by `env_id` or `factory`. A task is a seed."""

    package: str
    """Module whose function `make` takes `env_id`."""
    install: str
    """Requirement for pip that installs the package."""
    check_row = staticmethod(seed_of)

    def __init__(self, args: TrialConfig, config: LibraryConfig) -> None:
        super().__init__(args, config)
        self.threads = Threads(config.threads)
        self._idle: list[Instance] = []

    @classmethod
    def rows(cls, config: LibraryConfig, *, split: str, seed: int) -> Iterator[Row]:
        """Yield rows with different seeds, without end."""
        module, _, name = (config.factory or config.env_id).rpartition(":")
        if name == "make":  # the game's name is its argument, or that of its module
            _, _, module_name = module.rpartition(".")
            name = str(config.kwargs.get("id") or module_name)
        prompt = cls.prompt(config, name)
        return seeded_rows(name, prompt, split, seed)

    @classmethod
    def prompt(cls, config: Any, name: str) -> str:
        """Return the prompt of generated rows."""
        return name

    async def setup(self) -> None:
        """Create the first environment and check it.

        Raises:
            UserError: The environment cannot be constructed or does not match the config.
        """
        self._make = self._maker()
        with constructing(f"env.{self.package}: the environment", "env_id, factory or kwargs"):
            async with self.instance() as instance:
                self.check_env(instance.env)

    @abstractmethod
    def check_env(self, env: object) -> None:
        """Check that agents can act in `env`.

        Raises:
            UserError: They cannot.
        """

    @asynccontextmanager
    async def instance(self) -> AsyncGenerator[Instance]:
        """Acquire an environment. A failed episode closes it; otherwise it is reused."""
        if self._idle:
            instance = self._idle.pop()
        else:
            instance = await self.threads.call(self._new_instance, drop=Instance.close)
        try:
            yield instance
        except BaseException:
            start(instance.close)
            raise
        self._idle.append(instance)

    def _new_instance(self) -> Instance:
        return Instance(self._make(), self.threads)

    async def close(self) -> None:
        """Close all idle environments."""
        while self._idle:
            close = self._idle.pop().close
            try:
                await self.threads.call(close)
            except EnvStuck:
                start(close)

    def _maker(self) -> Callable[[], object]:
        config = self.config
        if not config.factory:
            if not config.env_id:
                raise UserError(f"env.{self.package}: set env_id, or factory=module:callable.")
            package = import_optional(self.package, self.install)
            return partial(package.make, config.env_id, **config.kwargs)
        option = f"env.{self.package}.factory={config.factory}"
        factory = import_function(config.factory, option)
        return partial(factory, **config.kwargs)


@contextmanager
def constructing(subject: str, options: str) -> Iterator[None]:
    """Turn an error of a library into a UserError, in one line.

    Args:
        subject: The environment or dataset that the library constructs.
        options: The options to correct.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        cause = " ".join(str(error).split())
        raise UserError(f"{subject} cannot be constructed: {cause}. Correct {options}.") from error


def seeded_rows(name: str, prompt: str, split: str, seed: int) -> Iterator[Row]:
    """Yield rows with different seeds, without end.

    Args:
        name: Name of the environment; part of the seeds and the rows' `data_source`.
        prompt: Prompt of all rows.
        split: Different splits get different seeds.
        seed: Different seeds give different rows.

    Raises:
        UserError: `name` is "".
    """
    if not name:
        raise UserError("the environment's env_id is not set. Set it to the name of a game.")
    for number in count():
        rng = Random(f"{name}/{split}/{seed}/{number}")
        row_seed = rng.getrandbits(31)
        yield {
            "prompt": prompt,
            "extra_info": {"data_source": name, "seed": row_seed},
        }
