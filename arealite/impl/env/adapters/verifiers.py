"""Adapter of the library verifiers: its environments run with their own agents, tools and rewards.

An environment's agents are programs that verifiers starts. They talk to verifiers' proxy, which
talks to the gateway with the API key of the agent's seat.
"""

from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from copy import copy
from functools import partial
from importlib import import_module
from itertools import count
from random import Random
from typing import Any

from arealite.api.adapter_config import VerifiersConfig
from arealite.api.agent import Agent
from arealite.api.env import Env
from arealite.api.task import Row, Task
from arealite.api.trial import TrialConfig
from arealite.base.errors import EpisodeError, UserError
from arealite.base.extras import extra_requirement, import_optional
from arealite.impl.env.adapters.blocking import Threads
from arealite.impl.env.adapters.foreign import constructing
from arealite.impl.gateway.gateway import Gateway
from arealite.impl.gateway.session import Endpoint

HELD_OUT = 10
"""Each tenth task is an evaluation task."""
ENDPOINT = ContextVar[Endpoint]("endpoint")
"""The endpoint of the episode that the running task plays."""


class VerifiersFailed(EpisodeError, failure_class="verifiers_failed"):
    """The environment's episode failed, or its agents made no request."""


class VerifiersEnv(Env):
    """One episode of an environment of verifiers. Its weighted rewards are parts of the reward."""

    resumable = True

    def __init__(self, args: TrialConfig, config: VerifiersConfig) -> None:
        super().__init__(args, config)
        self.seats = tuple(config.seats)
        self._threads = Threads(1)
        self._tasks: list[Any] = []

    @classmethod
    def rows(cls, config: VerifiersConfig, *, split: str, seed: int) -> Iterator[Row]:
        """Yield tasks, shuffled if the number of tasks is finite, again and again."""
        taskset = load(config).taskset
        is_eval = split == "eval"
        for turn in count():
            chosen = (t for t in taskset if (t.data.idx % HELD_OUT == HELD_OUT - 1) == is_eval)
            if taskset.bounded:
                chosen = [*chosen] or [*taskset]
                Random(f"{split}/{seed}/{turn}").shuffle(chosen)
            for task in chosen:
                extra_info = {"number": task.data.idx, "key": task.key}
                yield {"prompt": task.data.prompt_text or "(none)", "extra_info": extra_info}

    async def setup(self) -> None:
        """Load the environment, and start its shared tools, its proxy and the gateway."""
        self._env = env = await self._threads.call(load, self.config)
        self._source = iter(env.taskset)
        self._gateway = Gateway(self.config.gateway, args=self.args)
        self.cleanup.push_async_callback(self._gateway.close)
        await self._gateway.start()
        await self.cleanup.enter_async_context(env.serving())
        env._interception.acquire = partial(connect, env._interception.acquire)

    async def run(self, task: Task, **agents: Agent) -> None:
        """Run the environment for one episode; each seat gets the rewards of its agent.

        Raises:
            VerifiersFailed: The episode failed, or no agent made a request.
        """
        own = await self._threads.call(self._task, task)
        vf = import_module("verifiers.v1")
        async with self._gateway.open(task, agents) as session:
            endpoint = session.endpoint
            ENDPOINT.set(endpoint)
            # Equal for all sessions, which share a client of verifiers; `connect` sets the key.
            client = vf.EvalClientConfig(base_url=endpoint.base_url, api_key_var="")
            model = vf.ModelContext(model=endpoint.model, client=client)
            episode = await self._env.run_episode(own, model)
        acted = {name: agent for name, agent in agents.items() if agent.record.turns}
        if not episode.ok or not acted:
            errors = [e for each in (*episode.traces, episode) for e in each.errors]
            why = f"{errors[0].type}: {errors[0].message}" if errors else "it made no request"
            raise VerifiersFailed(f"{self.config.id}: {why}")
        parts = {name: Counter[str]() for name in agents}
        for trace in episode.traces:
            found = {name: each.value for name, each in trace.rewards.items() if each is not None}
            parts.get(trace.agent.name, parts[self.seats[0]]).update(found)
        for name, agent in acted.items():
            agent.reward(sum(parts[name].values()), **parts[name])

    def _task(self, row: Task) -> Any:
        """Return the environment's task of a row. This call blocks.

        Raises:
            UserError: The row is no task of the environment.
        """
        number = row.extra_info.get("number", -1)
        key = row.extra_info.get("key")
        while len(self._tasks) <= number and (task := next(self._source, None)) is not None:
            self._tasks.append(task)
        if not 0 <= number < len(self._tasks) or self._tasks[number].key != key:
            what = f"{row.task_id} is no task of verifiers.id={self.config.id}, or it has changed"
            raise UserError(f"{what}. Set dataset.train=generated.")
        return self._tasks[number]


@asynccontextmanager
async def connect(acquire: Callable[[Any], Any], session: Any) -> AsyncGenerator[Any]:
    """Give an agent without a model of its own the key of its seat.

    All agents share one HTTP client: a client for each key would cost 20 ms and 1 MB.

    Args:
        acquire: The method of verifiers' proxy that this function replaces.
        session: The agent's session at the proxy.
    """
    async with acquire(session) as slot:
        endpoint = ENDPOINT.get()
        if session.ctx.client.base_url == endpoint.base_url:
            session.client = copy(session.client)
            session.client.api_key = endpoint.seats.get(session.trace.agent.name, endpoint).api_key
        yield slot


def load(config: VerifiersConfig) -> Any:
    """Return the environment.

    Raises:
        UserError: verifiers or the environment is not installed, or its options are wrong.
    """
    import_optional("verifiers", extra_requirement("verifiers"))
    loaders = import_module("verifiers.v1.utils.loaders")
    options = dict(config.options)
    options["taskset"] = {**options.get("taskset", {}), "id": config.id}
    for seat in config.seats:
        options[seat] = {"runtime": {"type": "subprocess"}, **options.get(seat, {})}
    given = f"env.verifiers.id={config.id!r} with {config.options}"
    with constructing(given, "id or options, or install the environment"):
        return loaders.load_environment(loaders.resolve_env_config(options))
