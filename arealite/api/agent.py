"""The agent interface: from an observation to a prompt, a completion, and an action."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from arealite.api.episode import Action, EpisodeRecord, Seat, finite
from arealite.api.llm import LLMClient, LLMRequest, LLMResponse
from arealite.api.tokenizer import Tokenizer, load_with_transformers
from arealite.base import entries
from arealite.base.errors import UserError, one_line
from arealite.base.registry import Registry

if TYPE_CHECKING:
    from arealite.api.collector_config import AgentConfig
    from arealite.api.experiment_config import ExperimentConfig
    from arealite.api.hooks import TokenizerReader
    from arealite.api.llm import SamplingConfig
    from arealite.api.turns import Origin


def _checked(act: Any) -> Any:
    """Return `act` of a class of agents; it raises UserError if its result is no Action."""

    @wraps(act)
    async def checked_act(self: object, observation: object) -> Action:
        action = await act(self, observation)
        if isinstance(action, Action):
            return action
        name = getattr(act, "__qualname__", "act")
        raise UserError(
            f"{name} returned {action!r:.60}: an agent returns an Action, for example Action(text)."
        )

    return checked_act


class Agent(ABC):
    """The player of one seat in one episode. Every episode gets a new instance."""

    trainable = True
    """False for judges and frozen opponents: their tokens are not trained."""
    templates_observation = False
    """Whether `act` sends an observation through the chat template, after the option
    `system_prompt`. A start checks such prompts. Each derived class that does so says it again."""
    shared: Any = None
    """The object that `share` created for all agents of this config; None without one."""

    def __init_subclass__(cls) -> None:
        """Check the results of `act`. The class does it: an agent has no reference to itself."""
        if "act" in vars(cls):
            setattr(cls, "act", _checked(cls.act))  # noqa: B010  (a method)

    def __init__(self, config: Any, *, client: LLMClient, tokenizer: Tokenizer, seat: Seat) -> None:
        self.config = config
        self.client = client
        self.tokenizer = tokenizer
        self.seat = seat
        self.record = EpisodeRecord(recorded=[*seat.recorded])

    @classmethod
    def share(cls, args: ExperimentConfig, config: Any) -> AbstractAsyncContextManager[Any] | None:
        """Return a context manager for an object that all agents of one config share, or None.

        The worker enters it before the first episode and exits it after the last. Its value
        becomes `shared`. Example: a client of another endpoint.
        """
        return None

    @abstractmethod
    async def act(self, observation: object) -> Action:
        """Build a prompt from an observation, generate, and parse the completion into an action."""

    def reward(self, value: float | None, /, **parts: float) -> None:
        """Add a reward to the latest turn, and named parts to the episode's sums.

        None: the agent has no score in this episode, whatever its other rewards are. The episode
        is not trained, takes no part in the baseline of its group, and is left out of means.

        Raises:
            RuntimeError: The agent is trainable and has not generated yet.
            RewardNotFinite: The reward or a part is not a finite number.
        """
        value, parts = finite(value, parts)
        self.record.is_unscored |= value is None
        if self.record.turns:
            self.record.turns[-1].reward += value or 0.0
        elif self.trainable:
            raise RuntimeError("reward before the agent's first generation")
        sums = self.record.reward_parts
        for name, part in parts.items():
            sums[name] = sums.get(name, 0.0) + part

    async def generate(
        self,
        input_ids: list[int],
        *,
        sampling: SamplingConfig | None = None,
        on_tokens: Callable[[list[int]], None] | None = None,
        origin: Origin | None = None,
        extends: LLMResponse | None = None,
    ) -> LLMResponse:
        """Generate a completion of `input_ids` and record the turn. Concurrent calls are allowed.

        If an earlier attempt of the episode recorded this generation, its tokens are reused.

        Args:
            input_ids: The prompt. Do not change this list later.
            sampling: None: the seat's sampling options.
            on_tokens: Called with each piece of sampled ids, in order, each token exactly once.
            origin: Where the tokens of the prompt come from; None: compared with earlier turns.
            extends: A response of this agent that the prompt was built on: the prompt begins with
                its prompt and its tokens. None: the prompt is compared with earlier turns.
        """
        begin_s = time.perf_counter()
        sampling = sampling or self.seat.sampling
        turn = self.record.begin(input_ids, sampling, origin, extends)
        recorded = turn.response
        if on_tokens is not None and recorded.output_ids:
            on_tokens(recorded.output_ids)
        if recorded.stop_reason:
            self.record.add(turn, recorded)
            return recorded
        request = LLMRequest(
            request_id=f"{self.seat.episode_id}/{self.seat.name}/{turn.index}",
            group_id=self.seat.group_id,
            input_ids=input_ids,
            sampling=sampling,
            min_version=self.seat.min_version,
            resumed=recorded if recorded.output_ids else None,
            on_partial=partial(self.record.store_partial, turn),
            on_tokens=on_tokens,
            num_known_tokens=turn.num_known_tokens,
            json=turn.json,
        )
        response = await self.client.generate(request)
        self.record.seconds_generating += time.perf_counter() - begin_s
        self.record.add(turn, response)
        return response


agents = Registry[type[Agent]].built_in("agent")


class AgentFactory:
    """Creates agents by their `type`. All agents use one client and one tokenizer."""

    def __init__(self, args: ExperimentConfig, *, client: LLMClient, tokenizer: Tokenizer) -> None:
        self.args = args
        self.client = client
        self.tokenizer = tokenizer
        self._shared: dict[int, object] = {}

    async def share(self, config: AgentConfig, stack: AsyncExitStack) -> None:
        """Create the shared object of the agents of `config`; closing `stack` closes it."""
        agent_class = agents.get(config.type)
        shared = agent_class.share(self.args, agents.options(config))
        if shared is not None:
            self._shared[id(config)] = await stack.enter_async_context(shared)

    def make_agent(self, config: AgentConfig, seat: Seat | None = None) -> Agent:
        """Return a new agent for one seat of one episode; None: a default seat."""
        agent_class = agents.get(config.type)
        agent = agent_class(
            agents.options(config),
            client=self.client,
            tokenizer=self.tokenizer,
            seat=seat or Seat(),
        )
        agent.shared = self._shared.get(id(config))
        return agent


def load_tokenizer(path: str) -> Tokenizer:
    """Load the tokenizer of a Hugging Face folder; UserError if it cannot be loaded."""
    readers: list[TokenizerReader] = entries.hooks("tokenizer_reader")
    try:
        tokenizer = entries.first_result(readers, path)
        return load_with_transformers(path) if tokenizer is None else tokenizer
    except Exception as error:  # a config.json or a tokenizer fails in its own way
        raise UserError(
            f"the tokenizer or config.json of '{path}' cannot be loaded "
            f"({one_line(error):.300}). Download these files again."
        ) from error
