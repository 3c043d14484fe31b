"""Agents: prompts from observations, actions from generations, and a record of exact tokens."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import TYPE_CHECKING, Any

from arealite.api.agent_config import AgentConfig
from arealite.api.checked import checked
from arealite.api.episode import Action, Record, Seat, Turn, finite
from arealite.api.llm import LLMClient, LLMClientConfig, LLMRequest, LLMResponse, clients
from arealite.base.registry import Registry

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from arealite.api.config import ExperimentConfig


class Agent(ABC):
    """Plays one seat of an environment; a new agent is made for every episode."""

    trainable = True
    """False for judges and frozen opponents: their generations are not trained."""
    shared: Any = None
    """The value of the context manager that `share` returned; one for all agents of a config."""

    def __init__(
        self, config: Any, *, client: LLMClient, tokenizer: PreTrainedTokenizerBase, seat: Seat
    ) -> None:
        self.config = config
        self.client = client
        self.tokenizer = tokenizer
        self.seat = seat
        self.record = Record(recorded=seat.recorded)

    @classmethod
    def share(cls, args: ExperimentConfig, config: Any) -> AbstractAsyncContextManager[Any] | None:
        """Return a context manager for a resource that all agents of one config share in a worker.

        An example is the client of another endpoint. The worker enters the context before the first
        episode and exits it after the last. None: agents share nothing.
        """
        return None

    @abstractmethod
    async def act(self, observation: Any) -> Action:
        """Turn an observation into a prompt, generate, and parse the completion into an action."""

    def reward(self, value: float, **parts: float) -> None:
        """Add reward to the latest turn; `parts` are summed by name over the episode.

        Raises:
            RuntimeError: the agent is trained, and has not generated anything yet.
            RewardNotFinite: the reward or a part is not a finite number.
        """
        value, parts = finite(value, parts)
        if self.record.turns:
            self.record.turns[-1].reward += value
        elif self.trainable:
            raise RuntimeError("reward before the agent's first generation")
        for name, part in parts.items():
            self.record.reward_parts[name] = self.record.reward_parts.get(name, 0.0) + part

    async def generate(self, input_ids: list[int]) -> LLMResponse:
        """Generate after `input_ids` with the seat's sampling, and record the turn.

        If an earlier attempt at the episode recorded this generation, the record is returned, or
        continued if it is incomplete.
        """
        record, seat, begin = self.record, self.seat, time.perf_counter()
        index, temperature = record.generations, seat.sampling.temperature
        begun = record.recall(input_ids, seat.sampling) if record.recorded else None
        record.generations += 1
        if begun is not None and begun.stop_reason:
            record.turns.append(Turn(input_ids, begun, temperature, index=index, is_stored=True))
            return begun

        def keep(partial: LLMResponse) -> None:
            record.partial[index] = Turn(input_ids, partial, temperature, index=index)

        request = LLMRequest(
            request_id=f"{seat.episode_id}/{seat.name}/{index}",
            group_id=seat.group_id,
            input_ids=input_ids,
            sampling=seat.sampling,
            min_version=seat.min_version,
            begun=begun,
            on_partial=keep,
        )
        response = await self.client.generate(request)
        record.seconds_generating += time.perf_counter() - begin
        record.partial.pop(index, None)
        record.turns.append(Turn(input_ids, response, temperature, index=index))
        return response


agents: Registry[Agent] = Registry(
    "agent",
    {
        "math_code_single_step": (
            "arealite.impl.agent.math_code_single_step:MathCodeSingleStepAgent"
        ),
        "chat": "arealite.impl.agent.chat:ChatAgent",
        "tool_use": "arealite.impl.agent.tool_use:ToolUseAgent",
        "reasoning": "arealite.impl.agent.reasoning:ReasoningAgent",
        "scripted": "arealite.impl.agent.scripted:ScriptedAgent",
        "fixed_policy": "arealite.impl.agent.fixed_policy:FixedPolicyAgent",
    },
)


class AgentFactory:
    """Makes agents by the name in their config, all of them on one client and one tokenizer."""

    def __init__(
        self,
        args: ExperimentConfig,
        client_config: LLMClientConfig,
        *,
        client: LLMClient | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.args = args
        self.client = client or clients.get(client_config.type)(args, client_config)
        self.tokenizer = tokenizer or load_tokenizer(args.model.path)
        self._shared: dict[int, Any] = {}

    async def share(self, config: AgentConfig, stack: AsyncExitStack) -> None:
        """Enter the shared context of `config`'s agents; `stack` exits it."""
        shared = agents.get(config.type).share(self.args, agents.options(config))
        if shared is not None:
            self._shared[id(config)] = await stack.enter_async_context(shared)

    def make_agent(self, config: AgentConfig, seat: Seat | None = None) -> Agent:
        """Return a new agent for one seat of one episode; None: for a default seat."""
        make, own = agents.get(config.type), agents.options(config)
        agent = make(own, client=self.client, tokenizer=self.tokenizer, seat=seat or Seat())
        agent.shared = self._shared.get(id(config))
        setattr(agent, "act", checked(agent.act))  # noqa: B010  (a method)
        return agent


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Load a Hugging Face tokenizer; transformers is imported only here, because it is slow."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)  # pyright: ignore
