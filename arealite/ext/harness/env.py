"""Episodes that an agent outside AReaLite plays: a function, a program, or an agent elsewhere.

The agent talks to the model through the gateway. Its reward is what it returns, writes or posts, or
the score of a reward function.
"""

import asyncio
import os
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager, suppress
from functools import cached_property
from math import fsum
from typing import Any, cast

import msgspec
from msgspec import structs

from arealite.api.agent import Agent
from arealite.api.env import Env
from arealite.api.reward import Score, make_reward
from arealite.api.task import Row, Task
from arealite.api.trial import TrialConfig
from arealite.base import log
from arealite.base.config_tree import check_constraints
from arealite.base.errors import EpisodeError, UserError
from arealite.base.registry import unknown
from arealite.ext.gateway.gateway import Gateway
from arealite.ext.gateway.session import GatewaySession
from arealite.ext.harness.config import HarnessConfig
from arealite.ext.harness.function_agents import HarnessFunction
from arealite.ext.harness.programs import AT, FinishedProgram, HarnessFailed, Programs
from arealite.ext.hosting.server.env_messages import read_token
from arealite.ext.tools.env import arithmetic
from arealite.system.health.waits import Wait

logger = log.get(__name__)

PROXIES = ("http_proxy", "all_proxy")
"""Variables with the proxy of http URLs, in lower case."""


class HarnessSilent(EpisodeError, failure_class="harness_silent"):
    """An agent elsewhere leased a task, and then made no request for `idle_s`."""


