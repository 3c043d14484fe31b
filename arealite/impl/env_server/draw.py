"""Which task a reset gets that brings none: rows of a file, or rows that the environment makes."""

from __future__ import annotations

import asyncio
from itertools import count
from pathlib import Path

from arealite.api.env_server import EnvServerConfig, Reset
from arealite.api.task import Task
from arealite.base.errors import UserError
from arealite.impl.env_server.wire import Refused
from arealite.system.data.dataset import load_tasks, make_task
from arealite.system.data.tasks import GENERATED, generate


class Draw:
    """Tasks for resets; a seed always gives the same one."""

    def __init__(self, config: EnvServerConfig) -> None:
        """Raises UserError where the file of tasks cannot be used."""
        self._config = config
        self._seeds = count(config.seed)
        path = config.tasks
        self._tasks = [] if path == GENERATED else load_tasks(str(Path(path)), "train")

    async def task(self, reset: Reset) -> Task:
        """Return the task that a reset asks for.

        Raises:
            Refused: it is none, or the environment makes none.
        """
        try:
            if reset.task is not None:
                name = str(reset.task.get("task_id") or "task")
                return make_task(reset.task, name, "the task of the reset")
            seed = next(self._seeds) if reset.seed is None else reset.seed
            if self._tasks:
                return self._tasks[seed % len(self._tasks)]
            return await asyncio.to_thread(self._first, reset.split, seed)
        except UserError as error:
            raise Refused(str(error)) from error

    def _first(self, split: str, seed: int) -> Task:
        return next(generate(self._config.env, split, seed))
