"""Language-model generation: request and answer, and the client that agents use.

Tokens in, tokens out: text exists only inside an agent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from arealite.api.fields import opt, sub
from arealite.base.registry import Registry

if TYPE_CHECKING:
    from arealite.api.config import ExperimentConfig


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How tokens are drawn. The defaults sample from the policy itself, as training needs."""

    temperature: float = opt(1.0, "0: greedy; the trainer divides logits by it, too", at_least=0)
    top_p: float = opt(1.0, "1 keeps all; less makes training off-policy", above=0, at_most=1)
    top_k: int = opt(-1, "-1 keeps all; anything else makes training off-policy", at_least=-1)
    max_new_tokens: int = opt(256, "token budget of one generation", at_least=1)
    min_new_tokens: int = opt(0, "no stop token before this many tokens", at_least=0)
    stop: list[str] = sub(list, "strings that end a generation; their tokens stay in the output")
    stop_token_ids: list[int] = sub(list, "token ids that end a generation besides the model's EOS")


@dataclass(frozen=True, kw_only=True)
class SGLangClientConfig:
    """Client of servers that speak SGLang's native HTTP protocol."""

    request_timeout_s: float = opt(300.0, "one generation, resubmissions included", above=0)
    connect_timeout_s: float = opt(3.0, "to reach a server before another one is tried", above=0)
    refresh_s: float = opt(1.0, "how often the list of servers is read again", above=0)
    max_connections: int = opt(1024, "open connections of one worker, over all servers", at_least=1)


@dataclass(frozen=True, kw_only=True)
class LLMClientConfig:
    """Which client the agents generate through."""

    type: str = opt("sglang", "name in the table of clients")
    sglang: SGLangClientConfig = sub(SGLangClientConfig, "options of type=sglang")


class LLMRequest(msgspec.Struct, frozen=True):
    """One generation. Filled by the agent."""

    request_id: str
    """Unique; the server's `rid`, so that it can be aborted."""
    group_id: str
    """Requests of one group share a prompt and go to the same server."""
    input_ids: list[int]
    sampling: SamplingConfig
    deadline_s: float | None = None
    """Seconds from now; None takes the client's `request_timeout_s`."""
    min_version: int = 0
    """Servers that have not confirmed this version get no part of the request."""
    begun: LLMResponse | None = None
    """What an attempt that was cut off sampled of this very generation; it goes on after that."""
    on_partial: Callable[[LLMResponse], None] | None = None
    """Called with all that is sampled so far (stop_reason "") when the generation was cut and goes
    on; of a server that keeps cut generations itself nothing is known before the end."""


class LLMResponse(msgspec.Struct, frozen=True):
    """What was sampled. Filled by the client; the three lists have one length."""

    output_ids: list[int]
    logprobs: list[float]
    """Log-probability of each token at the sampling temperature."""
    versions: list[int]
    """Policy version that sampled each token, as told by the server."""
    stop_reason: str
    """"stop" (a stop token or string) or "length" (the budget is used up)."""
    interruptions: int = 0
    """Times it was cut: retractions told by the server, and resubmissions."""


class LLMClient(ABC):
    """Generates through whichever servers are alive; an interrupted generation is finished before
    it returns."""

    @abstractmethod
    def __init__(self, args: ExperimentConfig, config: LLMClientConfig) -> None:
        """Remember where the servers of the run `args` are registered; connect nothing yet."""

    @abstractmethod
    async def generate(self, request: LLMRequest) -> LLMResponse:
        """Return the finished generation.

        Raises:
            ContextOverflow: prompt + budget exceed the server's context (found before sending).
            GenerationRefused: the request is invalid.
            ServerUnavailable: no server finished it before the deadline.
        """

    async def start(self) -> None:  # noqa: B027  (optional hook)
        """Open connections and find the first server."""

    async def close(self) -> None:  # noqa: B027  (optional hook)
        """Close connections."""

    def stats(self) -> dict[str, float]:
        """Return counters since the start, by the metric's name below `client/`."""
        return {}


clients: Registry[LLMClient] = Registry(
    "llm_client", {"sglang": "arealite.impl.client.sglang:SGLangClient"}
)