class HarnessEnv(Env):
    """Gives each episode's agent an endpoint, and its turns the agent's reward."""

    resumable = True
    has_own_agents = True

    def __init__(self, args: TrialConfig, config: HarnessConfig) -> None:
        """Import the function, or check the program.

        Raises:
            UserError: An option is wrong, or the function or program cannot be found.
        """
        super().__init__(args, config)
        check_constraints(config, AT)
        ways = [name for name in ("run", "command", "pull") if getattr(config, name)]
        if len(ways) != 1:
            raise UserError(
                f"env.harness sets {' and '.join(ways) or 'no way to run an agent'}. "
                "Set exactly one of run, command and pull."
            )
        self.seats = tuple(config.seats)
        self.scorer = make_reward(config.reward)
        token = read_token(config.gateway.token_env, f"{AT}gateway.")
        self.gateway = Gateway(config.gateway, args=args, token=token)
        self.programs = Programs(config) if config.command else None
        self.functions = HarnessFunction(config.run) if config.run else None

    @classmethod
    def check_row_options(cls, config: HarnessConfig, task: Task) -> None:
        """Check the placeholders of the command."""
        config.check_task(task)

    @staticmethod
    def scores_with_reward(config: HarnessConfig) -> bool:
        """Return whether agents give no rewards."""
        return config.reward_from == "function"

    @classmethod
    def rows(cls, config: HarnessConfig, *, split: str, seed: int) -> Iterator[Row]:
        """Yield arithmetic tasks by `config.arithmetic`, without end."""
        return arithmetic(config.arithmetic, split=split, seed=seed)

    async def setup(self) -> None:
        """Start the gateway, the event loop of functions, and the folder of programs."""
        cleanup = self.cleanup
        gateway = self.gateway
        programs = self.programs
        cleanup.push_async_callback(self.scorer.close)
        if self.functions:
            self.functions.setup(cleanup)
        if programs:
            await programs.setup(cleanup)
        cleanup.push_async_callback(gateway.close)
        await gateway.start(programs.socket if programs else "")
        logger.info("gateway", url=gateway.url)

    async def run(self, task: Task, **agents: Agent) -> None:
        """Run the agent for one episode, and set its reward.

        Raises:
            HarnessFailed: The agent failed, made no request, or gave no reward.
            HarnessSilent: An agent elsewhere stopped.
        """
        any_agent = next(iter(agents.values()))
        a_person_plays = not hasattr(any_agent.tokenizer, "decode")
        if a_person_plays:
            raise UserError(
                "the agent of env.type=harness needs the model of a run. "
                "Use `arealite train`, `eval` or `collect`."
            )
        async with self.gateway.open(task, agents) as session, AsyncExitStack() as stack:
            stack.enter_context(self._proxy_hint(session))
            if self.programs:
                program = self.programs.run(task, session.endpoint)
                outcome = await stack.enter_async_context(program)
            elif self.functions:
                outcome = await self.functions.run(task, session.endpoint)
            else:
                outcome = await self._wait_for_end(session)
            await session.close()  # first: it drops turns that the agent did not receive
            await self._reward_agents(task, session, outcome, agents)

    async def _reward_agents(
        self,
        task: Task,
        session: GatewaySession,
        outcome: object,
        agents: dict[str, Agent],
    ) -> None:
        """Set the rewards of the agents that made requests.

        Args:
            task: The task of the episode.
            session: The closed session of the episode.
            outcome: A program after its end, the result of a function, or None.
            agents: The agents of all seats.

        Raises:
            HarnessFailed: No agent made a request, or gave a reward that can be read.
        """
        acted = {seat: agent for seat, agent in agents.items() if agent.record.turns}
        if not acted:
            raise HarnessFailed("the agent made no request to its endpoint's base_url")
        begin = time.perf_counter()
        stats = session.stats
        scores = await self._scores(task, session, outcome)
        first_agent = next(iter(acted.values()))
        record = first_agent.record
        record.seconds_scoring += time.perf_counter() - begin
        num_branches = 0
        for name, count in stats.items():
            if name.startswith("branches_"):
                num_branches += count
        record.reward_parts["malformed_calls"] = float(stats["malformed_calls"])
        record.reward_parts["branches"] = float(num_branches)
        score_of_all = scores.get("", Score(0.0))
        for seat, agent in acted.items():
            score = scores.get(seat, score_of_all)
            agent.reward(score, **getattr(score, "parts", {}))

    @contextmanager
    def _proxy_hint(self, session: GatewaySession) -> Generator[None]:
        """Name the agent's proxy in a failure of the body if the session received no request."""
        opened_at = session.last_request
        try:
            yield
        except HarnessFailed as error:
            environment = self.config.environment if self.programs else os.environ
            variable = proxy_variable(environment)
            if not variable or session.last_request > opened_at:
                raise
            raise HarnessFailed(
                f"no request reached the gateway, and {variable} is set. "
                f"Does the client ignore NO_PROXY? {error}"
            ) from error

    async def _wait_for_end(self, session: GatewaySession) -> None:
        """Offer a session to agents elsewhere; return when an agent has ended it.

        Raises:
            HarnessSilent: The agent made no request for `idle_s`, and none is running.
        """
        loop = asyncio.get_running_loop()
        idle_s = self.config.idle_s
        self.gateway.offered.put_nowait(session)
        with Wait.without_deadline():
            await session.leased.wait()
        while not session.ended.is_set():
            remaining_s = idle_s
            if not session.in_flight:
                remaining_s = session.last_request + idle_s - loop.time()
            if remaining_s <= 0:
                raise HarnessSilent(
                    f"the session made no request for {AT}idle_s={idle_s:g} s, and was not ended"
                )
            with suppress(TimeoutError):
                await asyncio.wait_for(session.ended.wait(), remaining_s)

    async def _scores(
        self,
        task: Task,
        session: GatewaySession,
        outcome: Any,
    ) -> Mapping[str, Score | None]:
        """Return the reward of each seat by name; "": of all seats. None: it has no score.

        Raises:
            HarnessFailed: The agent gave no reward, or one that cannot be read.
        """
        source = self.config.reward_from
        finished = outcome if isinstance(outcome, FinishedProgram) else None
        if session.reported is not None and source in ("auto", "posted"):
            reward, parts = session.reported
            return {"": Score(reward, **parts)}
        if finished and source in ("auto", "file"):
            file = self.config.reward_file
            written = finished.read(file)
            if written is not None or source == "file":
                return {"": parse(written, f"{AT}reward_file={file}")}
        if finished and source == "last_line":
            _, _, last_line = finished.stdout_tail.rpartition("\n")
            return {"": parse(last_line, "the last line of stdout")}
        is_reward = not isinstance(outcome, str | FinishedProgram | None)
        if is_reward and source in ("auto", "return"):
            return self._by_seat(outcome)
        if source not in ("auto", "function"):
            raise HarnessFailed(f"{AT}reward_from={source}: the agent gave no reward that way")
        answer: Any = outcome
        extra_info: dict[str, str] = {}
        if finished:
            answer = finished.stdout_tail
            extra_info = {"folder": str(finished.folder)}
        answer = answer or session.answer
        return {"": await self._score(task, answer, extra_info)}

    def _by_seat(self, returned: Any) -> dict[str, Score]:
        """Return the scores in the result of a function: of each seat, or of all.

        Raises:
            HarnessFailed: It is no reward, or a name is no seat.
        """
        path = self.config.run
        seats = self.seats
        rewards: dict[str, object] = {"": returned}
        if isinstance(returned, dict) and len(seats) > 1:
            by_name = cast(dict[str, object], returned)
            names_a_seat = not by_name.keys().isdisjoint(seats)
            if names_a_seat or any(isinstance(reward, dict) for reward in by_name.values()):
                rewards = by_name
        for seat in rewards:
            if seat and seat not in seats:
                raise HarnessFailed(f"{path} returned rewards: {unknown('seat', seat, seats)}")
        return {seat: score_of(reward, path) for seat, reward in rewards.items()}

    @cached_property
    def _scoring(self) -> asyncio.Task[None]:
        """The setup of the reward function, which begins at its first use."""
        return asyncio.create_task(self.scorer.setup())

    async def _score(self, task: Task, answer: str, extra_info: dict[str, str]) -> Score | None:
        """Score an answer with the reward function; None: it has no score."""
        if self.scorer.needs_truth and task.ground_truth is None:
            raise HarnessFailed(
                "the agent gave no reward, and the row has no ground_truth to score its answer. "
                f"Return a reward, or set {AT}reward.type."
            )
        await asyncio.shield(self._scoring)
        task = structs.replace(task, extra_info=task.extra_info | extra_info)
        score = await self.scorer.score_task(answer, task)
        if score is None or isinstance(score, Score):
            return score
        return Score(score)


