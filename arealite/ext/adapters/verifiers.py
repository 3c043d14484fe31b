"""Adapter of the library verifiers: its environments run with their own agents, tools and rewards.

An environment's agents are programs that verifiers starts. They talk to verifiers' proxy, which
talks to the gateway with the API key of the agent's seat.
"""

from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from copy import copy
from functools import partial
from importlib import import_module
from itertools import count, islice
from random import Random
from typing import Any

from arealite.api.agent import Agent
from arealite.api.env import Env
from arealite.api.task import Row, Task
from arealite.api.trial import TrialConfig
from arealite.base.errors import EpisodeError, UserError
from arealite.base.extras import extra_requirement, import_optional
from arealite.ext.adapters.blocking import Threads
from arealite.ext.adapters.config import VerifiersConfig
from arealite.ext.adapters.foreign import constructing
from arealite.ext.gateway.gateway import Gateway
from arealite.ext.gateway.session import Endpoint

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
            tasks = (task for task in taskset if is_held_out(task) == is_eval)
            if taskset.bounded:
                tasks = [*tasks] or [*taskset]
                rng = Random(f"{split}/{seed}/{turn}")
                rng.shuffle(tasks)
            for task in tasks:
                yield {
                    "prompt": task.data.prompt_text or "(none)",
                    "extra_info": {"number": task.data.idx, "key": task.key},
                }

    async def setup(self) -> None:
        """Load the environment, and start its shared tools, its proxy and the gateway."""
        env = await self._threads.call(load, self.config)
        self._env = env
        self._source = iter(env.taskset)
        gateway = Gateway(self.config.gateway, args=self.args)
        self._gateway = gateway
        self.cleanup.push_async_callback(gateway.close)
        await gateway.start()
        await self.cleanup.enter_async_context(env.serving())
        proxy = env._interception
        proxy.acquire = partial(connect, proxy.acquire)

    async def run(self, task: Task, **agents: Agent) -> None:
        """Run the environment for one episode; each seat gets the rewards of its agent.

        Raises:
            VerifiersFailed: The episode failed, or no agent made a request.
        """
        verifiers_task = await self._threads.call(self._task, task)
        verifiers = import_module("verifiers.v1")
        async with self._gateway.open(task, agents) as session:
            endpoint = session.endpoint
            ENDPOINT.set(endpoint)
            # Equal for all sessions, which share a client of verifiers; `connect` sets the key.
            client = verifiers.EvalClientConfig(
                base_url=endpoint.base_url,
                api_key_var="",
            )
            model = verifiers.ModelContext(
                model=endpoint.model,
                client=client,
            )
            episode = await self._env.run_episode(verifiers_task, model)
        acted = {seat: agent for seat, agent in agents.items() if agent.record.turns}
        if not episode.ok or not acted:
            raise VerifiersFailed(f"{self.config.id}: {failure_of(episode)}")
        parts_by_seat = self._parts_by_seat(episode, agents)
        for seat, agent in acted.items():
            parts = parts_by_seat[seat]
            agent.reward(sum(parts.values()), **parts)

    def _parts_by_seat(self, episode: Any, seats: Iterable[str]) -> dict[str, Counter[str]]:
        """Return the sums of rewards by name, by seat; those of other agents are the first's."""
        parts_by_seat = {seat: Counter[str]() for seat in seats}
        first_parts = parts_by_seat[self.seats[0]]
        for trace in episode.traces:
            parts = parts_by_seat.get(trace.agent.name, first_parts)
            rewards: dict[str, Any] = {}
            for name, reward in trace.rewards.items():
                if reward is not None:
                    rewards[name] = reward.value
            parts.update(rewards)
        return parts_by_seat

    def _task(self, row: Task) -> Any:
        """Return the environment's task of a row. This call blocks.

        Raises:
            UserError: The row is no task of the environment.
        """
        number = row.extra_info.get("number", -1)
        key = row.extra_info.get("key")
        tasks = self._tasks
        num_missing = number + 1 - len(tasks)
        if num_missing > 0:
            tasks += islice(self._source, num_missing)
        has_task = 0 <= number < len(tasks)
        if not has_task or tasks[number].key != key:
            raise UserError(
                f"{row.task_id} is no task of verifiers.id={self.config.id}, or it has changed. "
                "Set dataset.train=generated."
            )
        return tasks[number]


def is_held_out(task: Any) -> bool:
    """Return whether a task of verifiers is an evaluation task."""
    return task.data.idx % HELD_OUT == HELD_OUT - 1


def failure_of(episode: Any) -> str:
    """Return the first error of an episode of verifiers; without one, it made no request."""
    for failed in (*episode.traces, episode):
        for error in failed.errors:
            return f"{error.type}: {error.message}"
    return "it made no request"


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
            seat = session.trace.agent.name
            seat_endpoint = endpoint.seats.get(seat, endpoint)
            session.client = copy(session.client)
            session.client.api_key = seat_endpoint.api_key
        yield slot


def load(config: VerifiersConfig) -> Any:
    """Return the environment.

    Raises:
        UserError: verifiers or the environment is not installed, or its options are wrong.
    """
    import_optional("verifiers", extra_requirement("verifiers"))
    loaders = import_module("verifiers.v1.utils.loaders")
    options = dict(config.options)
    taskset_options = options.get("taskset", {})
    options["taskset"] = {**taskset_options, "id": config.id}
    for seat in config.seats:
        seat_options = options.get(seat, {})
        options[seat] = {
            "runtime": {"type": "subprocess"},
            **seat_options,
        }
    subject = f"env.verifiers.id={config.id!r} with {config.options}"
    with constructing(subject, "id or options, or install the environment"):
        env_config = loaders.resolve_env_config(options)
        return loaders.load_environment(env_config)
