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
from arealite.api.harness_config import HarnessConfig
from arealite.api.reward import Score, make_reward
from arealite.api.task import Row, Task
from arealite.api.trial import TrialConfig
from arealite.base import log
from arealite.base.config import check_constraints
from arealite.base.errors import EpisodeError, UserError
from arealite.base.proxies import proxy_variable
from arealite.base.registry import unknown
from arealite.impl.env.harness.functions import Functions
from arealite.impl.env.harness.programs import AT, Finished, HarnessFailed, Programs
from arealite.impl.env.tools import arithmetic
from arealite.impl.env_server.wire import read_token
from arealite.impl.gateway.gateway import Gateway
from arealite.impl.gateway.session import Session
from arealite.system.health.waits import Wait

logger = log.get(__name__)


class HarnessSilent(EpisodeError, failure_class="harness_silent"):
    """An agent elsewhere leased a task, and then made no request for `idle_s`."""


class HarnessEnv(Env):
    """Gives each episode's agent an endpoint, and its turns the agent's reward."""

    resumable = True

    def __init__(self, args: TrialConfig, config: HarnessConfig) -> None:
        """Import the function, or check the program.

        Raises:
            UserError: An option is wrong, or the function or program cannot be found.
        """
        super().__init__(args, config)
        check_constraints(config, AT)
        ways = [name for name in ("run", "command", "pull") if getattr(config, name)]
        if len(ways) != 1:
            what = f"env.harness sets {' and '.join(ways) or 'no way to run an agent'}"
            raise UserError(f"{what}. Set exactly one of run, command and pull.")
        self.seats = tuple(config.seats)
        self.scorer = make_reward(config.reward)
        token = read_token(config.gateway.token_env, f"{AT}gateway.")
        self.gateway = Gateway(config.gateway, args=args, token=token)
        self.programs = Programs(config) if config.command else None
        self.functions = Functions(config.run) if config.run else None

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
        if not hasattr(next(iter(agents.values())).tokenizer, "decode"):  # a person plays
            what = "the agent of env.type=harness needs the model of a run"
            raise UserError(f"{what}. Use `arealite train`, `eval` or `collect`.")
        async with self.gateway.open(task, agents) as session, AsyncExitStack() as stack:
            stack.enter_context(self._proxy_hint(session))
            if self.programs:
                result = await stack.enter_async_context(self.programs.run(task, session.endpoint))
            elif self.functions:
                result = await self.functions.run(task, session.endpoint)
            else:
                result = await self._wait_for_end(session)
            await session.close()  # first: it drops turns that the agent did not receive
            acted = {name: each for name, each in agents.items() if each.record.turns}
            if not acted:
                raise HarnessFailed("the agent made no request to its endpoint's base_url")
            begin = time.perf_counter()
            stats = session.stats
            scores = await self._scores(task, session, result)
            first = next(iter(acted.values())).record
            first.seconds_scoring += time.perf_counter() - begin
            first.reward_parts["malformed_calls"] = float(stats["malformed_calls"])
            branches = [count for name, count in stats.items() if name.startswith("branches_")]
            first.reward_parts["branches"] = float(sum(branches))
            for name, each in acted.items():
                score = scores.get(name, scores.get("", Score(0.0)))
                each.reward(score, **getattr(score, "parts", {}))

    @contextmanager
    def _proxy_hint(self, session: Session) -> Generator[None]:
        """Name the agent's proxy in a failure of the body if the session received no request."""
        opened_at = session.last_request
        try:
            yield
        except HarnessFailed as error:
            environment = self.config.environment if self.programs else os.environ
            variable = proxy_variable(environment)
            if not variable or session.last_request > opened_at:
                raise
            what = f"no request reached the gateway, and {variable} is set"
            raise HarnessFailed(f"{what}. Does the client ignore NO_PROXY? {error}") from error

    async def _wait_for_end(self, session: Session) -> None:
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
            left = idle_s if session.in_flight else session.last_request + idle_s - loop.time()
            if left <= 0:
                what = f"the session made no request for {AT}idle_s={idle_s:g} s"
                raise HarnessSilent(f"{what}, and was not ended")
            with suppress(TimeoutError):
                await asyncio.wait_for(session.ended.wait(), left)

    async def _scores(
        self, task: Task, session: Session, result: Any
    ) -> Mapping[str, Score | None]:
        """Return the reward of each seat by name; "": of all seats. None: it has no score.

        Raises:
            HarnessFailed: The agent gave no reward, or one that cannot be read.
        """
        source = self.config.reward_from
        file = self.config.reward_file
        finished = result if isinstance(result, Finished) else None
        if session.reported is not None and source in ("auto", "posted"):
            value, parts = session.reported
            return {"": Score(value, **parts)}
        if finished and source in ("auto", "file"):
            written = finished.read(file)
            if written is not None or source == "file":
                return {"": parse(written, f"{AT}reward_file={file}")}
        if finished and source == "last_line":
            return {"": parse(finished.text.rpartition("\n")[2], "the last line of stdout")}
        if source in ("auto", "return") and not isinstance(result, str | Finished | None):
            return self._by_seat(result)
        if source not in ("auto", "function"):
            raise HarnessFailed(f"{AT}reward_from={source}: the agent gave no reward that way")
        text: Any = finished.text if finished else result
        folder = {"folder": str(finished.folder)} if finished else {}
        return {"": await self._score(task, text or session.answer, folder)}

    def _by_seat(self, result: Any) -> dict[str, Score]:
        """Return the scores in the result of a function: of each seat, or of all.

        Raises:
            HarnessFailed: It is no reward, or a name is no seat.
        """
        path = self.config.run
        seats = self.seats
        found = {"": result}
        if isinstance(result, dict) and len(seats) > 1:
            named = cast(dict[str, object], result)
            if {*named} & {*seats} or any(isinstance(each, dict) for each in named.values()):
                found = named
        if wrong := [name for name in found if name and name not in seats]:
            raise HarnessFailed(f"{path} returned rewards: {unknown('seat', wrong[0], seats)}")
        return {name: score_of(each, path) for name, each in found.items()}

    @cached_property
    def _scoring(self) -> asyncio.Task[None]:
        """The setup of the reward function, which begins at its first use."""
        return asyncio.create_task(self.scorer.setup())

    async def _score(self, task: Task, text: str, folder: dict[str, str]) -> Score | None:
        """Score an answer with the reward function; None: it has no score."""
        if self.scorer.needs_truth and task.ground_truth is None:
            what = "the agent gave no reward, and the row has no ground_truth to score its answer"
            raise HarnessFailed(f"{what}. Return a reward, or set {AT}reward.type.")
        await asyncio.shield(self._scoring)
        task = structs.replace(task, extra_info={**task.extra_info, **folder})
        found = await self.scorer.score_task(text, task)
        return found if isinstance(found, Score | None) else Score(found)


def parse(text: str | None, where: str) -> Score:
    """Parse a reward: JSON of a number or an object.

    Raises:
        HarnessFailed: There is no text, or it is no reward.
    """
    try:
        return score_of(msgspec.json.decode(text or ""), where)
    except msgspec.DecodeError as error:
        was = "is missing" if text is None else f"is {text!r:.60}"
        wanted = 'Write a number, or an object like {"reward": 1.0}'
        raise HarnessFailed(f"{where}: the reward {was}. {wanted}.") from error


def score_of(found: object, where: str) -> Score:
    """Convert a number, or a dict of parts whose sum or item `reward` is the reward.

    Raises:
        HarnessFailed: It is neither.
    """
    given: dict[str, Any] = cast(Any, found) if isinstance(found, dict) else {"reward": found}
    try:
        parts = {name: float(value) for name, value in given.items()}
        return Score(parts.pop("reward", fsum(parts.values())), **parts)
    except (TypeError, ValueError) as error:
        wanted = "and must give a number, or a dict of numbers"
        raise HarnessFailed(f"{where} gave {found!r:.60}, {wanted}") from error