def parse(written: str | None, source: str) -> Score:
    """Parse a reward: JSON of a number or an object.

    Args:
        written: The JSON; None: it was not written.
        source: Names the file or line in an error.

    Raises:
        HarnessFailed: There is no text, or it is no reward.
    """
    try:
        return score_of(msgspec.json.decode(written or ""), source)
    except msgspec.DecodeError as error:
        problem = "is missing" if written is None else f"is {written!r:.60}"
        raise HarnessFailed(
            f'{source}: the reward {problem}. Write a number, or an object like {{"reward": 1.0}}.'
        ) from error


def score_of(reward: object, source: str) -> Score:
    """Convert a number, or a dict of parts whose sum or item `reward` is the reward.

    Args:
        reward: The number or dict.
        source: Names the function, file or line in an error.

    Raises:
        HarnessFailed: It is neither.
    """
    numbers: dict[str, Any] = {"reward": reward}
    if isinstance(reward, dict):
        numbers = cast(dict[str, Any], reward)
    try:
        parts = {name: float(number) for name, number in numbers.items()}
        total = fsum(parts.values())
        return Score(parts.pop("reward", total), **parts)
    except (TypeError, ValueError) as error:
        raise HarnessFailed(
            f"{source} gave {reward!r:.60}, and must give a number, or a dict of numbers"
        ) from error


def proxy_variable(environment: Mapping[str, str]) -> str:
    """Return the name of the variable that sets a proxy for http URLs; "" without one."""
    for name, value in environment.items():
        if value and name.lower() in PROXIES:
            return name
    return ""
