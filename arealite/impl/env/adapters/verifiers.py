"""Adapter of the library verifiers: its environments run with their own agents, tools and rewards.

An environment's agents are programs that verifiers starts. They talk to verifiers' proxy, which
talks to the gateway with the API key of the agent's seat.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from copy import copy
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
from arealite.impl.gateway.gateway import Gateway
from arealite.impl.gateway.session import Endpoint

HELD_OUT = 10
"""Each tenth task is an evaluation task."""
KEY_VARIABLE = "AREALITE_NO_KEY"
"""Not set: each session has its own key. See `VerifiersEnv._connect`."""


class VerifiersFailed(EpisodeError):
    """The environment's episode failed, or its agents made no request."""

    failure_class = "verifiers_failed"


class VerifiersEnv(Env):
    """One episode of an environment of verifiers. Its weighted rewards are parts of the reward."""

    resumable = True

    def __init__(self, args: TrialConfig, config: VerifiersConfig) -> None:
        super().__init__(args, config)
        self.seats = tuple(config.seats)
        self._stack = AsyncExitStack()
        self._threads = Threads(1)
        self._tasks: list[Any] = []
        self._endpoints: dict[str, Endpoint] = {}
        """The session's endpoint of each running agent, by the id of its trace."""

    @classmethod
    def rows(cls, config: VerifiersConfig, *, split: str, seed: int) -> Iterator[Row]:
        """Yield tasks, shuffled if the number of tasks is finite, again and again."""
        taskset, is_eval = load(config).taskset, split == "eval"
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
        self._stack.push_async_callback(self._gateway.close)
        await self._gateway.start()
        await self._stack.enter_async_context(env.serving())
        env._interception.acquire = self._connect(env._interception.acquire)
        url = f"{self._gateway.url}/v1"
        self._client = library().EvalClientConfig(base_url=url, api_key_var=KEY_VARIABLE)

    async def run(self, task: Task, **agents: Agent) -> None:
        """Run the environment for one episode; each seat gets the rewards of its agent.

        Raises:
            VerifiersFailed: The episode failed, or no agent made a request.
        """
        own = await self._threads.call(self._task, task)
        session, ids = self._gateway.open(task, agents), list[str]()

        def begin(trace: Any) -> None:
            ids.append(trace.id)
            self._endpoints[trace.id] = session.endpoint

        model = library().ModelContext(model=session.endpoint.model, client=self._client)
        try:
            episode = await self._env.run_episode(own, model, on_trace=begin)
        finally:
            await session.close()
            for trace_id in ids:
                del self._endpoints[trace_id]
        if session.error is not None:
            raise session.error
        if not episode.ok or not any(agent.record.turns for agent in agents.values()):
            errors = [e for each in (*episode.traces, episode) for e in each.errors]
            why = f"{errors[0].type}: {errors[0].message}" if errors else "no agent made a request"
            raise VerifiersFailed(f"{self.config.id}: {why}")
        for name, agent in agents.items():
            parts = Counter[str]()
            for trace in episode.traces:
                if name == (trace.agent.name if trace.agent.name in agents else self.seats[0]):
                    parts.update({n: r.value for n, r in trace.rewards.items() if r is not None})
            if agent.record.turns:
                agent.reward(
                    sum(parts.values()), **{n.replace(".", "_"): v for n, v in parts.items()}
                )

    async def close(self) -> None:
        """Stop the environment's tools and proxy, and the gateway."""
        await self._stack.aclose()

    def _task(self, row: Task) -> Any:
        """Return the environment's task of a row. This call blocks."""
        number = row.extra_info.get("number")
        while isinstance(number, int) and len(self._tasks) <= number:
            if (task := next(self._source, None)) is None:
                break
            self._tasks.append(task)
        found = self._tasks[number : number + 1] if isinstance(number, int) else []
        if not found or found[0].key != row.extra_info.get("key"):
            what = f"{row.task_id} is no task of verifiers.id={self.config.id}, or it has changed"
            raise UserError(f"{what}. Set dataset.train=generated.")
        return found[0]

    def _connect(self, acquire: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Let each agent without an endpoint of its own use the key of its seat.

        All agents share one HTTP client: a client for each key would cost 20 ms and 1 MB.
        """

        @asynccontextmanager
        async def connected(session: Any) -> AsyncGenerator[Any]:
            async with acquire(session) as slot:
                endpoint = self._endpoints.get(session.trace.id)
                if endpoint is not None and session.ctx.client == self._client:
                    session.client = copy(session.client)
                    seat = endpoint.seats.get(session.trace.agent.name, endpoint)
                    session.client.api_key = seat.api_key
                yield slot

        return connected


def library() -> Any:
    """Return the module verifiers.v1.

    Raises:
        UserError: verifiers is not installed.
    """
    import_optional("verifiers", extra_requirement("verifiers"))
    return import_optional("verifiers.v1", extra_requirement("verifiers"))


def load(config: VerifiersConfig) -> Any:
    """Return the environment.

    Raises:
        UserError: It is not installed, or its options are wrong.
    """
    library()
    loaders = import_optional("verifiers.v1.utils.loaders", extra_requirement("verifiers"))
    options = dict(config.options)
    options["taskset"] = {**options.get("taskset", {}), "id": config.id}
    for seat in config.seats:
        options[seat] = {"runtime": {"type": "subprocess"}, **options.get(seat, {})}
    try:
        if not config.id:
            raise UserError("env.verifiers.id is not set. Set it to an installed environment.")
        return loaders.load_environment(loaders.resolve_env_config(options))
    except (ImportError, ValueError, TypeError, AttributeError) as error:
        what = f"env.verifiers.id={config.id} with {config.options}: {' '.join(str(error).split())}"
        raise UserError(f"{what}. Install the environment, or correct its options.") from error
